"""One layer of the decoder: attention and MLP with fused projections, a residual around each."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from specjax.models.activations import ACTIVATIONS
from specjax.models.architecture import DecoderConfig
from specjax.models.attention import attend
from specjax.models.experts import UNBIASED, Biases, Experts, mix_experts
from specjax.models.linear import linear, precision_of
from specjax.models.mlp import gated_mlp, plain_mlp
from specjax.models.norms import NORMS
from specjax.models.rope import rotate


def initial(rngs: nnx.Rngs, name: str, axes: tuple[str, ...], config: DecoderConfig) -> nnx.Param:
    """A parameter to start training from; norms start as the identity."""
    shape = tuple(config.axis_sizes[axis] for axis in axes)
    if name.endswith("norm"):
        return nnx.Param(jnp.full(shape, 0.0 if config.norm == "rms_plus_one" else 1.0))
    return nnx.Param(jax.random.normal(rngs.params(), shape) * 0.02)


# What a scan hands to a layer as the stack of all layers, not as the layer's own.
KEPT_STACKED = ("experts_gate_up", "experts_down", "experts_gate_up_bias", "experts_down_bias")


class Layer(nnx.Module):
    """Attention and MLP, normed before, after or both; stacked over layers or single."""

    qkv: nnx.Param
    qkv_bias: nnx.Param
    q_norm: nnx.Param
    k_norm: nnx.Param
    sinks: nnx.Param
    out: nnx.Param
    out_bias: nnx.Param
    router: nnx.Param
    router_bias: nnx.Param
    experts_gate_up: nnx.Param
    experts_gate_up_bias: nnx.Param
    experts_down: nnx.Param
    experts_down_bias: nnx.Param
    gate_up: nnx.Param
    up: nnx.Param
    up_bias: nnx.Param
    down: nnx.Param
    down_bias: nnx.Param

    def __init__(
        self, config: DecoderConfig, axes: Mapping[str, tuple[str, ...]], *, rngs: nnx.Rngs
    ):
        self.config = config
        for name, parameter_axes in axes.items():
            setattr(self, name, initial(rngs, name, parameter_axes, config))

    def __call__(self, x, layer, cache, seen, turn):
        """Residual stream after layer number ``layer``, and the cache with its KV written."""
        inner = self._before("attention_norm", x)
        attended, cache = self._attention(inner, layer, cache, seen, turn)
        x = x + self._after("post_attention_norm", attended)
        mixed = self._mlp(self._before("mlp_norm", x), layer)
        return x + self._after("post_mlp_norm", mixed), cache

    def _before(self, name, x):
        return self._norm(name, x) if self.config.pre_norm else x

    def _after(self, name, x):
        return self._norm(name, x) if self.config.post_norm else x

    def _norm(self, name, x):
        bias = getattr(self, f"{name}_bias")[...] if self.config.norm == "layer" else None
        return self._normed(x, getattr(self, name)[...], bias)

    def _normed(self, x, weight, bias=None):
        return NORMS[self.config.norm](x, weight, bias, self.config.rms_norm_eps)

    def _attention(self, x, layer, cache, seen, turn):
        config = self.config
        heads = linear(x, self.qkv[...])
        if config.qkv_bias:
            heads = heads + self.qkv_bias[...]
        q, k, v = heads[..., : config.group, :], heads[..., -2, :], heads[..., -1, :]
        if config.qk_norm:
            q, k = self._normed(q, self.q_norm[...]), self._normed(k, self.k_norm[...])
        if config.whole_qk_norm:
            q, k = self._whole(q, self.q_norm[...]), self._whole(k, self.k_norm[...])
        if turn is not None:
            q, k = rotate(q, turn), rotate(k, turn)
        cache = cache.write(layer, k.swapaxes(1, 2), v.swapaxes(1, 2))
        if isinstance(layer, int):
            # Without it XLA's CPU backend copies the cache at every layer of an unrolled step.
            cache = lax.optimization_barrier(cache)
        keys, values = cache.layer(layer)
        mixed = attend(
            q,
            keys,
            values,
            seen,
            precision_of(x.dtype),
            scale=config.attention_scale,
            softcap=config.attention_softcap,
            sinks=self.sinks[...] if config.sinks else None,
        )
        return self._biased(linear(mixed, self.out[...], inputs=3), "out_bias"), cache

    def _whole(self, x, weight):
        """Norms all heads together."""
        flat = x.reshape(*x.shape[:2], -1)
        return self._normed(flat, weight.reshape(-1)).reshape(x.shape)

    def _biased(self, x, name):
        return x + getattr(self, name)[...] if self.config.output_bias else x

    def _mlp(self, x, layer):
        config = self.config
        activation = ACTIVATIONS[config.activation]
        if config.experts is not None:
            return self._experts(x, layer, config.experts, activation)
        if config.gated:
            out = gated_mlp(x, self.gate_up[...], self.down[...], activation)
        else:
            bias = self.up_bias[...] if config.output_bias else None
            out = plain_mlp(x, self.up[...], bias, self.down[...], activation)
        return self._biased(out, "down_bias")

    def _experts(self, x, layer, routing, activation):
        def stack(name):
            own = getattr(self, name)[...]
            return own[None] if isinstance(layer, int) else own

        weights = stack("experts_gate_up"), stack("experts_down")
        biases = UNBIASED
        if routing.biased:
            added = stack("experts_gate_up_bias"), stack("experts_down_bias")
            biases = Biases(self.router_bias[...], *added)
        experts = Experts(*weights, 0 if isinstance(layer, int) else layer, biases)
        return mix_experts(x, self.router[...], experts, routing, activation)

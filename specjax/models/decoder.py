"""One decoder-only transformer for the Llama family; which member it is, is data.

Modules hold parameters only: the cache is passed in and returned.
"""

import functools
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from specjax.cache import KVCache, positions, visible
from specjax.models.attention import attend
from specjax.models.linear import embedding, head, linear, precision_of, rms_norm
from specjax.models.quantised import check_scheme, quantise, quantised_axes
from specjax.models.rope import Rope, rotate, rotation
from specjax.types import TargetOutput


@dataclass(frozen=True)
class DecoderConfig:
    """What distinguishes one model of the family from another.

    ``windows`` holds one sliding window a layer (None: full attention), or is empty for none.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    rms_norm_eps: float = 1e-5
    rope: Rope = Rope()
    qkv_bias: bool = False
    qk_norm: bool = False
    tie_embeddings: bool = False
    windows: tuple[int | None, ...] = ()

    def __post_init__(self):
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"{self.num_heads} query heads cannot share {self.num_kv_heads} KV heads evenly"
            )
        if self.windows and len(self.windows) != self.num_layers:
            raise ValueError(f"{len(self.windows)} windows given for {self.num_layers} layers")

    @property
    def group(self) -> int:
        return self.num_heads // self.num_kv_heads

    @property
    def axis_sizes(self) -> dict[str, int]:
        """Length of each logical axis that a parameter may have."""
        return {
            "layers": self.num_layers,
            "vocab": self.vocab_size,
            "embed": self.hidden_size,
            "mlp": self.intermediate_size,
            "kv_heads": self.num_kv_heads,
            "group": self.group,
            "group_qkv": self.group + 2,
            "head": self.head_dim,
            "gate_up": 2,
        }


ENDS = {"embed": ("vocab", "embed"), "norm": ("embed",), "head": ("vocab", "embed")}
LAYER = {
    "attention_norm": ("embed",),
    "qkv": ("embed", "kv_heads", "group_qkv", "head"),
    "qkv_bias": ("kv_heads", "group_qkv", "head"),
    "q_norm": ("head",),
    "k_norm": ("head",),
    "out": ("kv_heads", "group", "head", "embed"),
    "mlp_norm": ("embed",),
    "gate_up": ("embed", "gate_up", "mlp"),
    "down": ("mlp", "embed"),
}


def parameter_axes(config: DecoderConfig, stacked: bool) -> dict[str, Any]:
    """Logical axes of every parameter, in the tree that the decoder takes."""
    absent = {
        name
        for name, present in {
            "head": not config.tie_embeddings,
            "qkv_bias": config.qkv_bias,
            "q_norm": config.qk_norm,
            "k_norm": config.qk_norm,
        }.items()
        if not present
    }
    ends = {name: axes for name, axes in ENDS.items() if name not in absent}
    layer = {name: axes for name, axes in LAYER.items() if name not in absent}
    if stacked:
        return ends | {"layers": {name: ("layers", *axes) for name, axes in layer.items()}}
    return ends | {"layers": {index: dict(layer) for index in range(config.num_layers)}}


def _initial(rngs, axes, config):
    shape = tuple(config.axis_sizes[axis] for axis in axes)
    matrix = [axis for axis in axes if axis != "layers"]
    if matrix in (["embed"], ["head"]):
        return nnx.Param(jnp.ones(shape))
    return nnx.Param(jax.random.normal(rngs.params(), shape) * 0.02)


class Layer(nnx.Module):
    """Pre-norm attention and SwiGLU with fused projections; stacked over layers or single."""

    attention_norm: nnx.Param
    qkv: nnx.Param
    qkv_bias: nnx.Param
    q_norm: nnx.Param
    k_norm: nnx.Param
    out: nnx.Param
    mlp_norm: nnx.Param
    gate_up: nnx.Param
    down: nnx.Param

    def __init__(self, config: DecoderConfig, axes: dict[str, tuple[str, ...]], *, rngs: nnx.Rngs):
        self.config = config
        for name, parameter_axes in axes.items():
            setattr(self, name, _initial(rngs, parameter_axes, config))

    def __call__(self, x, layer, cache, seen, turn):
        """Residual stream after layer number ``layer``, and the cache with its KV written."""
        attended, cache = self._attention(x, layer, cache, seen, turn)
        x = x + attended
        gate, up = jnp.moveaxis(linear(self._norm(x, self.mlp_norm), self.gate_up[...]), 2, 0)
        return x + linear(jax.nn.silu(gate) * up, self.down[...]), cache

    def _norm(self, x, weight):
        return rms_norm(x, weight[...], self.config.rms_norm_eps)

    def _attention(self, x, layer, cache, seen, turn):
        config = self.config
        heads = linear(self._norm(x, self.attention_norm), self.qkv[...])
        if config.qkv_bias:
            heads = heads + self.qkv_bias[...]
        q, k, v = heads[..., : config.group, :], heads[..., -2, :], heads[..., -1, :]
        if config.qk_norm:
            q, k = self._norm(q, self.q_norm), self._norm(k, self.k_norm)
        q, k = rotate(q, turn), rotate(k, turn)
        cache = cache.write(layer, k.swapaxes(1, 2), v.swapaxes(1, 2))
        if isinstance(layer, int):
            # Without it XLA's CPU backend copies the cache at every layer of an unrolled step.
            cache = lax.optimization_barrier(cache)
        mixed = attend(q, *cache.layer(layer), seen, precision_of(x.dtype))
        return linear(mixed, self.out[...], inputs=3), cache


class Decoder(nnx.Module):
    """Embedding, layers, norm and head. ``stacked`` keeps all layers in one module and scans."""

    embed: nnx.Param
    norm: nnx.Param
    head: nnx.Param
    layers: Any

    def __init__(self, config: DecoderConfig, stacked: bool, *, rngs: nnx.Rngs):
        self.config, self.stacked = config, stacked
        axes = parameter_axes(config, stacked)
        layers = axes.pop("layers")
        for name, end_axes in axes.items():
            setattr(self, name, _initial(rngs, end_axes, config))
        if stacked:
            self.layers = Layer(config, layers, rngs=rngs)
        else:
            self.layers = nnx.List([Layer(config, layer, rngs=rngs) for layer in layers.values()])

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        parents: Int[Array, "B T"] | None,
        cache: KVCache,
        *,
        logits_at: Int[Array, " B"] | None = None,
        taps: tuple[int, ...] = (),
    ) -> TargetOutput:
        """See `specjax.types.Target`."""
        block = tokens.shape[1]
        place = positions(cache.length, parents, block)
        turn = rotation(self.config.rope, place, self.config.head_dim)
        seen = self._masks(cache, parents, block)
        x = embedding(self.embed[...], tokens).astype(self.norm[...].dtype)
        run = self._scan if self.stacked else self._unroll
        x, cache, features = run(x, cache, seen, turn, taps)
        if logits_at is not None:
            x = jnp.take_along_axis(x, logits_at[:, None, None], axis=1)
        return TargetOutput(self._logits(x), cache, features)

    def _windows(self) -> tuple[int | None, ...]:
        return self.config.windows or (None,) * self.config.num_layers

    def _masks(self, cache, parents, block) -> dict[int | None, Bool[Array, "B T S"]]:
        return {
            window: visible(cache.length, parents, block, cache.slots, window)
            for window in dict.fromkeys(self._windows())
        }

    def _logits(self, x: Float[Array, "B T E"]) -> Float[Array, "B T V"]:
        x = rms_norm(x, self.norm[...], self.config.rms_norm_eps)
        return head(x, (self.embed if self.config.tie_embeddings else self.head)[...])

    def _unroll(self, x, cache, seen, turn, taps):
        tapped = {}
        for index, window in enumerate(self._windows()):
            x, cache = self.layers[index](x, index, cache, seen[window], turn)
            tapped[index] = x
        features = jnp.stack([tapped[tap] for tap in taps], axis=2) if taps else None
        return x, cache, features

    def _scan(self, x, cache, seen, turn, taps):
        graph, weights = nnx.split(self.layers)
        masks = jnp.stack(list(seen.values()))
        mask_of = jnp.asarray([list(seen).index(window) for window in self._windows()])
        tapped = jnp.zeros((len(taps), *x.shape), x.dtype)
        wanted = jnp.asarray(taps, jnp.int32)[:, None, None, None]

        def body(index, carry):
            x, cache, tapped = carry
            layer = nnx.merge(graph, jax.tree.map(lambda w: w[index], weights))
            x, cache = layer(x, index, cache, masks[mask_of[index]], turn)
            return x, cache, jnp.where(wanted == index, x, tapped)

        x, cache, tapped = lax.fori_loop(0, self.config.num_layers, body, (x, cache, tapped))
        return x, cache, jnp.moveaxis(tapped, 0, 2) if taps else None


@functools.cache
def _graph(config: DecoderConfig, stacked: bool):
    return nnx.split(nnx.eval_shape(lambda: Decoder(config, stacked, rngs=nnx.Rngs(0))))[0]


@dataclass(frozen=True)
class DecoderTarget:
    """A `Decoder` as a `specjax.types.Target`; parameters are a plain nested dict of arrays.

    ``stacked`` chooses the layer loop: a scan over stacked weights (TPU, GPU, 16-bit on CPU), or
    unrolled over one dict a layer, which is faster in float32 on a CPU. ``dtype`` is the cache's.
    ``quantization`` ("int8", "int4") says that matrices are `specjax.models.quantised.Quantised`.
    """

    config: DecoderConfig
    dtype: str = "float32"
    stacked: bool = True
    quantization: str | None = None

    def __post_init__(self):
        check_scheme(self.quantization)

    def init_cache(self, batch: int, slots: int) -> KVCache:
        """An empty cache; bytes = 2 Y B K S W times the dtype's size."""
        config = self.config
        return KVCache.empty(
            config.num_layers, batch, config.num_kv_heads, slots, config.head_dim, self.dtype
        )

    def __call__(self, params, tokens, parents, cache, *, logits_at=None, taps=()) -> TargetOutput:
        """See `specjax.types.Target`; parameters of further layers are ignored."""
        if not self.stacked:
            own = {index: params["layers"][index] for index in range(self.config.num_layers)}
            params = params | {"layers": own}
        decoder = nnx.merge(_graph(self.config, self.stacked), params)
        return decoder(tokens, parents, cache, logits_at=logits_at, taps=taps)

    def init_params(self, key: Array) -> dict[str, Any]:
        """Random parameters, for tests and training from scratch."""
        decoder = Decoder(self.config, self.stacked, rngs=nnx.Rngs(params=key))
        params = nnx.to_pure_dict(nnx.state(decoder))
        params = jax.tree.map(lambda w: w.astype(self.dtype), params)
        return quantise(params, parameter_axes(self.config, self.stacked), self.quantization)

    def abstract_params(self) -> dict[str, Any]:
        """Shapes and dtypes of the parameters, no memory."""
        return jax.eval_shape(lambda: self.init_params(jax.random.key(0)))

    def parameter_axes(self) -> dict[str, Any]:
        """Logical axes of the parameters, for `specjax.sharding`."""
        return quantised_axes(parameter_axes(self.config, self.stacked), self.quantization)

    def first_layers(self, layers: int) -> "DecoderTarget":
        """The model made of this one's first layers, norm and head, over the same parameters."""
        if not 0 < layers < self.config.num_layers:
            raise ValueError(
                f"early exit after {layers} layers: the model has {self.config.num_layers}, "
                f"choose 1 to {self.config.num_layers - 1}"
            )
        config = replace(self.config, num_layers=layers, windows=self.config.windows[:layers])
        return replace(self, config=config)


def unstack(params: dict[str, Any]) -> dict[str, Any]:
    """Parameters for the unrolled layer loop, from stacked ones; frees them as it goes."""
    stacked = params.pop("layers")
    layers = {}
    for name in list(stacked):
        for index, weight in enumerate(stacked.pop(name)):
            layers.setdefault(index, {})[name] = weight
    return params | {"layers": layers}

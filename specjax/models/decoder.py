"""One decoder-only transformer for all families; which of them it is, is data.

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
from specjax.models.architecture import DecoderConfig as DecoderConfig
from specjax.models.architecture import parameter_axes as parameter_axes
from specjax.models.layer import KEPT_STACKED, Layer, initial
from specjax.models.linear import embedding, head
from specjax.models.norms import NORMS
from specjax.models.quantised import check_scheme, quantise, quantised_axes
from specjax.models.rope import Rope, identity, rotation
from specjax.types import TargetOutput


class Decoder(nnx.Module):
    """Embedding, layers, norm and head. ``stacked`` keeps all layers in one module and scans."""

    embed: nnx.Param
    positions: nnx.Param
    norm: nnx.Param
    norm_bias: nnx.Param
    head: nnx.Param
    layers: Any

    def __init__(self, config: DecoderConfig, stacked: bool, *, rngs: nnx.Rngs):
        self.config, self.stacked = config, stacked
        axes = parameter_axes(config, stacked)
        layers = axes.pop("layers")
        for name, end_axes in axes.items():
            setattr(self, name, initial(rngs, name, end_axes, config))
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
        turns = self._turns(place)
        seen = self._masks(cache, parents, block)
        x = self._embedded(tokens, place)
        run = self._scan if self.stacked else self._unroll
        x, cache, features = run(x, cache, seen, turns, taps)
        if logits_at is not None:
            x = jnp.take_along_axis(x, logits_at[:, None, None], axis=1)
        return TargetOutput(self._logits(x), cache, features)

    def _embedded(self, tokens: Int[Array, "B T"], place) -> Float[Array, "B T E"]:
        config = self.config
        x = embedding(self.embed[...], tokens).astype(self.norm[...].dtype)
        if config.embedding_scale is not None:
            x = x * jnp.asarray(config.embedding_scale, x.dtype)
        if config.learned_positions:
            # A draft that reaches beyond the last position reads the last: no such node is kept.
            x = x + jnp.take(self.positions[...], place, axis=0, mode="clip")
        return x

    def _turns(self, place) -> dict[Rope | None, Any]:
        config = self.config

        def turn(rope):
            return rope and rotation(rope, place, config.head_dim, config.max_position)

        return {rope: turn(rope) for rope in dict.fromkeys(config.layer_ropes)}

    def _masks(self, cache, parents, block) -> dict[int | None, Bool[Array, "B T S"]]:
        return {
            window: visible(cache.length, parents, block, cache.slots, window)
            for window in dict.fromkeys(self.config.layer_windows)
        }

    def _logits(self, x: Float[Array, "B T E"]) -> Float[Array, "B T V"]:
        config = self.config
        bias = self.norm_bias[...] if config.norm == "layer" else None
        x = NORMS[config.norm](x, self.norm[...], bias, config.rms_norm_eps)
        logits = head(x, (self.embed if config.tie_embeddings else self.head)[...])
        if config.logit_softcap is None:
            return logits
        cap = config.logit_softcap
        return (cap * jnp.tanh(logits.astype(jnp.float32) / cap)).astype(logits.dtype)

    def _unroll(self, x, cache, seen, turns, taps):
        tapped = {}
        kinds = zip(self.config.layer_windows, self.config.layer_ropes, strict=True)
        for index, (window, rope) in enumerate(kinds):
            x, cache = self.layers[index](x, index, cache, seen[window], turns[rope])
            tapped[index] = x
        features = jnp.stack([tapped[tap] for tap in taps], axis=2) if taps else None
        return x, cache, features

    def _scan(self, x, cache, seen, turns, taps):
        graph, weights = nnx.split(self.layers)
        masks = jnp.stack(list(seen.values()))
        mask_of = jnp.asarray([list(seen).index(window) for window in self.config.layer_windows])
        turn_of = self._turn_of(turns)
        tapped = jnp.zeros((len(taps), *x.shape), x.dtype)
        wanted = jnp.asarray(taps, jnp.int32)[:, None, None, None]

        def body(index, carry):
            x, cache, tapped = carry
            layer = nnx.merge(graph, _of_layer(weights, index))
            x, cache = layer(x, index, cache, masks[mask_of[index]], turn_of(index))
            return x, cache, jnp.where(wanted == index, x, tapped)

        x, cache, tapped = lax.fori_loop(0, self.config.num_layers, body, (x, cache, tapped))
        return x, cache, jnp.moveaxis(tapped, 0, 2) if taps else None

    def _turn_of(self, turns):
        """The rotation of the layer with a traced index."""
        if len(turns) == 1:
            (only,) = turns.values()
            return lambda index: only
        like = next(turn for turn in turns.values() if turn is not None)
        every = [identity(like) if turn is None else turn for turn in turns.values()]
        stacked = jax.tree.map(lambda *parts: jnp.stack(parts), *every)
        which = jnp.asarray([list(turns).index(rope) for rope in self.config.layer_ropes])
        return lambda index: jax.tree.map(lambda part: part[which[index]], stacked)


def _of_layer(weights, index):
    def pick(path, stack):
        is_kept = any(getattr(step, "key", None) in KEPT_STACKED for step in path)
        return stack if is_kept else stack[index]

    return jax.tree_util.tree_map_with_path(pick, weights)


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

    @property
    def max_length(self) -> int | None:
        """Most tokens that can be forwarded at all; None where only quality ends somewhere."""
        return self.config.max_position if self.config.learned_positions else None

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

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
        config = replace(
            self.config,
            num_layers=layers,
            windows=self.config.windows[:layers],
            ropes=self.config.ropes[:layers],
        )
        return replace(self, config=config)

    def within(self, length: int) -> "DecoderTarget":
        """The model for contexts of at most ``length`` tokens, on which a LongRoPE depends."""
        if not any(rope is not None and rope.depends_on_length for rope in self.config.layer_ropes):
            return self
        return replace(self, config=replace(self.config, max_position=length))


def unstack(params: dict[str, Any]) -> dict[str, Any]:
    """Parameters for the unrolled layer loop, from stacked ones; frees them as it goes."""
    stacked = params.pop("layers")
    layers = {}
    for name in list(stacked):
        for index, weight in enumerate(stacked.pop(name)):
            layers.setdefault(index, {})[name] = weight
    return params | {"layers": layers}

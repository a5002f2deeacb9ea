"""The layer that drafters' networks are made of: attention and SwiGLU, keys from wherever.

Functions of (config, weights, inputs), no cache: keys and values are handed in and out.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from specjax.models.attention import attend
from specjax.models.linear import embedding, linear, precision_of
from specjax.models.mlp import gated_mlp
from specjax.models.norms import NORMS
from specjax.models.rope import Rope, Turn, rotate, rotation

Weights = dict[str, Any]
# [B K S W] each, with S the keys at hand: past ones, own ones or both.
KeysValues = tuple[Array, Array]


@dataclass(frozen=True)
class DraftLayerConfig:
    """Sizes and kind of a drafter's layers.

    ``unit_offset`` says that norms multiply by 1 + w. ``gated`` heads are multiplied by a sigmoid
    of their own.
    """

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float = 1e-6
    rope: Rope = Rope()
    qkv_bias: bool = False
    qk_norm: bool = False
    unit_offset: bool = False
    gated: bool = False

    def __post_init__(self):
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"{self.num_heads} query heads cannot share {self.num_kv_heads} KV heads evenly"
            )

    @property
    def group(self) -> int:
        return self.num_heads // self.num_kv_heads


def norm(config: DraftLayerConfig, x: Float[Array, "*B E"], weight: Float[Array, " E"]) -> Array:
    """RMS norm, by 1 + w where the layers are of that kind."""
    kind = "rms_plus_one" if config.unit_offset else "rms"
    return NORMS[kind](x, weight, None, config.rms_norm_eps)


def angles(config: DraftLayerConfig, positions: Int[Array, "B T"]) -> Turn:
    """Cosine and sine for each position."""
    return rotation(config.rope, positions, config.head_dim)


def queries(
    config: DraftLayerConfig, weights: Weights, x: Float[Array, "B T inputs"], turn: Turn
) -> Float[Array, "B T K G W"]:
    """Queries of each token, turned to its position."""
    q = linear(x, weights["q"])
    if config.qkv_bias:
        q = q + weights["q_bias"]
    if config.qk_norm:
        q = norm(config, q, weights["q_norm"])
    return rotate(q, turn)


def keys_values(
    config: DraftLayerConfig, weights: Weights, x: Float[Array, "B T inputs"], turn: Turn
) -> KeysValues:
    """Keys, turned to their positions, and values of each token."""
    both = linear(x, weights["kv"])
    if config.qkv_bias:
        both = both + weights["kv_bias"]
    k, v = both[..., 0, :], both[..., 1, :]
    if config.qk_norm:
        k = norm(config, k, weights["k_norm"])
    return rotate(k, turn).swapaxes(1, 2), v.swapaxes(1, 2)


def attention(
    config: DraftLayerConfig,
    weights: Weights,
    x: Float[Array, "B T inputs"],
    turn: Turn,
    seen: Bool[Array, "B T S"],
    past: KeysValues | None = None,
) -> tuple[Float[Array, "B T E"], KeysValues]:
    """Attention of the tokens to ``past`` and, behind it, to each other; and their keys and values.

    ``seen`` says for each of the S = past + T keys whether a query sees it.
    """
    own = keys_values(config, weights, x, turn)
    k, v = own
    if past is not None:
        k, v = jnp.concatenate([past[0], k], axis=2), jnp.concatenate([past[1], v], axis=2)
    mixed = attend(queries(config, weights, x, turn), k, v, seen, precision_of(x.dtype))
    if config.gated:
        mixed = mixed * jax.nn.sigmoid(linear(x, weights["gate"]))
    return linear(mixed, weights["out"], inputs=3), own


def mlp(weights: Weights, x: Float[Array, "B T E"]) -> Float[Array, "B T E"]:
    """SwiGLU."""
    return gated_mlp(x, weights["gate_up"], weights["down"], jax.nn.silu)


def layer(
    config: DraftLayerConfig,
    weights: Weights,
    x: Float[Array, "B T E"],
    turn: Turn,
    seen: Bool[Array, "B T S"],
    past: KeysValues | None = None,
) -> tuple[Float[Array, "B T E"], KeysValues]:
    """The residual stream after one pre-norm layer, and the tokens' keys and values."""
    normed = norm(config, x, weights["attention_norm"])
    attended, own = attention(config, weights, normed, turn, seen, past)
    x = x + attended
    return x + mlp(weights, norm(config, x, weights["mlp_norm"])), own


def borrowed(own: Array | None, given: Array | None, what: str) -> Array:
    """The network's own matrix, else the target's; raises ValueError where neither is there."""
    matrix = own if own is not None else given
    if matrix is None:
        raise ValueError(f"this drafter has no {what} of its own: pass the target's")
    return matrix


def embedded(
    params: Weights, given: Float[Array, "V E"] | None, tokens: Int[Array, "B T"]
) -> Float[Array, "B T E"]:
    """Rows of the network's own embedding, else of the target's."""
    return embedding(borrowed(params.get("embed"), given, "embedding"), tokens)


def layer_weights(stacked: Weights, index: int) -> Weights:
    """One layer's weights out of those stacked on axis 0."""
    return jax.tree.map(lambda weight: weight[index], stacked)


def causal(tokens: Int[Array, "B T"], past: int = 0) -> Bool[Array, "B T S"]:
    """Each token sees all of ``past`` keys, the tokens before it and itself."""
    batch, length = tokens.shape
    seen = jnp.arange(past + length) <= past + jnp.arange(length)[:, None]
    return jnp.broadcast_to(seen, (batch, length, past + length))

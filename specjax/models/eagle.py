"""EAGLE-1 and EAGLE-2: a layer that predicts the target's next feature.

Li et al., arXiv 2401.15077 and 2406.16858. Both share one network; the second grows other trees.
"""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from specjax.models.draft_layer import (
    DraftLayerConfig,
    KeysValues,
    angles,
    attention,
    causal,
    embedded,
    layer_weights,
    mlp,
    norm,
)
from specjax.models.linear import linear


@dataclass(frozen=True)
class EagleConfig:
    """A network over the target's vocabulary; it has no head and no norm of its own.

    ``embedding_scale`` multiplies the embedding's rows. Without ``own_embedding`` the target's is
    used, and its head in any case.
    """

    vocab_size: int
    layer: DraftLayerConfig
    num_layers: int = 1
    fc_bias: bool = False
    own_embedding: bool = True
    embedding_scale: float = 1.0

    @property
    def own_head(self) -> bool:
        return False


def eagle_features(
    config: EagleConfig,
    params: dict[str, Any],
    tokens: Int[Array, "B T"],
    features: Float[Array, "B T E"],
    positions: Int[Array, "B T"],
    *,
    embed: Float[Array, "V E"] | None = None,
    seen: Bool[Array, "B T S"] | None = None,
    past: tuple[KeysValues, ...] | None = None,
) -> tuple[Float[Array, "B T E"], tuple[KeysValues, ...]]:
    """The next position's features, and every layer's keys and values.

    ``features[t]`` is the target's state at ``positions[t]`` after its last norm, ``tokens[t]`` the
    token that follows it. The target's head turns the result into logits as it is. ``embed`` is the
    target's embedding, for a network without one. ``seen=None`` is causal.
    """
    rows = embedded(params, embed, tokens) * config.embedding_scale
    x = linear(jnp.concatenate([rows.astype(features.dtype), features], -1), params["fc"])
    if config.fc_bias:
        x = x + params["fc_bias"]
    if seen is None:
        seen = causal(tokens, past[0][0].shape[2] if past else 0)
    turn, kept = angles(config.layer, positions), []
    for index in range(config.num_layers):
        weights = layer_weights(params["layers"], index)
        # The first layer takes its input as it comes: fc's output was never normed in training.
        inputs = x if index == 0 else norm(config.layer, x, params["attention_norm"][index - 1])
        own = past[index] if past else None
        attended, pair = attention(config.layer, weights, inputs, turn, seen, own)
        x = x + attended
        x = x + mlp(weights, norm(config.layer, x, weights["mlp_norm"]))
        kept.append(pair)
    return x, tuple(kept)

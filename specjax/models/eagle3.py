"""EAGLE-3: a layer that sees the token's embedding beside features of several target layers.

Li et al., arXiv 2503.01840; its parallel form P-EAGLE, arXiv 2602.01469.
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
    borrowed,
    causal,
    embedded,
    layer,
    layer_weights,
    mlp,
    norm,
)
from specjax.models.linear import head, linear


@dataclass(frozen=True)
class Eagle3Config:
    """An EAGLE-3 network.

    ``taps`` are the target's layers after which its residual stream is taken, () for the paper's
    own (`default_taps`); ``num_taps`` of them, ``target_hidden_size`` wide. ``own_head`` and
    ``own_embedding`` say that the parameters hold them; a head that is not there is the embedding
    where ``tied``, else the target's. Where ``reduced``, ``draft_to_target`` maps draft ids.
    ``mask_token_id`` marks a parallel drafter, which also has a ``mask_hidden``.
    """

    vocab_size: int
    draft_vocab_size: int
    layer: DraftLayerConfig
    target_hidden_size: int
    taps: tuple[int, ...] = ()
    num_taps: int = 3
    num_layers: int = 1
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    own_embedding: bool = True
    own_head: bool = True
    tied: bool = False
    mask_token_id: int | None = None

    @property
    def reduced(self) -> bool:
        return self.draft_vocab_size < self.vocab_size

    def taps_in(self, target_layers: int) -> tuple[int, ...]:
        """The tapped layers of a target with ``target_layers`` layers."""
        return self.taps or default_taps(target_layers)


def default_taps(target_layers: int) -> tuple[int, int, int]:
    """The paper's: the residual streams that enter the layers 2, L // 2 and L - 3."""
    return (1, target_layers // 2 - 1, target_layers - 4)


def even_taps(target_layers: int, num_taps: int) -> tuple[int, ...]:
    """Evenly from the layer 1 to the layer L - 3, as DFlash has them."""
    steps = range(num_taps)
    return tuple(round(1 + step * (target_layers - 4) / (num_taps - 1 or 1)) for step in steps)


def fuse_taps(
    config: Eagle3Config, params: dict[str, Any], tapped: Float[Array, "B T F taps"]
) -> Float[Array, "B T E"]:
    """One feature a token from its F tapped residual streams."""
    if config.fc_norm:
        parts = [
            norm(config.layer, tapped[:, :, index], params["fc_norm"][index])
            for index in range(config.num_taps)
        ]
        tapped = jnp.stack(parts, axis=2)
    flat = tapped.reshape(*tapped.shape[:2], -1)
    if config.norm_before_fc:
        flat = norm(config.layer, flat, params["input_norm"])
    return linear(flat, params["fc"])


def masked_feature(config: Eagle3Config, params: dict[str, Any]) -> Float[Array, "B T E"]:
    """What a parallel drafter takes for the features of places that are yet to come, [1, 1, E]."""
    shape = 1, 1, config.num_taps, config.target_hidden_size
    return fuse_taps(config, params, params["mask_hidden"].reshape(shape))


def eagle3_features(
    config: Eagle3Config,
    params: dict[str, Any],
    tokens: Int[Array, "B T"],
    features: Float[Array, "B T E"],
    positions: Int[Array, "B T"],
    *,
    embed: Float[Array, "V E"] | None = None,
    seen: Bool[Array, "B T S"] | None = None,
    past: tuple[KeysValues, ...] | None = None,
) -> tuple[Float[Array, "B T E"], tuple[KeysValues, ...]]:
    """The residual stream a after the last layer, and every layer's keys and values.

    ``features[t]`` is `fuse_taps` of the target's streams at ``positions[t]``, or `fed_back` of a
    step before; ``tokens[t]`` is the token that follows. `eagle3_logits` reads a.
    """
    rows = embedded(params, embed, tokens).astype(features.dtype)
    if seen is None:
        seen = causal(tokens, past[0][0].shape[2] if past else 0)
    turn, first = angles(config.layer, positions), params["first"]
    normed = norm(config.layer, features, first["hidden_norm"])
    inputs = jnp.concatenate([norm(config.layer, rows, first["attention_norm"]), normed], -1)
    attended, pair = attention(config.layer, first, inputs, turn, seen, past[0] if past else None)
    x = (normed if config.norm_before_residual else features) + attended
    x = x + mlp(first, norm(config.layer, x, first["mlp_norm"]))
    kept = [pair]
    for index in range(1, config.num_layers):
        weights = layer_weights(params["layers"], index - 1)
        x, pair = layer(config.layer, weights, x, turn, seen, past[index] if past else None)
        kept.append(pair)
    return x, tuple(kept)


def fed_back(
    config: Eagle3Config, params: dict[str, Any], stream: Float[Array, "B T E"]
) -> Float[Array, "B T E"]:
    """What takes the place of the fused taps where the target has not been: a, or its norm."""
    return norm(config.layer, stream, params["norm"]) if config.norm_output else stream


def eagle3_logits(
    config: Eagle3Config,
    params: dict[str, Any],
    stream: Float[Array, "B T E"],
    *,
    matrix: Float[Array, "Vd E"] | None = None,
) -> Float[Array, "B T Vd"]:
    """Logits over the draft ids; ``matrix`` is the head of a network without one."""
    own = params.get("embed" if config.tied and not config.own_head else "head")
    return head(norm(config.layer, stream, params["norm"]), borrowed(own, matrix, "head"))

"""DFlash and its kin: a block of tokens drafted in one pass over the target's tapped features.

DFlash, arXiv 2602.06036; JetSpec, arXiv 2606.18394, whose blocks are causal; DSpark and DFlash 2
are the same body with the parts of `specjax.models.markov` and `specjax.models.candidates` on top.
"""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from specjax.models.candidates import ConvolutionConfig, convolve, kernels
from specjax.models.draft_layer import (
    DraftLayerConfig,
    KeysValues,
    angles,
    attention,
    borrowed,
    embedded,
    keys_values,
    layer_weights,
    mlp,
    norm,
)
from specjax.models.linear import head, linear
from specjax.models.markov import MarkovConfig

FILL_IN = "fill-in"
ANCHOR_FIRST = "anchor-first"
LAYOUTS = (FILL_IN, ANCHOR_FIRST)


@dataclass(frozen=True)
class DFlashConfig:
    """A block-drafting network.

    A block is the anchor, the last committed token, and ``block_size - 1`` masks. In the layout
    "fill-in" each mask is the token of its own place: block_size - 1 drafts. In "anchor-first" each
    slot, the anchor's too, predicts the next place: block_size drafts. ``windows`` and ``causal``
    hold one entry a layer. ``taps`` are the target's layers after which its residual stream is
    taken. What the parameters lack, embedding or head, is the target's; embedding rows are used
    raw but for ``embedding_scale``.
    """

    vocab_size: int
    draft_vocab_size: int
    layer: DraftLayerConfig
    num_layers: int
    block_size: int
    layout: str
    mask_token_id: int
    taps: tuple[int, ...]
    target_hidden_size: int
    windows: tuple[int | None, ...]
    causal: tuple[bool, ...]
    own_embedding: bool = False
    own_head: bool = False
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    logit_softcap: float | None = None
    markov: MarkovConfig | None = None
    confidence: bool = False
    confidence_with_markov: bool = False
    convolution: ConvolutionConfig | None = None
    selector_rank: int = 0
    selector_top_k: int = 0

    def __post_init__(self):
        if self.layout not in LAYOUTS:
            raise ValueError(f"layout {self.layout!r} is not known; choose {' or '.join(LAYOUTS)}")

    @property
    def num_drafts(self) -> int:
        return self.block_size - (self.layout == FILL_IN)

    @property
    def reduced(self) -> bool:
        return self.draft_vocab_size < self.vocab_size


def context_features(
    config: DFlashConfig, params: dict[str, Any], tapped: Float[Array, "B T F taps"]
) -> Float[Array, "B T E"]:
    """What the layers' keys and values are made of, once for each committed token."""
    flat = tapped.reshape(*tapped.shape[:2], -1)
    return norm(config.layer, linear(flat, params["fc"]), params["hidden_norm"])


def context_keys_values(
    config: DFlashConfig,
    params: dict[str, Any],
    context: Float[Array, "B T E"],
    positions: Int[Array, "B T"],
) -> tuple[KeysValues, ...]:
    """Every layer's keys and values of committed tokens."""
    turn = angles(config.layer, positions)
    return tuple(
        keys_values(config.layer, layer_weights(params["layers"], index), context, turn)
        for index in range(config.num_layers)
    )


def block_tokens(config: DFlashConfig, anchor: Int[Array, " B"]) -> Int[Array, "B T"]:
    """The anchor and the masks behind it."""
    masks = jnp.full((anchor.shape[0], config.block_size - 1), config.mask_token_id, anchor.dtype)
    return jnp.concatenate([anchor[:, None], masks], axis=1)


def block_hidden(
    config: DFlashConfig,
    params: dict[str, Any],
    tokens: Int[Array, "B T"],
    positions: Int[Array, "B T"],
    context: tuple[KeysValues, ...],
    context_positions: Int[Array, "B C"],
    *,
    embed: Float[Array, "V E"] | None = None,
) -> Float[Array, "B T E"]:
    """Each slot's state after the last norm.

    ``context`` holds the keys and values of the tokens before the anchor; a slot there with a
    negative position is empty. ``embed`` is the target's embedding, for a network without one.
    """
    x = embedded(params, embed, tokens) * config.embedding_scale
    x = x.astype(params["norm"].dtype)
    turn = angles(config.layer, positions)
    for index in range(config.num_layers):
        weights = layer_weights(params["layers"], index)
        seen = _seen(config, index, positions, context_positions)
        x = _layer(config, weights, x, turn, seen, context[index])
    return norm(config.layer, x, params["norm"])


def _layer(config, weights, x, turn, seen, past):
    inputs = norm(config.layer, x, weights["attention_norm"])
    inputs, after = _mixed(config, weights, "attention_conv", inputs)
    x = x + after(attention(config.layer, weights, inputs, turn, seen, past)[0])
    inputs = norm(config.layer, x, weights["mlp_norm"])
    inputs, after = _mixed(config, weights, "mlp_conv", inputs)
    return x + after(mlp(weights, inputs))


def _mixed(config, weights, name, inputs):
    """DFlash 2: ``inputs`` convolved, and the convolution of what is made of them."""
    if config.convolution is None:
        return inputs, lambda x: x
    before, after = kernels(config.convolution, weights[name], inputs)
    base = weights[name]["base"]
    return convolve(inputs, base[0], before), lambda x: convolve(x, base[1], after)


def _seen(
    config: DFlashConfig,
    index: int,
    positions: Int[Array, "B T"],
    context_positions: Int[Array, "B C"],
) -> Bool[Array, "B T S"]:
    keys = jnp.concatenate([context_positions, positions], axis=1)[:, None]
    behind = positions[:, :, None] - keys
    window = config.windows[index]
    seen = keys >= 0
    if config.causal[index]:
        seen = seen & (behind >= 0)
    if window is not None:
        seen = seen & (behind < window) & (behind > -window)
    return jnp.broadcast_to(seen, behind.shape)


def block_logits(
    config: DFlashConfig,
    params: dict[str, Any],
    hidden: Float[Array, "B T E"],
    *,
    matrix: Float[Array, "Vd E"] | None = None,
) -> Float[Array, "B T Vd"]:
    """Logits of each slot's own prediction; ``matrix`` is the head of a network without one."""
    logits = head(hidden, borrowed(params.get("head"), matrix, "head"))
    if config.logit_scale != 1.0:
        logits = logits * config.logit_scale
    if config.logit_softcap is not None:
        logits = jnp.tanh(logits / config.logit_softcap) * config.logit_softcap
    return logits


def drafted(config: DFlashConfig, slots: Float[Array, "B T any"]) -> Float[Array, "B drafts any"]:
    """Of each slot's state or logits those that predict the places after the anchor, in order."""
    return slots[:, config.block_size - config.num_drafts :]

"""Multi-token prediction: a layer, trained with its target, that reads a state and the next token.

DeepSeek-V3, arXiv 2412.19437; GLM-4.5, MiMo and Qwen3-Next have modules of the same form.
"""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from specjax.models.draft_experts import ExpertsConfig, mix
from specjax.models.draft_layer import (
    DraftLayerConfig,
    KeysValues,
    angles,
    attention,
    borrowed,
    causal,
    embedded,
    layer_weights,
    mlp,
    norm,
)
from specjax.models.latent_attention import LatentConfig, Latents, latent_attention
from specjax.models.linear import head, linear


@dataclass(frozen=True)
class MTPConfig:
    """``num_modules`` modules, of which the k-th guesses the token k + 2 places on.

    ``hidden_first`` is the order of the two halves that are projected: the state before the
    embedding, or behind it. ``feeds_normed`` says that a next step takes the state after the last
    norm. ``latent`` replaces the layer's attention, whose ``head_dim`` is then the rotary part's.
    What the parameters lack, embedding or head, is the target's.
    """

    vocab_size: int
    layer: DraftLayerConfig
    num_modules: int = 1
    hidden_first: bool = False
    feeds_normed: bool = True
    own_embedding: bool = False
    own_head: bool = False
    experts: ExpertsConfig | None = None
    latent: LatentConfig | None = None


def mtp_states(
    config: MTPConfig,
    params: dict[str, Any],
    module: int,
    tokens: Int[Array, "B T"],
    hidden: Float[Array, "B T E"],
    positions: Int[Array, "B T"],
    *,
    embed: Float[Array, "V E"] | None = None,
    seen: Bool[Array, "B T S"] | None = None,
    past: KeysValues | Latents | None = None,
) -> tuple[Float[Array, "B T E"], Float[Array, "B T E"], KeysValues | Latents]:
    """The state that the head reads, the state that a next step reads, and keys and values.

    ``hidden[t]`` is the target's state at ``positions[t]`` after its last norm, or what a step
    before handed on; ``tokens[t]`` is the token that follows. ``seen=None`` is causal.
    """
    weights = layer_weights(params["modules"], module)
    rows = embedded(params, embed, tokens).astype(hidden.dtype)
    halves = [
        norm(config.layer, rows, weights["token_norm"]),
        norm(config.layer, hidden, weights["hidden_norm"]),
    ]
    if config.hidden_first:
        halves.reverse()
    x = linear(jnp.concatenate(halves, axis=-1), weights["fuse"])
    if seen is None:
        seen = causal(tokens, past[0].shape[2] if past else 0)
    turn = angles(config.layer, positions)
    normed = norm(config.layer, x, weights["attention_norm"])
    if config.latent:
        attended, pair = latent_attention(config.latent, weights, normed, turn, seen, past)
    else:
        attended, pair = attention(config.layer, weights, normed, turn, seen, past)
    x = x + attended
    normed = norm(config.layer, x, weights["mlp_norm"])
    x = x + (mix(config.experts, weights, normed) if config.experts else mlp(weights, normed))
    last = norm(config.layer, x, weights["final_norm"])
    return last, last if config.feeds_normed else x, pair


def mtp_logits(
    config: MTPConfig,
    params: dict[str, Any],
    module: int,
    state: Float[Array, "B T E"],
    *,
    matrix: Float[Array, "V E"] | None = None,
) -> Float[Array, "B T V"]:
    """Logits; ``matrix`` is the target's head, for modules without one."""
    own = params["modules"]["head"][module] if config.own_head else None
    return head(state, borrowed(own, matrix, "head"))

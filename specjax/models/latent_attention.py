"""Multi-head latent attention: all heads' keys and values out of one narrow vector a token.

DeepSeek-V2, arXiv 2405.04434.
"""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from specjax.models.attention import attend
from specjax.models.linear import linear, precision_of
from specjax.models.norms import NORMS
from specjax.models.rope import Turn, rotate

# Of the latents' own norms, whatever the layers' is.
LATENT_EPS = 1e-6
# The latents [B 1 S C] and the rotary keys [B 1 S W], as a single head's keys and values would be.
Latents = tuple[Array, Array]


@dataclass(frozen=True)
class LatentConfig:
    """Widths of the vectors that keys, values and queries are made of, and of a head's parts.

    ``kv_rank`` numbers are a token's latent. Queries come out of ``query_rank`` numbers, or
    straight out of the layer's input where that is 0. A head's query and key are ``plain_dim``
    numbers without a position and ``rotary_dim`` with one; the rotary keys are all heads' in
    common. A head's value has ``value_dim``. ``scale`` multiplies the scores.
    """

    kv_rank: int
    query_rank: int
    plain_dim: int
    rotary_dim: int
    value_dim: int
    scale: float


def latent_attention(
    config: LatentConfig,
    weights: dict[str, Any],
    x: Float[Array, "B T E"],
    turn: Turn,
    seen: Bool[Array, "B T S"],
    past: Latents | None = None,
) -> tuple[Float[Array, "B T E"], Latents]:
    """Attention of the tokens to ``past`` and, behind it, to each other; and their own latents.

    ``seen`` says for each of the S = past + T keys whether a query sees it. The matrices that make
    keys and values of latents are applied to the queries and to what was mixed instead: no head's
    keys or values are ever made, and all heads read the same ones.
    """
    precision = precision_of(x.dtype)
    own = _latents(weights, x, turn)
    latents, rotary = own
    if past is not None:
        latents = jnp.concatenate([past[0], latents], axis=2)
        rotary = jnp.concatenate([past[1], rotary], axis=2)
    plain, turned = _queries(config, weights, x, turn)
    asked = jnp.einsum("bthn,chn->bthc", plain, weights["k_up"], precision=precision)
    q = jnp.concatenate([asked, turned], axis=-1)[:, :, None]
    k = jnp.concatenate([latents, rotary], axis=-1)
    # What is mixed are the keys themselves, of which the latents are wanted.
    mixed = attend(q, k, k, seen, precision, scale=config.scale)[:, :, 0, :, : config.kv_rank]
    values = jnp.einsum("bthc,chu->bthu", mixed, weights["v_up"], precision=precision)
    return linear(values, weights["out"], inputs=2), own


def _latents(weights, x, turn) -> Latents:
    latents = _normed(linear(x, weights["kv_down"]), weights["kv_norm"])
    rotary = rotate(linear(x, weights["k_rotary"]), turn)
    return latents[:, None], rotary[:, None]


def _queries(config, weights, x, turn):
    if config.query_rank:
        x = _normed(linear(x, weights["q_down"]), weights["q_norm"])
    return linear(x, weights["q_plain"]), rotate(linear(x, weights["q_rotary"]), turn)


def _normed(x, weight):
    return NORMS["rms"](x, weight, None, LATENT_EPS)

"""The mixture of experts in drafters that were cut from mixture-of-experts models."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from specjax.models.draft_layer import mlp
from specjax.models.linear import linear


@dataclass(frozen=True)
class ExpertsConfig:
    """``count`` experts of which a token takes ``chosen``, and experts that every token takes.

    ``sigmoid`` scores experts each for itself (DeepSeek-V3, arXiv 2412.19437), with ``biased``
    choice; else by softmax. ``shared_size`` is the shared experts' width, 0 for none,
    ``shared_gated`` a sigmoid before them.
    """

    count: int
    chosen: int
    size: int
    sigmoid: bool = False
    biased: bool = False
    renormalise: bool = True
    scale: float = 1.0
    shared_size: int = 0
    shared_gated: bool = False


def mix(
    config: ExpertsConfig, weights: dict[str, Any], x: Float[Array, "B T E"]
) -> Float[Array, "B T E"]:
    """The weighted sum of the experts; a pass over all of them, for few tokens or few experts."""
    share = _share(config, weights, x)

    def add(index, total):
        expert = jax.tree.map(lambda weight: weight[index], weights["experts"])
        return total + share[:, :, index, None] * mlp(expert, x).astype(jnp.float32)

    mixed = lax.fori_loop(0, config.count, add, jnp.zeros(x.shape, jnp.float32)).astype(x.dtype)
    if config.shared_size == 0:
        return mixed
    shared = mlp(weights["shared"], x)
    if config.shared_gated:
        shared = shared * jax.nn.sigmoid(linear(x, weights["shared_gate"]))
    return mixed + shared


def _share(
    config: ExpertsConfig, weights: dict[str, Any], x: Float[Array, "B T E"]
) -> Float[Array, "B T X"]:
    """Each expert's weight, 0 where it was not chosen."""
    scores = linear(x, weights["router"]).astype(jnp.float32)
    scores = jax.nn.sigmoid(scores) if config.sigmoid else jax.nn.softmax(scores)
    ranked = scores + weights["router_bias"] if config.biased else scores
    chosen = lax.top_k(ranked, config.chosen)[1]
    taken = jax.nn.one_hot(chosen, config.count).sum(axis=-2)
    share = scores * taken
    if config.renormalise:
        share = share / jnp.sum(share, axis=-1, keepdims=True)
    return share * config.scale

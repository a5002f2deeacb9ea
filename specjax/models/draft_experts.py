"""The mixture of experts in drafters that were cut from mixture-of-experts models."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from specjax.models.draft_layer import mlp
from specjax.models.experts import Experts, gated_by, one_by_one
from specjax.models.linear import linear, precision_of


@dataclass(frozen=True)
class ExpertsConfig:
    """``count`` experts of which a token takes ``chosen``, and experts that every token takes.

    ``sigmoid`` scores experts each for itself (DeepSeek-V3, arXiv 2412.19437), else by softmax;
    ``biased`` ranks them by their scores and a bias. Of ``groups`` of neighbours a token takes
    experts of ``chosen_groups`` only, those whose two highest ranked ones promise most.
    ``shared_size`` is the shared experts' width, 0 for none, ``shared_gated`` a sigmoid before
    them.
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
    groups: int = 1
    chosen_groups: int = 1

    def __post_init__(self):
        if self.count % self.groups or self.chosen_groups > self.groups:
            raise ValueError(
                f"{self.count} experts cannot be {self.groups} groups of which "
                f"{self.chosen_groups} are taken"
            )
        if self.chosen > self.count // self.groups * self.chosen_groups:
            raise ValueError(
                f"{self.chosen} experts cannot be taken out of {self.chosen_groups} groups of "
                f"{self.count // self.groups}"
            )


def mix(
    config: ExpertsConfig, weights: dict[str, Any], x: Float[Array, "B T E"]
) -> Float[Array, "B T E"]:
    """The weighted sum of the chosen experts, and the shared ones."""
    stacks = jax.tree.map(lambda one_layer: one_layer[None], weights["experts"])
    experts = Experts(stacks["gate_up"], stacks["down"], 0)
    share, chosen = _routed(config, weights, x)
    tokens = x.reshape(-1, x.shape[-1])
    mixed = one_by_one(tokens, share, chosen, experts, gated_by(jax.nn.silu))
    mixed = mixed.reshape(x.shape).astype(x.dtype)
    if config.shared_size == 0:
        return mixed
    shared = mlp(weights["shared"], x)
    if config.shared_gated:
        shared = shared * jax.nn.sigmoid(linear(x, weights["shared_gate"]))
    return mixed + shared


def _routed(
    config: ExpertsConfig, weights: dict[str, Any], x: Float[Array, "B T E"]
) -> tuple[Float[Array, "M k"], Int[Array, "M k"]]:
    """Weights and experts of each of the M = B T tokens."""
    # Rounded to 16 bits, scores that differ by little would lead tokens to other experts.
    scores = jnp.einsum(
        "bte,ex->btx",
        x,
        weights["router"],
        precision=precision_of(x.dtype),
        preferred_element_type=jnp.float32,
    )
    scores = jax.nn.sigmoid(scores) if config.sigmoid else jax.nn.softmax(scores)
    ranked = scores + weights["router_bias"] if config.biased else scores
    if config.groups > 1:
        ranked = _within_groups(config, ranked)
    chosen = lax.top_k(ranked, config.chosen)[1]
    share = jnp.take_along_axis(scores, chosen, axis=-1)
    if config.renormalise:
        share = share / jnp.sum(share, axis=-1, keepdims=True)
    share = share * config.scale
    return share.reshape(-1, config.chosen), chosen.reshape(-1, config.chosen)


def _within_groups(config: ExpertsConfig, ranked: Float[Array, "B T X"]) -> Float[Array, "B T X"]:
    """``ranked``, -inf outside the groups that a token takes."""
    grouped = ranked.reshape(*ranked.shape[:-1], config.groups, -1)
    promise = jnp.sum(lax.top_k(grouped, min(2, grouped.shape[-1]))[0], axis=-1)
    taken = lax.top_k(promise, config.chosen_groups)[1]
    is_taken = jnp.any(jax.nn.one_hot(taken, config.groups, dtype=bool), axis=-2)
    return jnp.where(is_taken[..., None], grouped, -jnp.inf).reshape(ranked.shape)

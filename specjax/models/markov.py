"""DSpark's additions: a head that shifts a slot's logits by the token before, and a confidence."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from specjax.models.linear import head, linear

VANILLA, GATED, RNN = "vanilla", "gated", "rnn"


@dataclass(frozen=True)
class MarkovConfig:
    """``kind``: "vanilla" (the token before alone), "gated" by the slot's state, or "rnn", which
    remembers all drafted tokens in a state of width ``rank``."""

    kind: str
    rank: int


def markov_shift(
    config: MarkovConfig,
    params: dict[str, Any],
    previous: Int[Array, " B"],
    hidden: Float[Array, "B E"],
    state: Float[Array, "B R"],
) -> tuple[Float[Array, "B V"], Float[Array, "B R"]]:
    """What is added to one slot's logits after the token ``previous``, and the state after it.

    The state is zero at a block's first slot and changes for "rnn" only.
    """
    markov = params["markov"]
    latent = jnp.take(markov["token"], previous, axis=0, mode="clip")
    if config.kind == GATED:
        inputs = jnp.concatenate([hidden, latent], axis=-1)
        latent = jax.nn.sigmoid(_affine(inputs, markov)) * latent
    elif config.kind == RNN:
        inputs = jnp.concatenate([state, latent, hidden], axis=-1)
        gate, candidate, latent = jnp.split(_affine(inputs, markov), 3, axis=-1)
        gate = jax.nn.sigmoid(gate)
        state = gate * state + (1 - gate) * jnp.tanh(candidate)
        latent = jnp.tanh(latent)
    return head(latent[:, None], markov["head"])[:, 0], state


def _affine(x, weights):
    return linear(x[:, None], weights["joint"])[:, 0] + weights["joint_bias"]


def confidence(
    params: dict[str, Any],
    hidden: Float[Array, "B E"],
    previous: Int[Array, " B"],
    *,
    with_markov: bool,
) -> Float[Array, " B"]:
    """Probability that the slot's draft will be accepted."""
    if with_markov:
        latent = jnp.take(params["markov"]["token"], previous, axis=0, mode="clip")
        hidden = jnp.concatenate([hidden, latent.astype(hidden.dtype)], axis=-1)
    weights = params["confidence"]
    return jax.nn.sigmoid(linear(hidden[:, None], weights["weight"])[:, 0, 0] + weights["bias"][0])

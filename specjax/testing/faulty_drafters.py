"""Drafters with one fault each, around right ones: in how they choose, or in what they keep."""

import typing
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Int, Key

from specjax import noise
from specjax.sampling import first_argmax
from specjax.types import NO_PARENT, NO_TOKEN, Choose, Context, Draft


class Asked(NamedTuple):
    """What a faulty choice may go by: the right one, the rows' keys, their roots' positions."""

    choose: Choose
    keys: Key[Array, " B"]
    root: Int[Array, " B"]


@typing.no_type_check
@struct.dataclass
class Remembered:
    """The drafter's own state, its last draft's tokens, and how many rounds there have been."""

    own: Any
    tokens: Int[Array, "B N"]
    rounds: Int[Array, ""]


def _choose(asked: Asked, logits, node, path, width):
    return asked.choose(logits, node, path, width)


def _keep(draft: Draft, rounds) -> Draft:
    return draft


@dataclass(frozen=True)
class FaultyDrafter:
    """``drafter`` with another way of choosing, or with its draft changed afterwards.

    Its parameters are those of ``drafter`` and the keys of the rows. It remembers its drafts, for
    a faulty round to count.
    """

    drafter: Any
    chooses: Callable[..., Any] = _choose
    changes: Callable[[Draft, Int[Array, ""]], Draft] = _keep

    @property
    def num_nodes(self) -> int:
        return self.drafter.num_nodes

    @property
    def max_depth(self) -> int:
        return self.drafter.max_depth

    @property
    def widths(self) -> tuple[int, ...]:
        return self.drafter.widths

    @property
    def is_chain(self) -> bool:
        return self.drafter.is_chain

    @property
    def has_law(self) -> bool:
        return self.drafter.has_law

    @property
    def taps(self) -> tuple[int, ...]:
        return self.drafter.taps

    @property
    def needs(self) -> tuple[str, ...]:
        return self.drafter.needs

    @property
    def reranks(self) -> bool:
        return self.drafter.reranks

    @property
    def forwards(self) -> int:
        return self.drafter.forwards

    def init(self, params, prompt: Context, features, slots: int) -> Remembered:
        tokens = jnp.zeros((prompt.length.shape[0], self.num_nodes), jnp.int32)
        own = self.drafter.init(params[0], prompt, features, slots)
        return Remembered(own, tokens, jnp.int32(0))

    def draft(self, params, state: Remembered, context: Context, choose):
        own_params, keys = params
        asked = Asked(choose, keys, context.length - 1)

        def chooses(logits, node, path, width=1):
            return self.chooses(asked, logits, node, path, width)

        draft, own = self.drafter.draft(own_params, state.own, context, chooses)
        draft = self.changes(draft, state.rounds)
        return draft, Remembered(own, draft.tokens, state.rounds + 1)

    def update(self, params, state: Remembered, feedback) -> Remembered:
        return replace(state, own=self.drafter.update(params[0], state.own, feedback))


def argmax_as_sample(asked, logits, node, path, width):
    """Drafts the most likely tokens and says that they were drawn from their law."""
    _, score, law = asked.choose(logits, node, path, width)
    return jax.lax.top_k(logits, width)[1], score, law


def law_before_temperature(asked, logits, node, path, width):
    """Reports the law of the raw logits, whatever the temperature."""
    tokens, score, _ = asked.choose(logits, node, path, width)
    return tokens, score, jax.nn.log_softmax(logits, axis=-1)


def top_p_before_temperature(asked, logits, node, path, width):
    """Reports the law that top-p 0.7 leaves when it comes before temperature 0.5, not after."""
    tokens, score, _ = asked.choose(logits, node, path, width)
    law = jax.nn.log_softmax(logits, axis=-1)
    higher = jnp.where(law[..., None, :] > law[..., :, None], jnp.exp(law)[..., None, :], 0.0)
    kept = jnp.sum(higher, axis=-1) < 0.7
    return tokens, score, jax.nn.log_softmax(jnp.where(kept, law / 0.5, -jnp.inf), axis=-1)


def one_vector_a_level(asked, logits, node, path, width):
    """Draws the children of sibling parents with one vector of noise."""
    return asked.choose(logits, jnp.sum(path != NO_TOKEN, axis=-1), path, width)


def best_of_more(asked, logits, node, path, width):
    """Draws one child more than asked for and drops the one with the lowest score."""
    tokens, score, law = asked.choose(logits, node, path, width + 1)
    best = jnp.argsort(-score, axis=-1)[..., :width]
    return jnp.take_along_axis(tokens, best, -1), jnp.take_along_axis(score, best, -1), law


def noise_by_own_position(asked, logits, node, path, width):
    """Keys the noise of a draft by the drafted token's own position, at temperature 1."""
    position = asked.root[:, None] + jnp.sum(path != NO_TOKEN, axis=-1) + 1
    law = jax.nn.log_softmax(logits, axis=-1)
    draw = jax.vmap(noise.draft, in_axes=(None, 0, None, None))
    gumbel = jax.vmap(draw, in_axes=(0, 0, None, None))(
        asked.keys, position, jnp.int32(0), logits.shape[-1]
    )
    tokens = first_argmax(law + gumbel)[..., None]
    return tokens, jnp.take_along_axis(law, tokens, axis=-1), law


def drops_unlikely(draft: Draft, rounds) -> Draft:
    """Drops a drafted token because its own probability is low, and what was drafted after it."""
    parent = jnp.maximum(draft.parents, 0)
    own = jax.vmap(lambda law, parent, token: law[parent, token])(draft.log_q, parent, draft.tokens)
    dropped = own < jnp.log(0.4)
    return replace(draft, parents=jnp.where(dropped, NO_PARENT, draft.parents))


def every_second_round(draft: Draft, rounds) -> Draft:
    """No fault: drafts nothing in every second round, so that the next block is narrower."""
    return replace(draft, parents=jnp.where(rounds % 2 == 0, draft.parents, NO_PARENT))

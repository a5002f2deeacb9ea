"""Drafters, targets and rounds with one fault each, around right ones."""

import typing
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Int, Key

from specjax import loop, noise
from specjax.recompute import TokenCache
from specjax.sampling import first_argmax
from specjax.types import (
    NO_PARENT,
    NO_TOKEN,
    RUNNING,
    STOPPED,
    Choose,
    Context,
    Draft,
    SpecState,
    TargetOutput,
)


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


def one_vector_for_all_parents(asked, logits, node, path, width):
    """Draws the children of sibling parents with one vector of noise."""
    return asked.choose(logits, jnp.zeros_like(node), path, width)


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


@typing.no_type_check
@struct.dataclass
class LockstepCache:
    """Commits as many tokens to every row as the row that accepted fewest."""

    own: Any

    @property
    def length(self) -> Int[Array, " B"]:
        return self.own.length

    def commit(self, path, count: Int[Array, " B"]) -> Self:
        fewest = jnp.min(jnp.where(count > 0, count, jnp.max(count)))
        return replace(self, own=self.own.commit(path, jnp.minimum(count, fewest)))

    def take(self, rows) -> Self:
        return replace(self, own=self.own.take(rows))

    def rollback(self, count) -> Self:
        return replace(self, own=self.own.rollback(count))


@dataclass(frozen=True)
class Lockstep:
    """``target`` with a cache that advances the batch by its minimum."""

    target: Any

    def init_cache(self, batch: int, slots: int) -> LockstepCache:
        return LockstepCache(self.target.init_cache(batch, slots))

    def __call__(self, params, tokens, parents, cache, *, logits_at=None, taps=()) -> TargetOutput:
        out = self.target(params, tokens, parents, cache.own, logits_at=logits_at, taps=taps)
        return replace(out, cache=LockstepCache(out.cache))


@dataclass(frozen=True)
class SiblingsPenalised:
    """``target`` that subtracts ``frequency`` from the tokens of a node's siblings, too.

    What a frequency penalty does where a node's history holds all that was drafted at its depth.
    """

    target: Any
    frequency: float

    def init_cache(self, batch: int, slots: int) -> Any:
        return self.target.init_cache(batch, slots)

    def __call__(self, params, tokens, parents, cache, *, logits_at=None, taps=()) -> TargetOutput:
        out = self.target(params, tokens, parents, cache, logits_at=logits_at, taps=taps)
        if parents is None:
            return out
        other = ~jnp.eye(tokens.shape[1], dtype=bool)
        siblings = (
            (parents[:, :, None] == parents[:, None]) & (parents != NO_PARENT)[:, None] & other
        )
        one_hot = jax.nn.one_hot(tokens, out.logits.shape[-1])
        counted = jnp.einsum("bij,bjv->biv", siblings.astype(one_hot.dtype), one_hot)
        return replace(out, logits=out.logits - self.frequency * counted)


@typing.no_type_check
@struct.dataclass
class SlotCache:
    """Tokens in slots, how many are committed, and how far any were ever written."""

    tokens: Int[Array, "B S"]
    length: Int[Array, " B"]
    written: Int[Array, " B"]

    def commit(self, path, count: Int[Array, " B"]) -> Self:
        return replace(self, length=self.length + count)

    def take(self, rows: Int[Array, " R"]) -> Self:
        return jax.tree.map(lambda x: x[rows], self)

    def rollback(self, count) -> Self:
        return replace(self, length=jnp.maximum(self.length - count, 0))


@dataclass(frozen=True)
class SumOfSlots:
    """Logits that add up over all visible slots: what is visible that should not be, shows.

    Parameters are two tables [V, V]: one for the token itself, one for each visible token. With
    ``stale``, slots that an earlier, wider block has left behind this one are visible. Chains only.
    """

    stale: bool = False

    def init_cache(self, batch: int, slots: int) -> SlotCache:
        none = jnp.zeros((batch,), jnp.int32)
        return SlotCache(jnp.zeros((batch, slots), jnp.int32), none, none)

    def __call__(self, params, tokens, parents, cache, *, logits_at=None, taps=()) -> TargetOutput:
        block, start = tokens.shape[1], cache.length
        slots = TokenCache(cache.tokens, start).write(tokens).tokens
        slot = jnp.arange(slots.shape[1])
        visible = slot <= start[:, None, None] + jnp.arange(block)[:, None]
        if self.stale:
            end = start[:, None, None] + block
            visible |= (slot >= end) & (slot < cache.written[:, None, None])
        weight = visible.astype(params.dtype)
        logits = params[0][tokens] + jnp.einsum("bts,bsv->btv", weight, params[1][slots])
        written = jnp.maximum(cache.written, start + block)
        if logits_at is not None:
            # The padding of a prompt is no draft.
            written = cache.written
            logits = jnp.take_along_axis(logits, logits_at[:, None, None], axis=1)
        return TargetOutput(logits, SlotCache(slots, start, written))


def bonus_after_end(
    target, params, drafter, drafter_params, rule, request, state: SpecState
) -> SpecState:
    """A round that looks for the end after it has emitted: what followed the end stays."""
    blind = replace(request, eos_ids=jnp.full_like(request.eos_ids, NO_TOKEN))
    after = loop.step(target, params, drafter, drafter_params, rule, blind, state)
    place = jnp.arange(after.context.tokens.shape[1])
    new = (place >= state.context.length[:, None]) & (place < after.context.length[:, None])
    is_end = jnp.any(after.context.tokens[:, :, None] == request.eos_ids[:, None], axis=-1)
    ended = jnp.any(new & is_end, axis=1) & (state.finish == RUNNING)
    return replace(after, finish=jnp.where(ended, STOPPED, after.finish))


def rejected_drafts_counted(
    target, params, drafter, drafter_params, rule, request, state: SpecState
) -> SpecState:
    """A round after which the penalties count rejected drafts as output. Chains only."""
    after = loop.step(target, params, drafter, drafter_params, rule, request, state)
    accepted = jnp.maximum(after.context.length - state.context.length - 1, 0)
    tokens = after.draft_state.tokens[:, 1:]
    rejected = jnp.where(state.done, 0, tokens.shape[1] - accepted)
    seen = after.seen.after(request.sampling, tokens[:, ::-1], rejected)
    return replace(after, seen=seen)

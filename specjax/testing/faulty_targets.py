"""Targets with one fault each: in what their cache commits, shows, or takes for history."""

import typing
from dataclasses import dataclass, replace
from typing import Any, Self

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Int

from specjax.recompute import TokenCache
from specjax.types import NO_PARENT, TargetOutput


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

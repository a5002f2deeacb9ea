"""Truncation of a law: min-p, top-k and top-p, in this order, which is vLLM's.

(Transformers applies min-p last.) All three keep a head of one order of the tokens. The most likely
ones are sorted, and mostly that is enough; else the order is bisected.
"""

import typing
from typing import NamedTuple, Self

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from specjax.row_values import integers, numbers, of_rows

# Enough for most laws and settings, and cheap beside the passes over the vocabulary.
SORTED = 256


@typing.no_type_check
@struct.dataclass
class Truncation:
    """What is kept of each row's law.

    Attributes:
        top_k: ``<= 0`` or ``>= V`` is off.
        top_p: ``>= 1`` is off.
        min_p: ``<= 0`` is off.
    """

    top_k: Int[Array, " B"]
    top_p: Float[Array, " B"]
    min_p: Float[Array, " B"]

    @classmethod
    def create(cls, batch: int, *, top_k=0, top_p=1.0, min_p=0.0) -> Self:
        """Truncation for ``batch`` rows, from scalars or one value a row."""

        return cls(
            of_rows("top_k", integers("top_k", top_k), batch),
            of_rows("top_p", numbers("top_p", top_p), batch),
            of_rows("min_p", numbers("min_p", min_p), batch),
        )


def truncated(
    truncation: Truncation, law: Float[Array, "B N V"], skipped: Bool[Array, " B"]
) -> Float[Array, "B N V"]:
    """The log-law without what is cut off, summing to 1 again; ``skipped`` rows stay as they are.

    Costs nothing where no row is cut.
    """
    off = ~_asked(truncation, law) | skipped
    return lax.cond(jnp.all(off), lambda law: law, lambda law: _cut(truncation, law, off), law)


def _cut(truncation, law, off):
    head = _head(law, min(SORTED, law.shape[-1]))
    floor = jnp.where(truncation.min_p > 0, jnp.log(truncation.min_p), -jnp.inf).astype(law.dtype)
    floor = head.law[..., :1] + floor[:, None, None]
    limited = _limited(truncation.top_k, law)
    count = jnp.where(limited, truncation.top_k, jnp.inf).astype(law.dtype)[:, None]
    share = jnp.where(truncation.top_p < 1, truncation.top_p, jnp.inf).astype(law.dtype)[:, None]

    rank = jnp.arange(head.law.shape[-1])
    in_head = (head.law >= floor) & (rank < count[..., None])
    mass_in_head = jnp.cumsum(jnp.where(in_head, jnp.exp(head.law), 0.0), axis=-1)
    ends_in_head = ~in_head[..., -1] | (count <= rank.shape[0])
    mass = jnp.where(ends_in_head, mass_in_head[..., -1], _mass_above(law, floor))
    short = in_head & (mass_in_head < (share * mass)[..., None])
    last = jnp.minimum(jnp.sum(in_head, axis=-1) - 1, jnp.sum(short, axis=-1))
    # What a top-k beyond the head leaves top-p to share out is not known from the head.
    reached = (last < rank.shape[0] - 1) & ~limited[:, None]
    keeps_all = off[:, None]
    settled = ends_in_head | reached | keeps_all

    def sorted_head():
        token, least = (jnp.take_along_axis(x, last[..., None], axis=-1) for x in head)
        index = lax.broadcasted_iota(jnp.int32, law.shape, law.ndim - 1)
        return (law > token) | ((law == token) & (index <= least))

    def bisected():
        kept = (law >= floor) & _smallest_head(law, jnp.ones_like(law), count)
        weight = jnp.where(kept, jnp.exp(law), 0.0)
        kept &= _smallest_head(law, weight, share * jnp.sum(weight, axis=-1))
        return jnp.where(settled[..., None], sorted_head(), kept)

    kept = lax.cond(jnp.all(settled), sorted_head, bisected)
    # A law that is not cut stays as it is to the last bit, whatever its neighbours ask for.
    cut = jax.nn.log_softmax(jnp.where(kept, law, -jnp.inf), axis=-1)
    return jnp.where(keeps_all[..., None], law, cut)


class _Head(NamedTuple):
    """The most likely tokens, most likely first; the lowest id first among equals."""

    law: Float[Array, "B N sorted"]
    ids: Int[Array, "B N sorted"]


def _head(law, size) -> _Head:
    # As a matrix: with more axes XLA's CPU backend sorts the whole vocabulary.
    parts = lax.top_k(law.reshape(-1, law.shape[-1]), size)
    return _Head(*(part.reshape(*law.shape[:-1], size) for part in parts))


def _mass_above(law, floor):
    return jnp.sum(jnp.where(law >= floor, jnp.exp(law), 0.0), axis=-1)


def _limited(top_k, law):
    return (top_k > 0) & (top_k < law.shape[-1])


def _asked(truncation, law):
    limited = _limited(truncation.top_k, law)
    return (truncation.min_p > 0) | limited | (truncation.top_p < 1)


def _smallest_head(
    law: Float[Array, "B N V"], weight: Float[Array, "B N V"], enough: Float[Array, "B #N"]
) -> Bool[Array, "B N V"]:
    """The fewest most likely tokens whose weights reach ``enough``; ties go to the lowest id.

    Everything is kept where all weights together do not reach it. Bisects the probability, over
    its ordered bit pattern, until one token is left between what is enough and what is not: exact,
    and no sort. Only where equal probabilities are left, their ids decide.
    """
    order = _ordered_bits(law)
    highest = jnp.max(order, axis=-1) + 1

    def searching(low, high, between):
        return (high - low > 1) & (between > 1)

    def halve(state):
        low, high, above_low, above_high = state
        active = searching(low, high, above_low - above_high)
        middle = low + (high - low) // 2
        kept = order >= middle[..., None]
        reaches = jnp.sum(jnp.where(kept, weight, 0), axis=-1) >= enough
        count = jnp.sum(kept, axis=-1, dtype=jnp.int32)
        rises, falls = active & reaches, active & ~reaches
        return (
            jnp.where(rises, middle, low),
            jnp.where(falls, middle, high),
            jnp.where(rises, count, above_low),
            jnp.where(falls, count, above_high),
        )

    everything = jnp.full(highest.shape, law.shape[-1], jnp.int32)
    # Where nothing is enough there is nothing to search.
    nothing_left = jnp.where(jnp.sum(weight, axis=-1) >= enough, 0, everything)
    start = (jnp.zeros_like(highest), highest, everything, nothing_left)
    low, _, above_low, above_high = lax.while_loop(
        lambda state: jnp.any(searching(state[0], state[1], state[2] - state[3])), halve, start
    )
    return lax.cond(
        jnp.any(above_low - above_high > 1),
        lambda: _lowest_of_equals(order, low, weight, enough),
        lambda: order >= low[..., None],
    )


def _lowest_of_equals(order, threshold, weight, enough):
    """What lies above the threshold, and of what lies on it the fewest lowest ids that do."""
    above, equal = order > threshold[..., None], order == threshold[..., None]
    index = lax.broadcasted_iota(jnp.int32, order.shape, order.ndim - 1)
    index_bits = max(order.shape[-1] - 1, 1).bit_length()

    def raise_last(step, last):
        higher = last | (1 << (index_bits - 1 - step))
        kept = above | (equal & (index < higher[..., None]))
        short = jnp.sum(jnp.where(kept, weight, 0), axis=-1) < enough
        return jnp.where(short, higher, last)

    last = lax.fori_loop(0, index_bits, raise_last, jnp.zeros(order.shape[:-1], jnp.int32))
    return above | (equal & (index <= last[..., None]))


def _ordered_bits(values):
    """Unsigned integers that compare as the floats do."""
    unsigned = {4: jnp.uint32, 8: jnp.uint64, 2: jnp.uint16}[values.dtype.itemsize]
    raw = lax.bitcast_convert_type(values, unsigned)
    sign = jnp.ones_like(raw) << (values.dtype.itemsize * 8 - 1)
    return jnp.where(raw & sign != 0, ~raw, raw | sign)

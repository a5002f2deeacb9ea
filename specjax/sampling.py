"""From logits to the law that is sampled: one function for draft, target, residual and plain steps.

What is done to logits before is `specjax.shaping`'s. Here the order is vLLM's: temperature, min-p,
top-k, top-p. (Transformers applies min-p last.) All values are traced, one a row, so greedy,
sampled and differently truncated rows share one compiled call; truncation costs nothing in a call
where no row asks for it.
"""

import typing
from collections.abc import Callable
from typing import NamedTuple, Self

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from specjax.grammar import Grammar
from specjax.penalties import Penalties

GREEDY_BELOW = 1e-5
# Enough for most laws and settings, and cheap beside the passes over the vocabulary.
SORTED = 256
OPTIONAL = ("bias", "penalties", "min_tokens", "bad_words", "grammar", "processor")


@typing.no_type_check
@struct.dataclass
class Sampling:
    """Sampling parameters, a row each.

    Those that are None are absent from what is compiled; the others are traced.

    Attributes:
        temperature: below 1e-5 is greedy.
        top_k: ``<= 0`` or ``>= V`` is off.
        top_p: ``>= 1`` is off.
        min_p: ``<= 0`` is off.
        bias: added to the logits; -inf bans a token. At least one token must be left.
        penalties: for what prompt and output hold already.
        min_tokens: tokens of output before any of ``ends`` may come.
        ends: the ids that ``min_tokens`` holds back, padded with -1.
        bad_words: token sequences that the output must not hold, padded with -1 at their start.
        grammar: the automaton that the output follows, all rows' grammars in one.
        grammar_start: the state that each row's output starts from.
        processed: the rows whose logits ``processor`` changes.
        processor: ``processor(logits [V], past) -> logits [V]``, a hashable function in JAX of one
            token's logits and its `specjax.history.Past`; static.
    """

    temperature: Float[Array, " B"]
    top_k: Int[Array, " B"]
    top_p: Float[Array, " B"]
    min_p: Float[Array, " B"]
    bias: Float[Array, "B V"] | None = None
    penalties: Penalties | None = None
    min_tokens: Int[Array, " B"] | None = None
    ends: Int[Array, "B Z"] | None = None
    bad_words: Int[Array, "B Q J"] | None = None
    grammar: Grammar | None = None
    grammar_start: Int[Array, " B"] | None = None
    processed: Bool[Array, " B"] | None = None
    processor: Callable[..., Array] | None = struct.field(pytree_node=False, default=None)

    @classmethod
    def create(
        cls,
        batch: int,
        *,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        min_p=0.0,
        repetition_penalty=None,
        presence_penalty=None,
        frequency_penalty=None,
        bias=None,
        min_tokens=None,
        ends=None,
        bad_words=None,
        grammar=None,
        grammar_start=None,
        processor=None,
        processed=True,
    ) -> Self:
        """Parameters for ``batch`` rows, from values for all of them or one value a row."""

        def rows(value, dtype, *own):
            value = jnp.asarray(value, dtype)
            return jnp.broadcast_to(value, (batch, *value.shape[value.ndim - len(own) :]))

        def given(value, dtype, *own):
            return None if value is None else rows(value, dtype, *own)

        penalties = repetition_penalty, presence_penalty, frequency_penalty
        if min_tokens is not None and ends is None:
            raise ValueError("min_tokens needs ends, the ids that it holds back")
        if grammar is not None and grammar_start is None:
            grammar_start = grammar.start
        return cls(
            temperature=rows(temperature, jnp.float32),
            top_k=rows(top_k, jnp.int32),
            top_p=rows(top_p, jnp.float32),
            min_p=rows(min_p, jnp.float32),
            bias=given(bias, jnp.float32, "V"),
            penalties=_penalties(batch, *penalties),
            min_tokens=given(min_tokens, jnp.int32),
            ends=given(ends, jnp.int32, "Z"),
            bad_words=given(bad_words, jnp.int32, "Q", "J"),
            grammar=grammar,
            grammar_start=given(grammar_start, jnp.int32),
            processed=None if processor is None else rows(processed, bool),
            processor=processor,
        )

    @property
    def greedy(self) -> Bool[Array, " B"]:
        return self.temperature < GREEDY_BELOW

    @property
    def parts(self) -> tuple[str, ...]:
        """Which of the optional parts are present."""
        return tuple(name for name in OPTIONAL if getattr(self, name) is not None)

    @property
    def looks_back(self) -> bool:
        """Whether any parameter depends on the tokens that came before."""
        return any(name != "bias" for name in self.parts)


def _penalties(batch, repetition, presence, frequency) -> Penalties | None:
    if repetition is None and presence is None and frequency is None:
        return None
    return Penalties.create(
        batch,
        repetition=1.0 if repetition is None else repetition,
        presence=0.0 if presence is None else presence,
        frequency=0.0 if frequency is None else frequency,
    )


def first_argmax(values: Float[Array, "*B V"]) -> Int[Array, "*B"]:
    """The lowest index of the maximum of each vector; NaN counts as -inf.

    Two reductions, which XLA vectorises on a CPU, unlike its ``argmax``.
    """
    values = jnp.where(jnp.isnan(values), -jnp.inf, values)
    best = jnp.max(values, axis=-1, keepdims=True)
    index = lax.broadcasted_iota(jnp.int32, values.shape, values.ndim - 1)
    return jnp.min(jnp.where(values == best, index, values.shape[-1] - 1), axis=-1)


def renormalised(law: Float[Array, "*S V"]) -> Float[Array, "*S V"]:
    """A log-law of which tokens were taken out, summing to 1 again; -inf throughout if all were."""
    total = jax.nn.logsumexp(law, axis=-1, keepdims=True)
    return law - jnp.where(total > -jnp.inf, total, 0.0)


def log_probs(sampling: Sampling, logits: Float[Array, "B N V"]) -> Float[Array, "B N V"]:
    """Log-probabilities of the law that each row samples from, in the dtype of ``logits``.

    A greedy row's law is the point mass on the lowest-indexed maximum. Probability 0 is -inf.
    """
    logits = jnp.where(jnp.isnan(logits), -jnp.inf, logits)
    greedy = sampling.greedy
    temperature = jnp.where(greedy, 1.0, sampling.temperature).astype(logits.dtype)
    # Shifted before the division, which rounds the largest entry differently here and there.
    law = logits - jnp.max(logits, axis=-1, keepdims=True)
    law = jax.nn.log_softmax(law / temperature[:, None, None], axis=-1)
    cuts = ~jnp.all(_keeps_all(sampling, law))
    law = lax.cond(cuts, _truncated, lambda _, law: law, sampling, law)
    return lax.cond(jnp.any(greedy), _point_mass, lambda _, law, __: law, greedy, law, logits)


def _point_mass(greedy, law, logits):
    index = lax.broadcasted_iota(jnp.int32, law.shape, law.ndim - 1)
    peak = jnp.where(index == first_argmax(logits)[..., None], 0.0, -jnp.inf).astype(law.dtype)
    return jnp.where(greedy[:, None, None], peak, law)


def _truncated(sampling, law):
    """The law without what min-p, top-k and top-p cut off: all three keep a head of one order.

    The most likely tokens are sorted, and mostly that is enough; else the order is bisected.
    """
    head = _head(law, min(SORTED, law.shape[-1]))
    floor = jnp.where(sampling.min_p > 0, jnp.log(sampling.min_p), -jnp.inf).astype(law.dtype)
    floor = head.law[..., :1] + floor[:, None, None]
    limited = _limited(sampling.top_k, law)
    count = jnp.where(limited, sampling.top_k, jnp.inf).astype(law.dtype)[:, None]
    share = jnp.where(sampling.top_p < 1, sampling.top_p, jnp.inf).astype(law.dtype)[:, None]

    rank = jnp.arange(head.law.shape[-1])
    in_head = (head.law >= floor) & (rank < count[..., None])
    mass_in_head = jnp.cumsum(jnp.where(in_head, jnp.exp(head.law), 0.0), axis=-1)
    ends_in_head = ~in_head[..., -1] | (count <= rank.shape[0])
    mass = jnp.where(ends_in_head, mass_in_head[..., -1], _mass_above(law, floor))
    short = in_head & (mass_in_head < (share * mass)[..., None])
    last = jnp.minimum(jnp.sum(in_head, axis=-1) - 1, jnp.sum(short, axis=-1))
    # What a top-k beyond the head leaves top-p to share out is not known from the head.
    reached = (last < rank.shape[0] - 1) & ~limited[:, None]
    keeps_all = _keeps_all(sampling, law)[:, None]
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


def _keeps_all(sampling, law):
    cuts = (sampling.min_p > 0) | _limited(sampling.top_k, law) | (sampling.top_p < 1)
    return ~cuts | sampling.greedy


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

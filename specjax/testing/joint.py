"""Laws of whole sequences of tokens, how often each was generated, and the test of the two.

Sequences are numbered with the last token counting fastest.
"""

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float, Int

from specjax.sampling_params import require_integer
from specjax.testing.independence import (
    SHARE_OF_LEVEL,
    Coincidences,
    coincidences,
    refuse_repeated,
)
from specjax.testing.pearson import Fit, fit, planned, rows_to_find
from specjax.testing.power_analysis import ALPHA, PROBABILITY, Plan, require_plan
from specjax.types import Generation

Sampler = Callable[[int, int], Any]
ROWS_A_CALL = 50_000
CELLS_SHOWN = 5


def continuations(vocabulary: int, depth: int) -> Int[Array, "sequences {depth}"]:
    """All sequences of ``depth`` tokens, in the order of their numbers."""
    sequences = list(itertools.product(range(vocabulary), repeat=depth))
    return jnp.asarray(np.array(sequences, np.int32).reshape(vocabulary**depth, depth))


def after_prompt(
    prompt: Int[Array, " P"], vocabulary: int, depth: int
) -> Int[Array, "sequences P+{depth}"]:
    """The prompt followed by each sequence of ``depth`` tokens: what a model is to be asked."""
    followed = continuations(vocabulary, depth)
    repeated = jnp.broadcast_to(prompt, (followed.shape[0], prompt.shape[0]))
    return jnp.concatenate([repeated, followed], axis=1)


def next_token_laws(
    log_p: Float[Array, "sequences T V"], depth: int
) -> Float[Array, "sequences {depth} V"]:
    """The laws that the last ``depth`` tokens of each sequence are drawn from."""
    return log_p[:, -1 - depth : -1]


def sequence_law(
    log_p: Float[Array, "sequences T V"], tokens: Int[Array, "sequences T"], depth: int
) -> Float[Array, " sequences"]:
    """Probability of each sequence's last ``depth`` tokens, from a model's log-probs on it all."""
    laws = next_token_laws(log_p, depth)
    each = jnp.take_along_axis(laws, tokens[:, -depth:, None], axis=-1)
    return jnp.exp(jnp.sum(each[..., 0], axis=-1))


def total_variation(
    log_p: Float[Array, "*contexts V"], log_q: Float[Array, "*contexts V"]
) -> Float[Array, "*contexts"]:
    """Half the L1 distance of two laws; 1 minus it is what rejection sampling accepts."""
    return jnp.sum(jnp.abs(jnp.exp(log_p) - jnp.exp(log_q)), axis=-1) / 2


def output(generation: Generation, depth: int) -> Int[Array, "B {depth}"]:
    """The first ``depth`` tokens that each row generated; raises where a row has fewer."""
    short = generation.length - generation.prompt_length < depth
    if bool(jnp.any(short)):
        raise ValueError(f"{int(short.sum())} rows generated fewer than {depth} tokens")
    place = generation.prompt_length[:, None] + jnp.arange(depth)
    return jnp.take_along_axis(generation.tokens, place, axis=1)


def sequence_counts(tokens: Int[ArrayLike, "B depth"], vocabulary: int) -> Int[np.ndarray, " _"]:
    """How many rows hold each sequence."""
    depth = np.shape(tokens)[1]
    weights = vocabulary ** np.arange(depth)[::-1]
    return np.bincount(np.asarray(tokens) @ weights, minlength=vocabulary**depth)


def transition_counts(
    tokens: Int[ArrayLike, "B T"], vocabulary: int, order: int
) -> Int[np.ndarray, "contexts V"]:
    """How often each token followed each sequence of ``order`` tokens, anywhere in the rows."""
    windows = np.lib.stride_tricks.sliding_window_view(np.asarray(tokens), order + 1, axis=1)
    counts = sequence_counts(windows.reshape(-1, order + 1), vocabulary)
    return counts.reshape(-1, vocabulary)


@dataclass(frozen=True)
class Cell:
    """One sequence: its probability, how often it was expected and seen, in standard deviations."""

    tokens: tuple[int, ...] | None
    probability: float
    expected: float
    observed: int

    @property
    def deviation(self) -> float:
        spread = math.sqrt(self.expected * (1 - self.probability))
        return (self.observed - self.expected) / spread if spread else math.inf

    def __str__(self) -> str:
        name = "all others" if self.tokens is None else " ".join(map(str, self.tokens))
        return f"{name}: expected {self.expected:,.1f}, seen {self.observed:,}"


@dataclass(frozen=True)
class JointLawResult:
    """The verdict on one sampler. ``cells`` are those farthest from their law, farthest first."""

    fit: Fit
    plan: Plan
    cells: tuple[Cell, ...]
    coincidences: Coincidences

    @property
    def p_value(self) -> float:
        return self.fit.p_value

    @property
    def keeps_law(self) -> bool:
        """Whether the p-value is at least the level, shared among the checks (Bonferroni)."""
        return self.p_value >= self.plan.level

    @property
    def independent(self) -> bool:
        """Whether rows agree with one another, and with the law, no more than by chance."""
        least = min(self.coincidences.p_value, self.fit.evenness_p)
        return least >= self.plan.level * SHARE_OF_LEVEL

    @property
    def passed(self) -> bool:
        return self.keeps_law and self.independent

    @property
    def detectable_tv(self) -> float:
        """The total variation from which on any bias is found, with the plan's probability."""
        return self.plan.smallest_tv

    def __str__(self) -> str:
        lines = [
            self._verdict(),
            f"{self.fit.samples:,} rows, chi-square {self.fit.statistic:.1f} with "
            f"{self.fit.degrees} degrees of freedom",
            f"any bias of total variation >= {self.detectable_tv:.2%} would have been found with "
            f"probability {self.plan.probability:g}",
            "farthest from the law:",
            *(f"  {cell} ({cell.deviation:+.1f} standard deviations)" for cell in self.cells),
        ]
        return "\n".join(lines)

    def _verdict(self) -> str:
        level = f"{self.plan.level:.1e}"
        if not self.keeps_law:
            return f"BREAKS the law (p = {self.p_value:.3g} < {level})"
        if self.independent:
            return f"keeps the law (p = {self.p_value:.3g} >= {level})"
        if self.coincidences.p_value < self.fit.evenness_p:
            return f"its rows are NOT independent: {self.coincidences}"
        return (
            "its rows are NOT independent: they fit the law better than any that are "
            f"(p = {self.fit.evenness_p:.1e})"
        )


def joint_law_test(
    sampler: Sampler,
    target: Any,
    *,
    rows: int | None = None,
    tv: float | None = None,
    checks: int = 1,
    alpha: float = ALPHA,
    seed: int = 0,
    rows_a_call: int | None = None,
) -> JointLawResult:
    """Draws rows from a sampler and tests the joint law of their first tokens.

    Args:
        sampler: ``sampler(seed, rows) -> tokens [rows, depth]``, with another seed each time it is
            called; `specjax.testing.samplers` makes one of a JAX function, of Transformers'
            ``generate`` or of a server. One that has ``told`` is first given the `Plan`.
        target: the law, an array [V, ..., V] with one axis a token; or a mapping from sequences to
            probabilities, what is missing to 1 being that of all others; or what has such a
            ``law()``, as `specjax.testing.tables.Table` does.
        rows: how many rows to draw, instead of as many as find a bias of ``tv``.
        tv: any bias of this total variation is to be found, in whatever direction; 1% if neither
            is given.
        checks: how many such tests are judged together at the family-wise level ``alpha``.
        seed: of the whole test. The same seed again is no new evidence.
        rows_a_call: most rows that the sampler is asked for at once; at most half of them, and
            50,000, so that a seed that is ignored shows.

    Raises:
        ValueError: a law that is none, tokens of another shape or outside the vocabulary, the same
            rows for two seeds, or so few rows that no bias of any size would be found.
    """
    numbered = _outcomes(target)
    plan = _plan(numbered, rows, tv, checks, alpha)
    if hasattr(sampler, "told"):
        sampler.told(plan)
    calls = _drawn(sampler, numbered, plan.rows, _rows_a_call(plan.rows, rows_a_call), seed)
    law, known = numbered.law, numbered.law.size - numbered.lumps
    counts = np.bincount(np.concatenate(calls), minlength=law.size)
    found = fit(counts, law)
    return JointLawResult(found, plan, _farthest(numbered, counts), coincidences(calls, law, known))


def plan_of(
    target: Any,
    *,
    rows: int | None = None,
    tv: float | None = None,
    checks: int = 1,
    alpha: float = ALPHA,
) -> Plan:
    """What `joint_law_test` would draw with these arguments, and what that is sure to find."""
    return _plan(_outcomes(target), rows, tv, checks, alpha)


def _plan(numbered, rows, tv, checks, alpha) -> Plan:
    require_plan(numbered.law.size, checks, alpha=alpha)
    if rows is not None and tv is not None:
        raise ValueError("rows and tv both say how many rows to draw: give one of them")
    level = alpha / checks
    hidden = numbered.law[-1] if numbered.lumps else 0.0
    if rows is None:
        rows = _rows_for(numbered.law, 0.01 if tv is None else tv, hidden, level)
    require_integer("rows", rows, at_least=1)
    found = planned(numbered.law, rows).detectable_tv(PROBABILITY, level) + hidden
    if found >= 1:
        half = (1 + hidden) / 2
        raise ValueError(
            f"{rows:,} rows find no bias of any size: "
            f"{_rows_for(numbered.law, half, hidden, level):,} find one of {half:.0%}"
        )
    return Plan(rows, found, checks, alpha)


def _rows_for(law, tv, hidden, level) -> int:
    if not isinstance(tv, float) or not 0 < tv < 1:
        raise ValueError(f"tv is {tv!r}: a total variation to be found lies between 0 and 1")
    if tv <= hidden:
        raise ValueError(
            f"the law leaves {hidden:.2%} to sequences that it does not list, among which a bias "
            f"of {tv:.2%} could hide: list more of them, or ask for a larger tv"
        )
    return rows_to_find(law, tv - hidden, alpha=level)


def _rows_a_call(rows: int, most: int | None) -> int:
    if most is None:
        return min(ROWS_A_CALL, -(-rows // 2))
    require_integer("rows_a_call", most, at_least=1)
    return most


def _drawn(sampler, numbered, rows, rows_a_call, seed) -> list[Int[np.ndarray, " _"]]:
    """The number of each row's sequence, call by call."""
    require_integer("seed", seed, at_least=0)
    if not callable(sampler):
        raise ValueError(f"the sampler is {sampler!r}: give a function (seed, rows) -> tokens")
    calls = []
    seeds = np.random.SeedSequence(seed).generate_state(-(-rows // rows_a_call), np.uint32) >> 1
    for call, its_seed in enumerate(seeds.tolist()):
        asked = min(rows_a_call, rows - call * rows_a_call)
        tokens = _checked(sampler(its_seed, asked), asked, numbered.depth)
        calls.append(numbered.numbers(tokens))
        if call:
            refuse_repeated(calls[-1], calls[0], numbered.law)
    return calls


@dataclass(frozen=True)
class _Array:
    """The law of all sequences over a vocabulary."""

    law: Float[np.ndarray, " sequences"]
    vocabulary: int
    depth: int
    lumps = False

    def numbers(self, tokens) -> Int[np.ndarray, " rows"]:
        if tokens.size and not 0 <= tokens.min() <= tokens.max() < self.vocabulary:
            raise ValueError(
                f"the sampler returned token ids from {tokens.min()} to {tokens.max()}, the law is "
                f"over 0 to {self.vocabulary - 1}"
            )
        return tokens.astype(np.int64) @ self.vocabulary ** np.arange(self.depth)[::-1]

    def tokens(self, number):
        return tuple(map(int, np.unravel_index(number, (self.vocabulary,) * self.depth)))


@dataclass(frozen=True)
class _Listed:
    """The law of some sequences, and of all others together."""

    law: Float[np.ndarray, " sequences"]
    number: Mapping[tuple[int, ...], int]
    depth: int
    lumps = True

    def numbers(self, tokens) -> Int[np.ndarray, " rows"]:
        distinct, which = np.unique(tokens, axis=0, return_inverse=True)
        others = len(self.number)
        numbers = [self.number.get(tuple(row), others) for row in distinct.tolist()]
        return np.array(numbers, np.int64)[which.reshape(-1)]

    def tokens(self, number):
        return (*self.number, None)[number]


def _outcomes(target) -> _Array | _Listed:
    law = target.law() if hasattr(target, "law") else target
    if isinstance(law, Mapping):
        return _listed(law)
    law = np.asarray(law, np.float64)
    if law.ndim == 0 or len(set(law.shape)) != 1:
        raise ValueError(f"the law has shape {law.shape}: give [V, ..., V], an axis a token")
    if not np.all(law >= 0):
        raise ValueError("the law has an entry that is no probability: it is negative or NaN")
    if abs(law.sum() - 1) > 1e-6:
        raise ValueError(f"the law sums to {law.sum():.6g}: probabilities sum to 1")
    return _Array(law.reshape(-1), law.shape[0], law.ndim)


def _listed(law: Mapping) -> _Listed:
    if not law or not all(isinstance(sequence, tuple) for sequence in law):
        raise ValueError("the law lists no sequences: map tuples of token ids to probabilities")
    depths = {len(sequence) for sequence in law}
    if len(depths) != 1:
        raise ValueError("the law lists sequences of different lengths: list one length only")
    if any(int(token) != token for sequence in law for token in sequence):
        raise ValueError("the law lists a sequence of tokens that are no ids: ids are integers")
    listed = np.array(list(law.values()), np.float64)
    if not np.all(listed >= 0) or listed.sum() > 1 + 1e-6:
        raise ValueError("the listed probabilities are no law: negative, or more than 1 in all")
    if not listed.sum():
        raise ValueError("the listed sequences have no probability: list those that may come")
    # What rounding has left over is no outcome.
    others = 1 - listed.sum() if listed.sum() < 1 - 1e-6 else 0.0
    number = {tuple(map(int, sequence)): place for place, sequence in enumerate(law)}
    return _Listed(np.append(listed, others), number, depths.pop())


def _checked(tokens, rows: int, depth: int) -> Int[np.ndarray, "rows depth"]:
    try:
        tokens = np.asarray(tokens)
    except ValueError:
        raise ValueError(
            f"the sampler returned rows of different lengths: give each at least {depth} tokens"
        ) from None
    if tokens.ndim != 2 or tokens.shape[0] != rows or tokens.shape[1] < depth:
        raise ValueError(
            f"the sampler returned shape {tokens.shape}: it was asked for {rows} rows of at least "
            f"{depth} tokens"
        )
    if not np.issubdtype(tokens.dtype, np.integer):
        raise ValueError(f"the sampler returned {tokens.dtype}: token ids are integers")
    return tokens[:, :depth]


def _farthest(numbered, counts) -> tuple[Cell, ...]:
    rows, law = counts.sum(), numbered.law / numbered.law.sum()
    spread = np.sqrt(rows * law * (1 - law))
    with np.errstate(divide="ignore", invalid="ignore"):
        far = np.nan_to_num(np.abs(counts - rows * law) / spread, nan=0.0)
    order = np.argsort(-far, kind="stable")[:CELLS_SHOWN]
    return tuple(
        Cell(numbered.tokens(int(n)), float(law[n]), float(rows * law[n]), int(counts[n]))
        for n in order
    )

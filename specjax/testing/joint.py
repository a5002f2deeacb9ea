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

from specjax.testing.pearson import Fit, fit
from specjax.testing.power_analysis import ALPHA, Plan, rows_needed
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

    @property
    def p_value(self) -> float:
        return self.fit.p_value

    @property
    def passed(self) -> bool:
        """Whether the p-value is at least the level, shared among the checks (Bonferroni)."""
        return self.p_value >= self.plan.alpha / self.plan.checks

    @property
    def detectable_tv(self) -> float:
        """The total variation from which on any bias is found, with the plan's probability."""
        return self.fit.detectable_tv(self.plan.probability, self.plan.alpha / self.plan.checks)

    def __str__(self) -> str:
        level = f"{self.plan.alpha / self.plan.checks:.1e}"
        verdict = (
            f"keeps the law (p = {self.p_value:.3g} >= {level})"
            if self.passed
            else f"BREAKS the law (p = {self.p_value:.3g} < {level})"
        )
        lines = [
            verdict,
            f"{self.fit.samples:,} rows, chi-square {self.fit.statistic:.1f} with "
            f"{self.fit.degrees} degrees of freedom",
            f"any bias of total variation >= {self.detectable_tv:.2%} would have been found with "
            f"probability {self.plan.probability:g}",
            "farthest from the law:",
            *(f"  {cell} ({cell.deviation:+.1f} standard deviations)" for cell in self.cells),
        ]
        return "\n".join(lines)


def joint_law_test(
    sampler: Sampler,
    target: Any,
    *,
    rows: int | None = None,
    tv: float = 0.01,
    checks: int = 1,
    alpha: float = ALPHA,
    seed: int = 0,
    rows_a_call: int = ROWS_A_CALL,
) -> JointLawResult:
    """Draws rows from a sampler and tests the joint law of their first tokens.

    Args:
        sampler: ``sampler(seed, rows) -> tokens [rows, depth]``, with another seed each time it is
            called; `specjax.testing.samplers` makes one of a JAX function, of Transformers'
            ``generate`` or of a server. One that has ``told`` is first given the `Plan`.
        target: the law, an array [V, ..., V] with one axis a token; or a mapping from sequences to
            probabilities, what is missing to 1 being that of all others; or what has such a
            ``law()``, as `specjax.testing.tables.Table` does.
        rows: how many rows to draw; None draws what finds any bias of ``tv``.
        checks: how many such tests are judged together at the family-wise level ``alpha``.
        seed: of the whole test. The same seed again is no new evidence.

    Raises:
        ValueError: a law that is none, or tokens of another shape or outside the vocabulary.
    """
    numbered = _outcomes(target.law() if hasattr(target, "law") else target)
    cells = int(np.count_nonzero(numbered.law))
    if rows is None:
        rows = rows_needed(tv, cells=cells, checks=checks, alpha=alpha)
    plan = Plan(rows, cells, checks, alpha)
    if hasattr(sampler, "told"):
        sampler.told(plan)
    counts = np.zeros(numbered.law.shape, np.int64)
    calls = -(-rows // rows_a_call)
    seeds = np.random.SeedSequence(seed).generate_state(calls, np.uint32) >> 1
    for call, its_seed in enumerate(seeds.tolist()):
        asked = min(rows_a_call, rows - call * rows_a_call)
        counts += numbered.count(_checked(sampler(its_seed, asked), asked, numbered.depth))
    return JointLawResult(fit(counts, numbered.law), plan, _farthest(numbered, counts))


@dataclass(frozen=True)
class _Array:
    """The law of all sequences over a vocabulary."""

    law: Float[np.ndarray, " sequences"]
    vocabulary: int
    depth: int

    def count(self, tokens):
        if tokens.size and not 0 <= tokens.min() <= tokens.max() < self.vocabulary:
            raise ValueError(
                f"the sampler returned token ids from {tokens.min()} to {tokens.max()}, the law is "
                f"over 0 to {self.vocabulary - 1}"
            )
        return sequence_counts(tokens, self.vocabulary)

    def tokens(self, number):
        return tuple(map(int, np.unravel_index(number, (self.vocabulary,) * self.depth)))


@dataclass(frozen=True)
class _Listed:
    """The law of some sequences, and of all others together."""

    law: Float[np.ndarray, " sequences"]
    number: Mapping[tuple[int, ...], int]
    depth: int

    def count(self, tokens):
        distinct, times = np.unique(tokens, axis=0, return_counts=True)
        others = len(self.number)
        numbers = [self.number.get(tuple(row), others) for row in distinct.tolist()]
        return np.bincount(numbers, weights=times, minlength=others + 1).astype(np.int64)

    def tokens(self, number):
        return (*self.number, None)[number]


def _outcomes(law) -> _Array | _Listed:
    if isinstance(law, Mapping):
        depths = {len(sequence) for sequence in law}
        if len(depths) != 1:
            raise ValueError("the law lists sequences of different lengths: list one length only")
        listed = np.array(list(law.values()), np.float64)
        if not np.all(listed >= 0) or listed.sum() > 1 + 1e-6:
            raise ValueError("the listed probabilities are no law: negative, or more than 1 in all")
        # What rounding has left over is no outcome.
        others = 1 - listed.sum() if listed.sum() < 1 - 1e-6 else 0.0
        number = {tuple(map(int, sequence)): place for place, sequence in enumerate(law)}
        return _Listed(np.append(listed, others), number, depths.pop())
    law = np.asarray(law, np.float64)
    if law.ndim == 0 or len(set(law.shape)) != 1:
        raise ValueError(f"the law has shape {law.shape}: give [V, ..., V], an axis a token")
    if not np.all(law >= 0) or abs(law.sum() - 1) > 1e-6:
        raise ValueError(f"the law sums to {law.sum():.6g}, or has an entry that is no probability")
    return _Array(law.reshape(-1), law.shape[0], law.ndim)


def _checked(tokens, rows: int, depth: int) -> Int[np.ndarray, "rows depth"]:
    tokens = np.asarray(tokens)
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

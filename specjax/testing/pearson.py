"""How far counts are from a law: Pearson's statistic, its exact tails and a normal score.

Wilson and Hilferty, "The distribution of chi-square" (1931), for the score.
"""

import itertools
import math
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int, Real
from scipy import special

from specjax.testing.power_analysis import PROBABILITY, rows_needed, smallest_tv

FEWEST_EXPECTED = 10.0
MOST_ROWS = 1 << 31
SCORE_LIMIT = 5.0


class Fit(NamedTuple):
    """Pearson's statistic of ``samples`` draws and its degrees of freedom.

    ``rare`` is the mass of all cells expected less than 10 times together, for which the law of
    the statistic would be wrong; ``rare_p`` is the exact tail of how often they were drawn, 1 if
    there are none. Where together they are expected more often, they are one cell of the statistic
    and ``pooled`` is their mass. One draw of what has probability 0 makes the statistic infinite.
    ``widened`` is the statistic of counts that lie half a draw farther from what was expected.
    """

    statistic: float
    degrees: int
    samples: int
    rare: float
    rare_p: float
    pooled: float = 0.0
    widened: float = math.inf

    @property
    def p_value(self) -> float:
        """Upper tail of the chi-square law; with rare cells twice the smaller of the two tails."""
        if math.isinf(self.statistic):
            return 0.0
        tail = float(special.chdtrc(self.degrees, self.statistic)) if self.degrees else 1.0
        return min(1.0, 2 * min(tail, self.rare_p)) if self.rare else tail

    @property
    def evenness_p(self) -> float:
        """How likely independent draws are to come as close as these to what was expected.

        An upper bound: whole draws cannot come closer than half of one. Quotas and strata do.
        """
        return float(special.chdtr(self.degrees, self.widened)) if self.degrees else 1.0

    def detectable_tv(self, probability: float, alpha: float) -> float:
        """The total variation from which on any bias has a p-value below ``alpha`` so often.

        What rare cells could gain before their own tail shows it, or lose, is added, and so is what
        could be moved among those that are one cell.
        """
        level = alpha / 2 if self.rare else alpha
        found = smallest_tv(
            self.samples, cells=self.degrees + 1, probability=probability, alpha=level
        )
        return min(1.0, found + self._hidden(probability, level) + self.pooled)

    def _hidden(self, probability: float, level: float) -> float:
        if not self.rare:
            return 0.0
        # The number of draws that is too many, and the mass that draws as many so often.
        too_many = next(
            number
            for number in itertools.count(1)
            if special.bdtrc(number - 1, self.samples, self.rare) < level
        )
        return float(special.bdtri(too_many - 1, self.samples, 1 - probability))


class Score(NamedTuple):
    """A standard normal ``z`` if the law is right, from ``samples`` draws.

    ``degrees`` are those of the statistic; with none left, ``z`` is 0.
    """

    z: float
    degrees: int
    samples: int

    def detectable_tv(self, power: float = 0.99, limit: float = SCORE_LIMIT) -> float:
        """The total variation at which any bias has ``z > limit`` with probability ``power``."""
        return detectable_tv(self.degrees, self.samples, power, limit)


def pearson(
    counts: Int[np.ndarray, "*contexts cells"], law: Float[np.ndarray, "*contexts cells"]
) -> Score:
    """Compares counts with a law, or with one law a context given that context's total.

    Cells expected less than 10 times are pooled within their context. One draw of what has
    probability 0 makes the score infinite. NaN in the law raises ValueError.
    """
    counts, law = _rows_of(counts), _checked(_rows_of(law))
    samples = int(counts.sum())
    if np.any(counts[law == 0]):
        return Score(math.inf, 0, samples)
    parts = [_statistic(*_pool(*pair)) for pair in zip(counts, law, strict=True)]
    statistic, degrees = (sum(values) for values in zip(*parts, strict=True))
    return Score(_wilson_hilferty(statistic, degrees), degrees, samples)


def fit(counts: Real[np.ndarray, " cells"], law: Float[np.ndarray, " cells"]) -> Fit:
    """Compares counts with one law, the cells that are rare apart from the others.

    Unlike a pool, rare cells that are drawn too often cannot hide behind one that is not rare.
    NaN in the law raises ValueError.
    """
    law = _checked(np.asarray(law, np.float64))
    law, samples = law / law.sum(), round(float(counts.sum()))
    rare = law * samples < FEWEST_EXPECTED
    mass, pooled = float(law[rare].sum()), 0.0
    if mass * samples >= FEWEST_EXPECTED:
        often = np.append(counts[~rare], counts[rare].sum())
        expected = np.append(law[~rare], mass) * samples
        mass_apart, rare_p = 0.0, 1.0
        pooled = mass if np.count_nonzero(law[rare]) > 1 else 0.0
    else:
        often, kept = counts[~rare], law[~rare]
        expected = kept / max(kept.sum(), 1e-300) * often.sum()
        mass_apart = mass
        rare_p = float(special.bdtrc(counts[rare].sum() - 1, samples, mass)) if mass else 1.0
    statistic, degrees = _statistic(often, expected)
    widened, _ = _statistic(expected + np.abs(often - expected) + 0.5, expected)
    if np.any(counts[law == 0]):
        statistic = math.inf
    return Fit(statistic, degrees, samples, mass_apart, rare_p, pooled, widened)


def planned(law: Float[np.ndarray, " cells"], rows: int) -> Fit:
    """The `Fit` of rows that come exactly as expected: what so many can find depends on no more."""
    return fit(law / law.sum() * rows, law)


def rows_to_find(
    law: Float[np.ndarray, " cells"], tv: float, *, probability: float = PROBABILITY, alpha: float
) -> int:
    """The rows, to 2%, from which on `fit` finds any bias of ``tv`` in any direction.

    More than `rows_needed` where some cells are so rare that a bias could hide among them. Raises
    ValueError where over two billion rows would be needed.
    """
    rows = rows_needed(tv, cells=int(np.count_nonzero(law)), probability=probability, alpha=alpha)
    # What rounding the rows up has gained is less than this.
    while rows < MOST_ROWS and planned(law, rows).detectable_tv(probability, alpha) > tv + 1e-12:
        rows = math.ceil(rows * 1.02)
    if rows >= MOST_ROWS:
        raise ValueError(f"over two billion rows are needed to find a tv of {tv}: ask for a larger")
    return rows


def detectable_tv(
    degrees: int, samples: int, power: float = 0.99, limit: float = SCORE_LIMIT
) -> float:
    """The smallest total variation whose score exceeds ``limit`` with probability ``power``."""
    if degrees < 1:
        raise ValueError("a statistic without a degree of freedom detects nothing: draw more")
    level = float(special.ndtr(-limit))
    return smallest_tv(samples, cells=degrees + 1, probability=power, alpha=level)


def _rows_of(values):
    return np.asarray(values).reshape(-1, np.shape(values)[-1])


def _checked(law):
    if not np.all(law >= 0):
        raise ValueError("a law has an entry that is no probability: it is negative or NaN")
    return law.astype(np.float64)


def _statistic(counts, expected) -> tuple[float, int]:
    """Pearson's statistic of one multinomial sample, and its degrees of freedom."""
    if counts.size < 2:
        return 0.0, 0
    return float(np.sum((counts - expected) ** 2 / expected)), counts.size - 1


def _pool(counts, law):
    """Merges the rarest cells into one that is expected often enough."""
    expected = law / law.sum() * counts.sum()
    order = np.argsort(-expected, kind="stable")
    counts, expected = counts[order], expected[order]
    kept = int(np.sum(expected >= FEWEST_EXPECTED))
    while kept > 0 and 0 < expected[kept:].sum() < FEWEST_EXPECTED:
        kept -= 1
    counts = np.append(counts[:kept], counts[kept:].sum())
    expected = np.append(expected[:kept], expected[kept:].sum())
    return counts[expected > 0], expected[expected > 0]


def _wilson_hilferty(statistic: float, degrees: int) -> float:
    if degrees == 0:
        return 0.0
    spread = 2 / (9 * degrees)
    return ((statistic / degrees) ** (1 / 3) - (1 - spread)) / math.sqrt(spread)

"""How far counts are from a law: Pearson's statistic, as a normal score.

Wilson and Hilferty, "The distribution of chi-square" (1931), for the score; Abdel-Aty,
"Approximate formulae for the percentage points and the probability integral of the non-central
chi-square distribution" (1954), for the power.
"""

import math
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

FEWEST_EXPECTED = 10.0
SCORE_LIMIT = 5.0


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
    cells = np.shape(counts)[-1]
    counts = np.asarray(counts).reshape(-1, cells)
    law = np.asarray(law, np.float64).reshape(-1, cells)
    if not np.all(law >= 0):
        raise ValueError("a law has an entry that is no probability: it is negative or NaN")
    samples = int(counts.sum())
    if np.any(counts[law == 0]):
        return Score(math.inf, 0, samples)
    parts = [_statistic(*pair) for pair in zip(counts, law, strict=True)]
    statistic, degrees = (sum(values) for values in zip(*parts, strict=True))
    return Score(_wilson_hilferty(statistic, degrees), degrees, samples)


def detectable_tv(
    degrees: int, samples: int, power: float = 0.99, limit: float = SCORE_LIMIT
) -> float:
    """The smallest total variation whose score exceeds ``limit`` with probability ``power``.

    For the bias that is hardest to see: it moves mass between two halves of the law, in
    proportion, where the non-centrality is 4 samples TV^2.
    """
    if degrees < 1:
        raise ValueError("a statistic without a degree of freedom detects nothing: draw more")
    critical = degrees * (1 - 2 / (9 * degrees) + limit * math.sqrt(2 / (9 * degrees))) ** 3
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        if _power(degrees, 4 * samples * middle**2, critical) < power:
            low = middle
        else:
            high = middle
    return high


def _power(degrees: int, noncentrality: float, critical: float) -> float:
    mean = degrees + noncentrality
    spread = 2 * (degrees + 2 * noncentrality) / (9 * mean**2)
    quantile = (critical / mean) ** (1 / 3)
    return 1 - NormalDist(1 - spread, math.sqrt(spread)).cdf(quantile)


def _statistic(counts, law) -> tuple[float, int]:
    """Pearson's statistic of one multinomial sample, and its degrees of freedom."""
    counts, expected = _pool(counts.astype(np.float64), law / law.sum() * counts.sum())
    if counts.size < 2:
        return 0.0, 0
    return float(np.sum((counts - expected) ** 2 / expected)), counts.size - 1


def _pool(counts, expected):
    """Merges the rarest cells into one that is expected often enough."""
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

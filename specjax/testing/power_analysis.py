"""How many rows find how small a bias: the power of Pearson's statistic, and worst-case biases.

A bias of total variation t moves mass t from one part of a law to the rest. Pearson's statistic of
n draws is then non-central chi-square with parameter n sum (difference^2 / law) >= 4 n t^2 (Cauchy
and Schwarz; equality where both parts hold half the mass and move it in proportion). What is stated
here is for that worst direction, so it holds for every other. Cohen, "Statistical Power Analysis
for the Behavioral Sciences" (1988), chapter 7.

Levels are family-wise. Plans divide the level by the number of checks (Bonferroni), which needs no
word about how the checks depend on one another. Verdicts use Holm's step-down p-values, which
reject whatever Bonferroni rejects: the stated power is a lower bound.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float
from scipy import special

from specjax.sampling_params import require_integer

ALPHA = 1e-6
PROBABILITY = 0.99
DEFAULT_CELLS = 3**4


def power(
    rows: int, tv: float, *, cells: int = DEFAULT_CELLS, checks: int = 1, alpha: float = ALPHA
) -> float:
    """Probability that one check finds a bias of total variation ``tv``, whatever its direction.

    ``cells`` is the number of outcomes (3^4 for four tokens of a vocabulary of 3), ``checks`` how
    many share the family-wise level ``alpha``. Raises ValueError for a ``tv`` outside (0, 1], and
    for numbers that are none of rows, outcomes, checks or a level.
    """
    require_integer("rows", rows, at_least=0)
    _require_total_variation(tv)
    require_plan(cells, checks, alpha=alpha)
    return _power(cells - 1, rows, tv, _critical_value(cells - 1, alpha / checks))


def rows_needed(
    tv: float,
    *,
    cells: int = DEFAULT_CELLS,
    checks: int = 1,
    probability: float = PROBABILITY,
    alpha: float = ALPHA,
) -> int:
    """Rows a check, so that any bias of at least ``tv`` is found with ``probability``.

    Raises ValueError for a ``tv`` outside (0, 1], and as `power` does.
    """
    _require_total_variation(tv)
    require_plan(cells, checks, alpha=alpha, probability=probability)
    if cells < 2:
        return math.ceil(math.log1p(-probability) / math.log1p(-min(tv, 1 - 1e-12)))
    return math.ceil(_noncentrality(cells - 1, alpha / checks, probability) / (4 * tv**2))


def smallest_tv(
    rows: int,
    *,
    cells: int = DEFAULT_CELLS,
    checks: int = 1,
    probability: float = PROBABILITY,
    alpha: float = ALPHA,
) -> float:
    """The smallest total variation that so many rows find with ``probability``; 1 if none.

    A law of a single outcome is left by the first draw that differs. Raises ValueError as `power`
    does.
    """
    require_integer("rows", rows, at_least=0)
    require_plan(cells, checks, alpha=alpha, probability=probability)
    if rows < 1:
        return 1.0
    if cells < 2:
        return 1 - (1 - probability) ** (1 / rows)
    return min(1.0, math.sqrt(_noncentrality(cells - 1, alpha / checks, probability) / rows) / 2)


@dataclass(frozen=True)
class Plan:
    """A test of ``rows`` draws, one of ``checks``, and the smallest bias that it is sure to find.

    ``smallest_tv`` counts in what could hide among outcomes too rare to be looked at one by one.
    """

    rows: int
    smallest_tv: float
    checks: int = 1
    alpha: float = ALPHA
    probability: float = PROBABILITY

    @property
    def level(self) -> float:
        """Of this check alone (Bonferroni)."""
        return self.alpha / self.checks

    def __str__(self) -> str:
        family = f", {self.checks} checks together" if self.checks > 1 else ""
        return (
            f"{self.rows:,} rows find any bias of total variation >= {self.smallest_tv:.2%} with "
            f"probability {self.probability:g} (level {self.alpha:g}{family})"
        )


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's adjusted p-values: rejecting those below a level keeps the whole family to it.

    Holm, "A simple sequentially rejective multiple test procedure" (1979).
    """
    order = np.argsort(p_values, kind="stable")
    left = len(order) - np.arange(len(order))
    stepped = np.maximum.accumulate(np.minimum(1.0, np.asarray(p_values, float)[order] * left))
    adjusted = np.empty(len(order))
    adjusted[order] = stepped
    return adjusted.tolist()


def tilted(
    law: Float[np.ndarray, " cells"], gains: Bool[np.ndarray, " cells"], tv: float
) -> Float[np.ndarray, " cells"]:
    """``law`` with mass ``tv`` moved to the cells that gain, in proportion on both sides.

    Raises ValueError where the others hold less than ``tv``.
    """
    inside = law[gains].sum()
    if not 0 < inside < 1 or tv > 1 - inside:
        raise ValueError(f"a total variation of {tv} cannot be moved: the part holds {inside:.3g}")
    return np.where(gains, law * (1 + tv / inside), law * (1 - tv / (1 - inside)))


def worst_direction(law: Float[np.ndarray, " cells"]) -> Bool[np.ndarray, " cells"]:
    """Cells that hold about half the mass: the tilt that moves the statistic least."""
    gains = np.zeros(law.shape, bool)
    held = 0.0
    for cell in np.argsort(-law, kind="stable"):
        if held + law[cell] <= 0.5:
            gains[cell] = True
            held += law[cell]
    return gains


def _require_total_variation(tv: float) -> None:
    if not 0 < tv <= 1:
        raise ValueError(f"tv is {tv}: a total variation to be found lies in (0, 1]")


def require_plan(cells: int, checks: int, **shares: float) -> None:
    """Raises ValueError for numbers of outcomes or checks, or shares of 1, that are none."""
    require_integer("cells", cells, at_least=1)
    require_integer("checks", checks, at_least=1)
    for name, share in shares.items():
        if not 0 < share < 1:
            raise ValueError(f"{name} is {share}: it must lie between 0 and 1, both excluded")


def _critical_value(degrees: int, level: float) -> float:
    return float(special.chdtri(degrees, level)) if degrees else 0.0


def _power(degrees: int, rows: int, tv: float, critical: float) -> float:
    if degrees < 1:
        return 1 - (1 - tv) ** rows
    return 1 - float(special.chndtr(critical, degrees, 4 * rows * tv**2))


def _noncentrality(degrees: int, level: float, probability: float) -> float:
    """The non-centrality at which the statistic exceeds the level's critical value so often."""
    return float(special.chndtrinc(_critical_value(degrees, level), degrees, 1 - probability))

"""Whether rows were drawn independently of one another, which a test of their law presumes."""

from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int
from scipy import special

# Of a test's level: that a right sampler is accused of dependence adds nothing to be spoken of.
SHARE_OF_LEVEL = 1e-6
# Two calls that agree throughout are no accident if chance would bring it about this rarely.
ACCIDENT = 1e-12


class Coincidences(NamedTuple):
    """How many of ``pairs`` of neighbouring rows hold the same sequence.

    ``chance``: of one pair, if its rows are independent.
    """

    pairs: int
    equal: int
    chance: float

    @property
    def p_value(self) -> float:
        """Twice the smaller exact binomial tail."""
        if not 0 < self.chance < 1:
            return 1.0
        more = special.bdtrc(self.equal - 1, self.pairs, self.chance) if self.equal else 1.0
        return float(min(1.0, 2 * min(more, special.bdtr(self.equal, self.pairs, self.chance))))

    def __str__(self) -> str:
        return (
            f"{self.equal:,} of {self.pairs:,} neighbouring rows are the same, "
            f"{self.chance * self.pairs:,.1f} would be by chance"
        )


def coincidences(
    calls: list[Int[np.ndarray, " _"]], law: Float[np.ndarray, " cells"], known: int
) -> Coincidences:
    """Of the first row with the second, the third with the fourth and so on, in each call.

    ``calls`` hold the number of each row's sequence; only the first ``known`` are one sequence.
    """
    pairs = [(call[0 : len(call) - 1 : 2], call[1::2]) for call in calls]
    equal = sum(int(np.sum((one == other) & (one < known))) for one, other in pairs)
    chance = float(np.sum((law[:known] / law.sum()) ** 2))
    return Coincidences(sum(len(one) for one, _ in pairs), equal, chance)


def refuse_repeated(
    call: Int[np.ndarray, " _"], first: Int[np.ndarray, " _"], law: Float[np.ndarray, " _"]
) -> None:
    """Raise for a call that brought the rows of the first, for another seed."""
    rows = min(len(call), len(first))
    by_chance = float(np.sum((law / law.sum()) ** 2)) ** rows
    if by_chance < ACCIDENT and np.array_equal(call[:rows], first[:rows]):
        raise ValueError(
            "the sampler returned the same rows for two seeds: draw them from the seed that it is "
            "given"
        )

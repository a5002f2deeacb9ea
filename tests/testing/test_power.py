"""The stated power, confirmed by draws from laws tilted in directions that are hard to see."""

import math

import numpy as np
import pytest
from scipy import stats

from specjax.testing.pearson import fit
from specjax.testing.power_analysis import (
    Plan,
    holm,
    power,
    rows_needed,
    smallest_tv,
    tilted,
    worst_direction,
)
from specjax.testing.tables import TABLES

pytestmark = pytest.mark.fast

DRAWS = 2_000
LAW = TABLES["trigram"].law()


@pytest.mark.parametrize("tv, rows", [(0.01, 376_000), (0.003, 4_180_000)])
def test_rows_for_81_cells_and_sixty_checks(tv, rows):
    assert rows_needed(tv, checks=60) == pytest.approx(rows, rel=0.01)


@pytest.mark.parametrize("cells", [2, 9, 81, 256])
@pytest.mark.parametrize("checks", [1, 30])
def test_the_power_is_the_exact_non_central_tail(cells, checks):
    rows = rows_needed(0.02, cells=cells, checks=checks)
    critical = stats.chi2.isf(1e-6 / checks, cells - 1)
    exact = stats.ncx2.sf(critical, cells - 1, 4 * rows * 0.02**2)
    assert exact == pytest.approx(0.99, abs=1e-3)
    assert power(rows, 0.02, cells=cells, checks=checks) == pytest.approx(exact, abs=1e-6)
    assert smallest_tv(rows, cells=cells, checks=checks) == pytest.approx(0.02, rel=1e-3)


SEQUENCES = np.indices(LAW.shape).reshape(LAW.ndim, -1)
# Half the mass in proportion, one cell, and the token at one position.
DIRECTIONS = {
    "worst": worst_direction(LAW.reshape(-1)),
    "one cell": np.arange(LAW.size) == np.argmax(LAW),
    **{f"position {place}": tokens == 0 for place, tokens in enumerate(SEQUENCES)},
}


@pytest.mark.parametrize("gains", DIRECTIONS.values(), ids=list(DIRECTIONS))
def test_a_bias_of_the_planned_size_is_found_in_99_of_100_runs(gains):
    law, tv, checks = LAW.reshape(-1), 0.01, 20
    rows = rows_needed(tv, checks=checks)
    biased = tilted(law, gains, tv)
    assert np.abs(biased - law).sum() / 2 == pytest.approx(tv)
    counts = np.random.default_rng(5).multinomial(rows, biased, size=DRAWS)
    found = np.mean([fit(one, law).p_value < 1e-6 / checks for one in counts])
    assert found > 0.99 - 3 * math.sqrt(0.01 * 0.99 / DRAWS)


def test_the_worst_direction_is_the_stated_bound_and_not_worse():
    law, tv, rows = LAW.reshape(-1), 0.01, 390_000
    biased = tilted(law, worst_direction(law), tv)
    noncentrality = rows * np.sum((biased - law) ** 2 / law)
    assert noncentrality == pytest.approx(4 * rows * tv**2, rel=0.01)
    counts = np.random.default_rng(6).multinomial(rows_needed(tv) // 2, biased, size=DRAWS)
    found = np.mean([fit(one, law).p_value < 1e-6 for one in counts])
    assert found < 0.9, "half the rows must not do, or the plan is far from sharp"


def test_the_right_law_is_rejected_as_often_as_the_level_says():
    law = LAW.reshape(-1)
    counts = np.random.default_rng(7).multinomial(50_000, law, size=DRAWS)
    p_values = np.array([fit(one, law).p_value for one in counts])
    for level in (0.5, 0.1, 0.01):
        spread = math.sqrt(level * (1 - level) / DRAWS)
        assert np.mean(p_values < level) == pytest.approx(level, abs=4 * spread)


def test_p_values_are_the_exact_tail():
    law = LAW.reshape(-1)
    counts = np.random.default_rng(8).multinomial(390_000, law)
    found = fit(counts, law)
    assert found.degrees == law.size - 1 and found.rare == 0
    assert found.p_value == pytest.approx(stats.chisquare(counts, law * counts.sum()).pvalue)
    assert found.detectable_tv(0.99, 1e-6) == pytest.approx(smallest_tv(390_000))


RARE = np.array([0.62, 0.377, *[0.001] * 3])


def test_what_is_drawn_rarely_cannot_hide_behind_what_is_not():
    """A pool would take in the second cell, and move with the rare ones unseen."""
    assert fit(np.array([620, 377, 1, 1, 1]), RARE).p_value > 0.5
    moved = fit(np.array([620, 337, 41, 1, 1]), RARE)
    assert moved.degrees == 1 and moved.rare == pytest.approx(0.003)
    assert moved.p_value < 1e-20


def test_rare_cells_together_are_one_where_they_are_not_rare():
    law = np.array([0.6, 0.3, *[0.001] * 100])
    found = fit(np.array([600, 300, *[1] * 100]), law)
    assert found.degrees == 2 and found.rare == 0
    assert found.pooled == pytest.approx(0.1)


def test_what_moves_among_cells_that_are_one_is_not_said_to_be_found():
    rows, law = 50_000, np.array([0.6, 0.3, *[1e-4] * 1000])
    counts = np.array([30_000, 15_000, *[10] * 500, *[0] * 500])
    found = fit(counts, law)
    assert found.p_value == 1.0
    moved = np.abs(counts / rows - law).sum() / 2
    assert moved == pytest.approx(0.05) and found.detectable_tv(0.99, 1e-6) > moved
    assert fit(counts[:3], np.array([0.6, 0.3, 0.1])).pooled == 0


@pytest.mark.parametrize("gains", [[0], [2], [1], [2, 3, 4]])
def test_the_power_holds_with_rare_cells(gains):
    law, rows = RARE / RARE.sum(), 1_000
    tv = fit(np.round(law * rows).astype(int), law).detectable_tv(0.99, 1e-6)
    assert tv < 0.15
    biased = tilted(law, np.isin(np.arange(law.size), gains), tv)
    counts = np.random.default_rng(9).multinomial(rows, biased, size=DRAWS)
    found = np.mean([fit(one, law).p_value < 1e-6 for one in counts])
    assert found > 0.99 - 3 * math.sqrt(0.01 * 0.99 / DRAWS)


def test_a_certain_law_is_left_by_one_draw():
    assert smallest_tv(1000, cells=1) == pytest.approx(1 - 0.01 ** (1 / 1000))
    assert power(1000, smallest_tv(1000, cells=1), cells=1) == pytest.approx(0.99)
    assert rows_needed(smallest_tv(1000, cells=1), cells=1) == pytest.approx(1000, abs=1)


def test_holm_is_the_textbook_example():
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.6, 0.9]) == [1.0, 1.0]
    assert holm([]) == []


def test_a_plan_says_what_it_finds():
    assert str(Plan(330_000, 0.01)).startswith(
        "330,000 rows find any bias of total variation >= 1.00%"
    )
    assert "20 checks together" in str(Plan(390_000, 0.01, checks=20))


@pytest.mark.parametrize("tv", [0.0, -0.1, 1.5])
def test_a_total_variation_that_is_none_is_refused(tv):
    with pytest.raises(ValueError, match="lies in"):
        rows_needed(tv)


def test_a_tilt_beyond_what_is_there_is_refused():
    with pytest.raises(ValueError, match="cannot be moved"):
        tilted(np.array([0.5, 0.5]), np.array([True, False]), 0.6)

"""Every mutant is found by the check that it names, and passes the weaker one that it names."""

import pytest
from fixtures import FULL_SCALE

from specjax.testing.mutants import CHECKS, MUTANTS, ROWS_OF_BUDGET

pytestmark = pytest.mark.slow

ROWS = ROWS_OF_BUDGET["full" if FULL_SCALE else "fast"]


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_caught(name):
    mutant = MUTANTS[name]
    assert CHECKS[mutant.caught_by](mutant, ROWS, 0)


# At reduced scale one for each weaker check: what passes tells of the check, not of the fault.
WEAKER = (
    MUTANTS if FULL_SCALE else list({one.passes: name for name, one in MUTANTS.items()}.values())
)


@pytest.mark.parametrize("name", WEAKER)
def test_a_mutant_passes_a_weaker_check(name):
    mutant = MUTANTS[name]
    assert not CHECKS[mutant.passes](mutant, ROWS, 0)


def test_the_registry_is_wide():
    """Every check finds something that another does not see."""
    assert len(MUTANTS) >= 18
    assert {mutant.caught_by for mutant in MUTANTS.values()} == set(CHECKS)
    assert all(mutant.caught_by != mutant.passes for mutant in MUTANTS.values())

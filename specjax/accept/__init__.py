"""Acceptance rules, one a file. To add one, write its file and name it in `RULES`."""

from specjax.accept.coupled import Coupled as Coupled
from specjax.accept.greedy import Greedy as Greedy
from specjax.accept.matching import Matching as Matching
from specjax.accept.rejection import Rejection as Rejection

RULES = {
    "greedy": Greedy(),
    "rejection": Rejection(),
    "matching": Matching(),
    "coupled": Coupled(),
}


def default_rule(has_law: bool) -> str:
    """The rule for drafts drawn from a law, or for point masses and deterministic trees."""
    return "rejection" if has_law else "matching"

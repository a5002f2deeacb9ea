"""Acceptance rules, one a file. To add one, write its file and name it in `RULES`."""

from specjax.accept.block import Block as Block
from specjax.accept.coupled import Coupled as Coupled
from specjax.accept.greedy import Greedy as Greedy
from specjax.accept.matching import Matching as Matching
from specjax.accept.recursive import Recursive as Recursive
from specjax.accept.rejection import Rejection as Rejection
from specjax.accept.traversal import Traversal as Traversal
from specjax.accept.typical import Typical as Typical
from specjax.types import Rule

RULES = {
    "greedy": Greedy(),
    "rejection": Rejection(),
    "block": Block(),
    "matching": Matching(),
    "recursive": Recursive(),
    "traversal": Traversal(),
    # Greedy draft sampling (Hu et al., arXiv 2502.18779): the most likely children and one drawn
    # from the rest. Trying the drawn one first, as `Traversal` does, is optimal for such a set.
    "greedy_draft": Traversal(draws="top_and_one"),
    "coupled": Coupled(),
    "typical": Typical(),
}


def default_rule(has_law: bool, is_chain: bool = True) -> str:
    """The rule that accepts most of drafts drawn from a law, or of point masses; lossless."""
    if not has_law:
        return "matching"
    return "block" if is_chain else "traversal"


def rule_name(rule: Rule) -> str:
    """The name that a rule is asked for by, or that of its class where it has none."""
    named = (name for name, known in RULES.items() if known == rule)
    return next(named, type(rule).__name__)

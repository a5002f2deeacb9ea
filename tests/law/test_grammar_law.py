"""The law under a grammar, through the whole loop: every rule, and a twin that forgets the path."""

import jax.numpy as jnp
import numpy as np
import pytest
from accept.registry import SAMPLING
from fixtures import FULL_SCALE

from specjax.draft import ModelDrafter
from specjax.history import History
from specjax.testing.joint import joint_law_test
from specjax.testing.loop_sampler import LoopSampler, settings_law
from specjax.testing.tables import DEPTH, TABLES

pytestmark = pytest.mark.slow

TABLE = TABLES["trigram"]
# The others decide by the same log-probabilities: at reduced scale two stand for them.
RULES = tuple(SAMPLING) if FULL_SCALE else ("block", "traversal")
# After a 1, and after two alike, no 0 comes.
AUTOMATON = np.array([[1, 2, 3], [4, 2, 3], [-1, 4, 3], [1, 2, 4], [-1, 2, 3]])
SETTINGS = ({"grammar": AUTOMATON}, {})


def forgetful(self, sampling):
    """The root's state at every node: what was drafted above a node is forgotten."""
    return jnp.broadcast_to(self.seen.grammar_state[:, None], self.path.shape[:2])


def law_test(rule, drafted, rows):
    drafter = ModelDrafter(TABLE.target, drafted, TABLE.vocabulary, 64, 8)
    sampler = LoopSampler(TABLE, DEPTH, rule, drafter, TABLE.draft_params, SETTINGS)
    return joint_law_test(sampler, settings_law(TABLE, DEPTH, SETTINGS), rows=rows)


@pytest.mark.parametrize("rule", RULES)
def test_the_law_is_the_constrained_targets(scale, rule):
    """Rows under the grammar beside rows under none."""
    result = law_test(rule, 3, scale(20_000, 400_000))
    assert result.passed, str(result)


def test_a_state_that_does_not_follow_the_path_is_found(monkeypatch):
    """Drafts of another length are another program."""
    monkeypatch.setattr(History, "grammar_state", forgetful)
    assert not law_test("block", 2, 20_000).passed

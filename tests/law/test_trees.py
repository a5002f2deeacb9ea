"""Trees through the whole loop: every rule, ragged rows, over several rounds.

What a single round cannot show is the reuse of noise: rules that look ahead have judged a draft's
noise before they reject it.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fixtures import FULL_SCALE

from specjax.accept import RULES, default_rule, rule_name
from specjax.draft import NoDraft
from specjax.generation import generate
from specjax.testing.drafters import TreeDrafter
from specjax.testing.joint import sequence_counts
from specjax.testing.loop_sampler import LoopSampler
from specjax.testing.pearson import SCORE_LIMIT, pearson
from specjax.testing.tables import DEPTH, TABLES, VOCABULARY

pytestmark = pytest.mark.slow

TABLE = TABLES["trigram"]
SHAPES = {
    "chain": (-1, 0, 1, 2),
    "siblings": (-1, 0, 0),
    "binary": (-1, 0, 0, 1, 1, 2, 2),
    "uneven": (-1, 0, 0, 1, 1, 3, 5),
}
SAMPLING_RULES = [name for name, rule in RULES.items() if rule.lossless and not rule.greedy_only]
TREE_RULES = [name for name in SAMPLING_RULES if RULES[name].trees]
WALKS = [name for name in SAMPLING_RULES if not hasattr(RULES[name], "stop_law")]


def sampler(rule, drafter, depth=DEPTH, table=TABLE):
    return LoopSampler(table, depth, rule, drafter, table.draft_params)


def score(generation, depth=DEPTH):
    output = np.asarray(generation.tokens)[:, len(TABLE.prompt) :][:, :depth]
    return pearson(sequence_counts(output, VOCABULARY), TABLE.law(depth).ravel())


@pytest.mark.parametrize("name", TREE_RULES)
def test_trees_keep_the_joint_law_over_several_rounds(name, scale):
    """Rows of one call draft none, one or two levels, by how long they are."""
    drafter = TreeDrafter(SHAPES["binary"], ragged=True)
    generation = sampler(RULES[name], drafter).generate(7, scale(20_000, 500_000))
    stats = generation.stats
    assert 0.2 < np.sum(stats.accepted) / np.sum(stats.drafted) < 0.95
    assert np.mean(np.asarray(stats.rounds) >= 2) > 0.5
    result = score(generation)
    assert abs(result.z) < SCORE_LIMIT, result


@pytest.mark.parametrize("shape", SHAPES if FULL_SCALE else ("siblings", "uneven"))
@pytest.mark.parametrize("name", WALKS)
def test_walks_over_trees_emit_plain_decodings_own_tokens(name, shape):
    rows, depth = 256, 12
    ours = sampler(RULES[name], TreeDrafter(SHAPES[shape], ragged=True), depth)
    plain = sampler(RULES["matching"], NoDraft(), depth)
    generation = ours.generate(3, rows)
    assert 0.2 < np.sum(generation.stats.accepted) / np.sum(generation.stats.drafted) < 1
    np.testing.assert_array_equal(ours(3, rows), plain(3, rows))


def test_trees_drawn_from_a_law_have_a_default_rule_and_chains_another():
    """And a rule for chains refuses a tree by name."""

    assert default_rule(True) == "block"
    assert RULES[default_rule(True, is_chain=False)].trees
    with pytest.raises(ValueError, match="'block' verifies chains only"):
        generate(
            TABLE.target,
            TABLE.params,
            jnp.array([TABLE.prompt]),
            jax.random.key(0),
            drafter=TreeDrafter(SHAPES["binary"]),
            rule="block",
        )
    assert [rule_name(rule) for rule in RULES.values()] == list(RULES)


def test_parents_of_a_tree_come_before_their_children():
    with pytest.raises(ValueError, match="begin with -1"):
        TreeDrafter((-1, 2, 0))

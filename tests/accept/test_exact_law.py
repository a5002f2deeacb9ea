"""Every rule in law form emits the target's law: one round, enumerated in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from accept.instances import law_pairs, padded_chains, random_trees
from accept.registry import LAWS, LOSSY, TREE_LAWS
from fixtures import FULL_SCALE

from specjax import tree
from specjax.accept import RULES
from specjax.testing.exact import (
    drawn_drafts,
    exact_law,
    fixed_draft,
    joint_law,
    num_contexts,
    round_law,
)
from specjax.testing.faulty_rules import (
    FaultyRule,
    padding_in_chain,
    softmaxed_residual,
    target_for_residual,
)

pytestmark = pytest.mark.usefixtures("x64")

MISTAKE = 1e-6
ROUNDING = 1e-9
# Each rule with its own way of drawing, and with drafts drawn plainly, which it must bear too.
DRAWN = [(name, draws) for name, rule in LAWS.items() for draws in {"sample": 0, rule.draws: 0}]
TREES_DRAWN = [(name, draws) for name, draws in DRAWN if name in TREE_LAWS]
# Vocabulary, drafted tokens or nodes, and how often: more than 200 instances in all.
CHAINS = [(3, 4, 8), (4, 3, 7), (5, 2, 7)] if FULL_SCALE else [(3, 3, 21)]
TREES = [(3, 7, 11), (4, 5, 11)] if FULL_SCALE else [(3, 6, 21)]


@functools.partial(jax.jit, static_argnums=(0, 4))
def verified_when_drawn(law, log_p, log_q, parents, draws="sample"):
    """Error of the joint law, the drafts' total probability and the mean number accepted."""

    def one(log_p, log_q, parents):
        draft, log_weight = drawn_drafts(log_q, parents, draws)
        result = round_law(law, draft, log_weight, log_p)
        error = jnp.max(jnp.abs(result.joint - joint_law(log_p)))
        return error, jnp.sum(jnp.exp(log_weight)), result.mean_accepted

    return jax.vmap(one)(log_p, log_q, parents)


@functools.partial(jax.jit, static_argnums=0)
def verified_when_fixed(law, log_p, parents, tokens):
    """Error of the joint law of one draft an instance, and the mean number accepted."""

    def one(log_p, parents, tokens):
        result = round_law(law, *fixed_draft(tokens, parents), log_p)
        return jnp.max(jnp.abs(result.joint - joint_law(log_p))), result.mean_accepted

    return jax.vmap(one)(log_p, parents, tokens)


def chains(vocabulary, drafted, repeats):
    log_p, log_q = law_pairs(drafted, num_contexts(vocabulary, drafted + 1), vocabulary, repeats)
    return log_p, log_q, padded_chains(vocabulary, log_p.shape[0], drafted + 1)


def trees(vocabulary, nodes, repeats):
    log_p, log_q = law_pairs(9, num_contexts(vocabulary, nodes), vocabulary, repeats)
    return log_p, log_q, *random_trees(nodes, log_p.shape[0], nodes, vocabulary)


@pytest.mark.parametrize("name, draws", DRAWN)
@pytest.mark.parametrize("vocabulary, drafted, repeats", CHAINS)
def test_chains_drawn_from_a_law_are_verified_without_loss(
    name, draws, vocabulary, drafted, repeats
):
    log_p, log_q, parents = chains(vocabulary, drafted, repeats)
    error, weight, _ = verified_when_drawn(LAWS[name], log_p, log_q, parents, draws)
    np.testing.assert_allclose(weight, 1.0, atol=1e-12)
    assert np.max(error) < ROUNDING


@pytest.mark.parametrize("name", LAWS)
def test_chains_of_point_masses_are_verified_without_loss(name):
    log_p, _, parents = chains(4, 4, repeats=21)
    tokens = jnp.asarray(np.random.default_rng(0).integers(4, size=parents.shape), jnp.int32)
    assert log_p.shape[0] >= 200
    error, _ = verified_when_fixed(LAWS[name], log_p, parents, tokens)
    assert np.max(error) < ROUNDING


@pytest.mark.parametrize("name", TREE_LAWS)
@pytest.mark.parametrize("vocabulary, nodes, repeats", TREES)
def test_trees_of_fixed_children_are_verified_without_loss(name, vocabulary, nodes, repeats):
    """And as many are accepted as `matching` does, which is optimal there."""
    log_p, _, parents, tokens = trees(vocabulary, nodes, repeats)
    assert_trees_are_varied(parents, vocabulary)
    error, accepted = verified_when_fixed(TREE_LAWS[name], log_p, parents, tokens)
    assert np.max(error) < ROUNDING
    _, best = verified_when_fixed(RULES["matching"], log_p, parents, tokens)
    np.testing.assert_allclose(accepted, best, atol=ROUNDING)


@pytest.mark.parametrize("name, draws", TREES_DRAWN)
@pytest.mark.parametrize("vocabulary, nodes, repeats", TREES)
def test_trees_drawn_without_replacement_are_verified_without_loss(
    name, draws, vocabulary, nodes, repeats
):
    log_p, log_q, parents, _ = trees(vocabulary, nodes, repeats)
    error, weight, _ = verified_when_drawn(TREE_LAWS[name], log_p, log_q, parents, draws)
    np.testing.assert_allclose(weight, 1.0, atol=1e-12)
    assert np.max(error) < ROUNDING


def mean_accepted(name, *instances):
    return np.asarray(verified_when_drawn(LAWS[name], *instances)[2])


@pytest.mark.parametrize("vocabulary, drafted, repeats", CHAINS)
def test_block_verification_never_accepts_less_than_rejection(vocabulary, drafted, repeats):
    """And leaf to root on a chain, or sibling by sibling, is the one or the other."""
    instances = chains(vocabulary, drafted, repeats)
    rejection, block = (mean_accepted(name, *instances) for name in ("rejection", "block"))
    assert np.all(block > rejection - ROUNDING)
    assert np.mean(block) > 1.01 * np.mean(rejection)
    np.testing.assert_allclose(mean_accepted("traversal", *instances), block, atol=ROUNDING)
    np.testing.assert_allclose(mean_accepted("recursive", *instances), rejection, atol=ROUNDING)


def test_traversal_accepts_more_than_recursive_on_average():
    log_p, log_q, parents, _ = trees(3, 7, repeats=11)
    traversal, recursive, matching = (
        mean_accepted(name, log_p, log_q, parents)
        for name in ("traversal", "recursive", "matching")
    )
    assert np.mean(traversal) > 1.005 * np.mean(recursive)
    assert np.mean(recursive) > 1.1 * np.mean(matching)


@pytest.mark.parametrize("name", LOSSY)
def test_a_lossy_rule_is_found(name):
    log_p, log_q, parents = chains(4, 3, repeats=7)
    error, *_ = verified_when_drawn(LOSSY[name], log_p, log_q, parents, LOSSY[name].draws)
    assert np.mean(error > 100 * MISTAKE) > 0.3


def assert_trees_are_varied(parents, vocabulary):
    """The instances hold what the test is for: padding, lone roots, and roots with all children."""
    children = (parents[:, :, None] == np.arange(parents.shape[1])).sum(1)
    assert children[:, 0].min() == 0
    assert children.max() == vocabulary
    assert np.any((parents[:, 1:-1] == -1) & (parents[:, 2:] >= 0))
    assert np.max(jax.vmap(tree.depth)(parents)) >= 4


@pytest.mark.parametrize("name", LAWS)
@pytest.mark.parametrize("fault", [target_for_residual, softmaxed_residual])
def test_a_wrong_residual_is_found(name, fault):
    log_p, log_q, parents = chains(4, 3, repeats=6)
    error, *_ = verified_when_drawn(FaultyRule(LAWS[name], follows=fault), log_p, log_q, parents)
    wrong = error > MISTAKE
    # Where p = q, nothing is rejected, and a root without a child leaves nothing to get wrong.
    assert wrong[0] and np.mean(wrong) > 0.3


def test_unmasked_padding_is_found():
    log_p, log_q, parents = chains(4, 3, repeats=6)
    padded = np.any(parents[:, 1:] == -1, axis=1)
    faulty = FaultyRule(RULES["rejection"], stops=padding_in_chain)
    error, *_ = verified_when_drawn(faulty, log_p, log_q, parents)
    assert np.mean(error[padded] > MISTAKE) > 0.5
    assert np.max(error[~padded]) < ROUNDING


def test_more_children_than_their_law_can_draw_exhaust_it():
    log_q = jnp.log(jnp.broadcast_to(jnp.array([1.0, 0.0, 0.0]), (13, 3)))
    draft, log_weight = drawn_drafts(log_q, jnp.array([-1, 0, 0, 0]))
    drawn = np.asarray(draft.tokens)[np.exp(log_weight) > 0, 1:]
    assert sorted(map(tuple, drawn)) == [(0, 1, 2), (0, 2, 1)]


def test_exact_law_tells_a_rule_from_a_faulty_one():
    log_p, log_q, parents = (np.asarray(x)[0] for x in trees(3, 5, repeats=1)[:3])
    right = exact_law(RULES["traversal"], log_p, log_q, parents)
    wrong = exact_law(
        FaultyRule(RULES["traversal"], follows=target_for_residual), log_p, log_q, parents
    )
    assert right.error < ROUNDING < MISTAKE < wrong.error
    assert right.mean_accepted == pytest.approx(wrong.mean_accepted)
    with pytest.raises(ValueError, match="Coupled is no law"):
        exact_law(RULES["coupled"], log_p, log_q, parents)


def test_exact_law_takes_a_registered_name():
    log_p, log_q, parents = (np.asarray(x)[0] for x in chains(3, 2, repeats=1))
    named, given = (exact_law(rule, log_p, log_q, parents) for rule in ("block", RULES["block"]))
    assert named.error == given.error < ROUNDING and named.mean_accepted == given.mean_accepted


LAW = np.log(np.full((num_contexts(3, 3), 3), 1 / 3))
CHAIN, TREE = (-1, 0, 1), (-1, 0, 0)
REFUSED = {
    "probabilities": (
        {"log_p": np.exp(LAW)},
        "log_p at context 0 sums to 4.1.*, not 1: give the logarithms of probabilities",
    ),
    "a draft's probabilities": ({"log_q": np.exp(LAW)}, "log_q at context 0 sums to"),
    "NaN": ({"log_q": LAW + np.nan}, "log_q at context 0 sums to nan"),
    "some contexts": ({"log_p": LAW[:7], "log_q": LAW[:7]}, "laws of 7 contexts: give those of"),
    "too shallow": (
        {"log_p": LAW[:4], "log_q": LAW[:4]},
        "laws of 4 contexts, and a tree of this depth reaches 13",
    ),
    "a tree for a chain's rule": ({"parents": TREE}, "Block takes chains only"),
    "a parent that comes later": (
        {"rule": "traversal", "parents": (-1, 2, 1)},
        r"parents is \[-1, 2, 1\]: give each node a parent that comes before it, or -1",
    ),
    "its own parent": ({"parents": (-1, 0, 2)}, "give each node a parent that comes before it"),
    "no root": ({"parents": (0, 1, 2)}, "give the index of each node's, -1 first"),
    "too many siblings": (
        {"rule": "traversal", "parents": (-1, 0, 0, 0, 0)},
        "a node has 4 children, more than the 3 tokens",
    ),
    "draws": ({"draws": "x"}, "unknown draws 'x'; known: sample, top_k, top_and_one"),
    "no rule": ({"rule": "blok"}, "unknown rule 'blok'; known: greedy, rejection, block"),
    "no law": ({"rule": "coupled"}, "Coupled is no law"),
}


@pytest.mark.fast
@pytest.mark.parametrize("changed, sentence", REFUSED.values(), ids=list(REFUSED))
def test_what_has_no_exact_law_is_refused(changed, sentence):
    whole = {"rule": "block", "log_p": LAW, "log_q": LAW, "parents": CHAIN} | changed
    whole["parents"] = np.array(whole["parents"])
    with pytest.raises(ValueError, match=sentence):
        exact_law(**whole)

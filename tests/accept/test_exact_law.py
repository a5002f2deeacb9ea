"""Every rule in law form emits the target's law: one round, enumerated in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from accept.instances import law_pairs, padded_chains, random_trees

from specjax import tree
from specjax.accept import RULES
from specjax.testing.exact import drawn_drafts, fixed_draft, joint_law, num_contexts, round_law
from specjax.testing.mutants import SoftmaxedResidual, TargetForResidual, UnmaskedPadding

pytestmark = pytest.mark.usefixtures("x64")

LAWS = {name: rule for name, rule in RULES.items() if hasattr(rule, "stop_law")}
TREE_LAWS = {name: rule for name, rule in LAWS.items() if rule.trees}
MISTAKE = 1e-6
ROUNDING = 1e-9


@functools.partial(jax.jit, static_argnums=0)
def errors_when_drawn(law, log_p, log_q, parents):
    """Largest error of the joint law, and the drafts' total probability, an instance each."""

    def one(log_p, log_q, parents):
        draft, log_weight = drawn_drafts(log_q, parents)
        error = jnp.abs(round_law(law, draft, log_weight, log_p).joint - joint_law(log_p))
        return jnp.max(error), jnp.sum(jnp.exp(log_weight))

    return jax.vmap(one)(log_p, log_q, parents)


@functools.partial(jax.jit, static_argnums=0)
def errors_when_fixed(law, log_p, parents, tokens):
    """Largest error of the joint law of one draft, an instance each."""

    def one(log_p, parents, tokens):
        emitted = round_law(law, *fixed_draft(tokens, parents), log_p).joint
        return jnp.max(jnp.abs(emitted - joint_law(log_p)))

    return jax.vmap(one)(log_p, parents, tokens)


def chains(vocabulary, drafted, repeats):
    log_p, log_q = law_pairs(drafted, num_contexts(vocabulary, drafted + 1), vocabulary, repeats)
    return log_p, log_q, padded_chains(vocabulary, log_p.shape[0], drafted + 1)


@pytest.mark.parametrize("name", LAWS)
@pytest.mark.parametrize("vocabulary, drafted", [(3, 4), (4, 3), (5, 2), (4, 1)])
def test_chains_drawn_from_a_law_are_verified_without_loss(name, vocabulary, drafted):
    log_p, log_q, parents = chains(vocabulary, drafted, repeats=6)
    assert log_p.shape[0] >= 50
    error, weight = errors_when_drawn(LAWS[name], log_p, log_q, parents)
    np.testing.assert_allclose(weight, 1.0, atol=1e-12)
    assert np.max(error) < ROUNDING


@pytest.mark.parametrize("name", LAWS)
def test_chains_of_point_masses_are_verified_without_loss(name):
    log_p, _, parents = chains(4, 4, repeats=21)
    tokens = jnp.asarray(np.random.default_rng(0).integers(4, size=parents.shape), jnp.int32)
    assert log_p.shape[0] >= 200
    assert np.max(errors_when_fixed(LAWS[name], log_p, parents, tokens)) < ROUNDING


@pytest.mark.parametrize("name", TREE_LAWS)
@pytest.mark.parametrize("vocabulary, nodes", [(3, 7), (4, 6)])
def test_trees_of_fixed_children_are_verified_without_loss(name, vocabulary, nodes):
    log_p, _ = law_pairs(7, num_contexts(vocabulary, nodes), vocabulary, repeats=11)
    parents, tokens = random_trees(nodes, log_p.shape[0], nodes, vocabulary)
    assert_trees_are_varied(parents, vocabulary)
    assert np.max(errors_when_fixed(TREE_LAWS[name], log_p, parents, tokens)) < ROUNDING


@pytest.mark.parametrize("name", TREE_LAWS)
def test_trees_drawn_without_replacement_are_verified_without_loss(name):
    vocabulary, nodes = 3, 6
    log_p, log_q = law_pairs(9, num_contexts(vocabulary, nodes), vocabulary, repeats=21)
    parents, _ = random_trees(3, log_p.shape[0], nodes, vocabulary)
    error, weight = errors_when_drawn(TREE_LAWS[name], log_p, log_q, parents)
    np.testing.assert_allclose(weight, 1.0, atol=1e-12)
    assert np.max(error) < ROUNDING


def assert_trees_are_varied(parents, vocabulary):
    """The instances hold what the test is for: padding, lone roots, and roots with all children."""
    children = (parents[:, :, None] == np.arange(parents.shape[1])).sum(1)
    assert children[:, 0].min() == 0
    assert children.max() == vocabulary
    assert np.any((parents[:, 1:-1] == -1) & (parents[:, 2:] >= 0))
    assert np.max(jax.vmap(tree.depth)(parents)) >= 4


@pytest.mark.parametrize("name", LAWS)
@pytest.mark.parametrize("fault", [TargetForResidual, SoftmaxedResidual])
def test_a_wrong_residual_is_found(name, fault):
    log_p, log_q, parents = chains(4, 3, repeats=6)
    error, _ = errors_when_drawn(fault(LAWS[name]), log_p, log_q, parents)
    wrong = error > MISTAKE
    # Where p = q, nothing is rejected, and a root without a child leaves nothing to get wrong.
    assert wrong[0] and np.mean(wrong) > 0.3


def test_unmasked_padding_is_found():
    log_p, log_q, parents = chains(4, 3, repeats=6)
    padded = np.any(parents[:, 1:] == -1, axis=1)
    error, _ = errors_when_drawn(UnmaskedPadding(RULES["rejection"]), log_p, log_q, parents)
    assert np.mean(error[padded] > MISTAKE) > 0.5
    assert np.max(error[~padded]) < ROUNDING


def test_more_children_than_their_law_can_draw_exhaust_it():
    log_q = jnp.log(jnp.broadcast_to(jnp.array([1.0, 0.0, 0.0]), (13, 3)))
    draft, log_weight = drawn_drafts(log_q, jnp.array([-1, 0, 0, 0]))
    drawn = np.asarray(draft.tokens)[np.exp(log_weight) > 0, 1:]
    assert sorted(map(tuple, drawn)) == [(0, 1, 2), (0, 2, 1)]

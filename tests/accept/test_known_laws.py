"""Laws worked out by hand, and the wrong ones that these very mistakes have produced elsewhere."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from accept.registry import LAWS, LAWS_OF_DRAWN, SAMPLING, TREES

from specjax import noise
from specjax.accept import RULES
from specjax.noise import Noise
from specjax.testing.exact import drawn_drafts, fixed_draft, round_law
from specjax.testing.faulty_rules import (
    FaultyRule,
    softmaxed_residual,
    target_for_residual,
)
from specjax.testing.pearson import pearson
from specjax.types import Draft

ONE_DRAFT = np.array([-1, 0], np.int32)
TARGET = (0.5, 0.3, 0.2)
PROPOSAL = (0.7, 0.2, 0.1)


def log_law(*probabilities):
    with np.errstate(divide="ignore"):
        return jnp.asarray(np.log(np.array(probabilities)))


@functools.partial(jax.jit, static_argnums=0)
def first_token(rule, draft, log_weight):
    """The law of the first token after a round over one drafted token."""
    log_p = jnp.broadcast_to(log_law(*TARGET), (4, 3))
    return round_law(rule, draft, log_weight, log_p).joint.reshape(3, 3).sum(1)


@functools.partial(jax.jit, static_argnums=0)
def first_token_drawn(rule):
    log_q = jnp.broadcast_to(log_law(*PROPOSAL), (4, 3))
    return first_token(rule, *drawn_drafts(log_q, jnp.asarray(ONE_DRAFT)))


@pytest.mark.parametrize("name", LAWS)
def test_LAW1_a_fixed_proposal_is_a_point_mass(x64, name):
    draft, certain = fixed_draft(jnp.array([0, 0]), jnp.asarray(ONE_DRAFT))
    np.testing.assert_allclose(first_token(LAWS[name], draft, certain), TARGET, atol=1e-12)


@pytest.mark.parametrize("name", LAWS_OF_DRAWN)
def test_LAW1_an_argmax_reported_as_drawn_from_its_softmax_is_biased(x64, name):
    draft, certain = fixed_draft(jnp.array([0, 0]), jnp.asarray(ONE_DRAFT))
    reported = jnp.broadcast_to(log_law(*PROPOSAL), (1, 2, 3))
    lying = Draft(draft.tokens, draft.parents, reported)
    law = first_token(LAWS[name], lying, certain)
    np.testing.assert_allclose(law, [0.714, 0.143, 0.143], atol=5e-4)


@pytest.mark.parametrize("name", LAWS_OF_DRAWN)
def test_LAW3_the_residual_is_divided_by_its_sum(x64, name):
    rule = LAWS[name]
    np.testing.assert_allclose(first_token_drawn(rule), TARGET, atol=1e-12)
    softmaxed = first_token_drawn(FaultyRule(rule, follows=softmaxed_residual))
    assert np.max(np.abs(softmaxed - np.array(TARGET))) > 0.04
    if name == "rejection":
        np.testing.assert_allclose(softmaxed, [0.562, 0.269, 0.169], atol=5e-4)
    resampled = first_token_drawn(FaultyRule(rule, follows=target_for_residual))
    np.testing.assert_allclose(resampled, [0.6, 0.26, 0.14], atol=5e-4)


@pytest.mark.parametrize("name", LAWS)
def test_LAW11_two_tokens_keep_their_joint_law(x64, name):
    log_p = log_law([0.6, 0.4], [0.3, 0.7], [0.8, 0.2], *[[0.5, 0.5]] * 4)
    log_q = log_law([0.3, 0.7], [0.6, 0.4], [0.5, 0.5])
    drafts = drawn_drafts(log_q, jnp.array([-1, 0, 1]))
    law = jax.jit(functools.partial(round_law, LAWS[name]))(*drafts, log_p)
    two_tokens = law.joint.reshape(2, 2, 2).sum(2)
    np.testing.assert_allclose(two_tokens, [[0.18, 0.42], [0.32, 0.08]], atol=1e-12)
    # Published for the rules that read the proposal's law.
    accepted = {"rejection": 1.19, "recursive": 1.19, "block": 1.31, "traversal": 1.31}
    if name in accepted:
        np.testing.assert_allclose(law.mean_accepted, accepted[name], atol=1e-12)


def one_draft(token, *proposal):
    """``token`` drafted below the root, said to be drawn from ``proposal``."""
    return Draft(jnp.array([0, token]), jnp.asarray(ONE_DRAFT), jnp.stack([log_law(*proposal)] * 2))


def decide_many(rule, draft, log_p, draws, seed=0):
    """What ``rule`` decides for one draft [N] under ``draws`` independent noises."""
    return _decide(rule, draft, log_p, noise.row_keys(jax.random.key(seed), draws))


@functools.partial(jax.jit, static_argnums=0)
def _decide(rule, draft, log_p, keys):
    return jax.vmap(lambda key: rule(draft, log_p, Noise(key, jnp.int32(3))))(keys)


@pytest.mark.parametrize("name", LAWS_OF_DRAWN)
def test_LAW9a_disjoint_laws_never_accept(name):
    draft = one_draft(1, 0.5, 0.5, 0.0)
    result = decide_many(SAMPLING[name], draft, jnp.stack([log_law(0.0, 0.0, 1.0)] * 2), 1000)
    assert np.all(np.asarray(result.num_accepted) == 0)
    assert np.all(np.asarray(result.next_token) == 2)


@pytest.mark.parametrize("name", LAWS_OF_DRAWN)
def test_LAW9b_equal_laws_always_accept(name):
    law = jax.nn.log_softmax(
        jnp.asarray(np.random.default_rng(0).normal(size=(4, 50)), jnp.float32)
    )
    draft = Draft(jnp.array([0, 7, 31, 2]), jnp.arange(4) - 1, law.at[3].set(-jnp.inf))
    result = decide_many(SAMPLING[name], draft, law, 100_000)
    assert np.all(np.asarray(result.num_accepted) == 3)
    seen = np.bincount(result.next_token, minlength=50)
    assert abs(pearson(seen, np.exp(np.asarray(law[3], np.float64))).z) < 5


@pytest.mark.parametrize("name", LAWS_OF_DRAWN)
def test_LAW9c_a_token_that_the_draft_could_not_draw_stays_finite(name):
    """Rounding can report it; nothing may turn into NaN, and the token is possible after all."""
    draft = one_draft(2, 0.5, 0.5, 0.0)
    log_p = jnp.stack([log_law(*TARGET)] * 2)
    log_stop, aux = SAMPLING[name].stop_law(draft, log_p)
    assert np.exp(np.asarray(log_stop, np.float64)).sum() == pytest.approx(1)
    assert not np.any(np.isnan(SAMPLING[name].residual(draft, log_p, aux, jnp.int32(0))))
    result = decide_many(SAMPLING[name], draft, log_p, 20_000)
    stood = np.asarray(result.num_accepted) == 1
    assert np.mean(stood) > 0.1
    followed = np.bincount(np.asarray(result.next_token)[stood], minlength=3)
    assert abs(pearson(followed, np.asarray(TARGET)).z) < 5


@pytest.mark.parametrize("name", SAMPLING)
def test_LAW9d_a_drafted_token_that_the_target_excludes_is_never_emitted(name):
    log_p = jnp.stack([log_law(0.6, 0.4, 0.0)] * 2)
    draft = one_draft(2, 0.1, 0.1, 0.8)
    result = decide_many(SAMPLING[name], draft, log_p, 20_000)
    assert np.all(np.asarray(result.num_accepted) == 0)
    assert np.all(np.asarray(result.next_token) < 2)


@pytest.mark.parametrize("name", TREES)
def test_R3_the_bonus_follows_the_branch_that_was_accepted(name):
    """Two branches of equal depth, with opposite laws after them."""
    log_p = log_law([0.5, 0.5], [0.9, 0.1], [0.1, 0.9])
    draft = Draft(jnp.array([0, 0, 1]), jnp.array([-1, 0, 0]))
    result = decide_many(TREES[name], draft, log_p, 20_000)
    assert np.all(np.asarray(result.num_accepted) == 1)
    branch = np.asarray(result.path)[:, 1]
    counts = [np.bincount(result.next_token[branch == node], minlength=2) for node in (1, 2)]
    assert abs(pearson(np.stack(counts), np.array([[0.9, 0.1], [0.1, 0.9]])).z) < 5
    assert abs(pearson(np.bincount(branch - 1), np.array([0.5, 0.5])).z) < 5


@pytest.mark.parametrize("name", RULES)
def test_G3_exactly_tied_logits_go_to_the_lowest_id(name):
    """The target's two best tokens tie at every node; only the first may stand."""
    tied = jnp.zeros((3, 12)).at[:, jnp.array([3, 9])].set(5.0)
    one_hot = jnp.where(jnp.arange(12) == 3, 0.0, -jnp.inf) + 0 * tied
    for drafted, accepted in ((3, 2), (9, 0)):
        draft = Draft(jnp.array([0, drafted, drafted]), jnp.arange(3) - 1)
        law = tied if RULES[name].greedy_only else one_hot
        result = decide_many(RULES[name], draft, law, 2)
        assert result.num_accepted.tolist() == [accepted] * 2
        assert result.next_token.tolist() == [3] * 2

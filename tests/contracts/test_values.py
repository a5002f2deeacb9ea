"""What a drafter or a rule says of itself, before anything runs."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fixtures import (
    METHODS,
    ROWS,
    Prompts,
    Session,
    build,
    method,
    row_keys,
    sampling_for,
    table_host,
    tiny_host,
)

from specjax.accept import RULES, Rejection, default_rule
from specjax.choose import chooser
from specjax.draft import DRAFTERS, NoDraft
from specjax.programs import check_compatible
from specjax.tree import depth, reachable
from specjax.types import Context

pytestmark = pytest.mark.fast


def _rebuilt(name):
    host = table_host() if method(name).target is table_host().target else tiny_host()
    return build(name, host).drafter


@pytest.mark.parametrize("name", METHODS)
def test_a_drafter_built_again_is_the_same_value(name):
    drafter, again = method(name).drafter, _rebuilt(name)
    assert drafter is not again
    assert drafter == again
    assert hash(drafter) == hash(again)


@pytest.mark.parametrize("name", METHODS)
def test_a_drafter_is_frozen(name):
    drafter = method(name).drafter
    field = dataclasses.fields(drafter)[0].name
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(drafter, field, None)


@pytest.mark.parametrize("name", RULES)
def test_a_rule_built_again_is_the_same_value(name):
    rule = RULES[name]
    again = type(rule)(**dataclasses.asdict(rule))
    assert rule == again
    assert hash(rule) == hash(again)
    assert rule.draws in ("sample", "top_k", "top_and_one", "coupled")


@pytest.mark.parametrize("has_law", [False, True])
def test_the_default_rule_is_lossless_and_samples(has_law):
    rule = RULES[default_rule(has_law)]
    assert rule.lossless
    assert not rule.greedy_only


@pytest.mark.parametrize("name", METHODS)
def test_static_attributes_agree_with_one_another(name):
    drafter = method(name).drafter
    assert drafter.widths == tuple(sorted(set(drafter.widths)))
    assert drafter.widths[0] >= 1
    assert drafter.widths[-1] == drafter.num_nodes
    assert 0 <= drafter.max_depth < drafter.num_nodes
    if drafter.is_chain:
        assert drafter.max_depth == drafter.num_nodes - 1
    assert set(drafter.needs) <= {"features", "logits"}
    assert bool(drafter.taps) or "features" not in drafter.needs
    assert drafter.forwards >= 0


@pytest.mark.parametrize("option", ["num_speculative_tokens"])
@pytest.mark.parametrize("name", [name for name in METHODS if name != "none"])
def test_a_window_below_one_is_refused_by_name(name, option):
    host = table_host() if method(name).target is table_host().target else tiny_host()
    with pytest.raises(ValueError, match=option):
        build(name, host, **{option: 0})


def test_a_way_to_draw_that_nobody_knows_is_refused_by_name():
    with pytest.raises(ValueError, match="rule 'Rejection' draws by 'beam'; known: sample, coup"):
        check_compatible(NoDraft(), Rejection(draws="beam"))


def test_a_target_without_layers_is_refused_by_name():
    with pytest.raises(ValueError, match="first_layers"):
        DRAFTERS["early_exit"](table_host(), exit_layer=1)


@pytest.mark.parametrize("name", METHODS)
def test_a_draft_is_a_tree_below_the_root(name):
    """Shapes, order, padding, distinct siblings and ids, as `Draft` promises them."""
    subject = method(name)
    drafter = subject.drafter
    prompts = Prompts.random([5, 9, 2, 7], subject.vocabulary)
    # Repeats, so that drafters that copy find something.
    prompts.tokens[0, :5] = [3, 4, 3, 4, 3]
    session = Session.begin(subject, subject.default_rule, prompts, row_keys(0, ROWS))
    context = session.state.context
    rule = RULES[subject.default_rule]

    @jax.jit
    def drafted(params, draft_state, tokens, length):
        sampling = sampling_for(subject.default_rule, ROWS)
        choose = chooser(rule.draws, sampling, row_keys(0, ROWS), length - 1)
        return drafter.draft(params, draft_state, Context(tokens, length), choose)[0]

    draft = drafted(
        subject.drafter_params, session.state.draft_state, context.tokens, context.length
    )
    tokens, parents = np.asarray(draft.tokens), np.asarray(draft.parents)
    assert tokens.shape == parents.shape == (ROWS, drafter.num_nodes)
    assert tokens.min() >= 0
    assert tokens.max() < subject.vocabulary
    last = np.asarray(context.tokens)[np.arange(ROWS), np.asarray(context.length) - 1]
    np.testing.assert_array_equal(tokens[:, 0], last)
    assert (parents[:, 0] == -1).all()
    assert (parents < np.arange(drafter.num_nodes)).all()
    if drafter.is_chain:
        assert ((parents == np.arange(drafter.num_nodes) - 1) | (parents == -1)).all()
    real = np.asarray(reachable(jnp.asarray(parents)))
    assert np.asarray(depth(jnp.asarray(parents)))[real].max() <= drafter.max_depth
    for row in range(ROWS):
        edges = [(parents[row, n], tokens[row, n]) for n in np.flatnonzero(real[row]) if n]
        assert len(edges) == len(set(edges))
    assert (draft.log_q is not None) == (drafter.has_law and rule.draws == "sample")
    if draft.log_q is not None:
        law = np.exp(np.asarray(draft.log_q, np.float64))
        has_child = np.zeros_like(real)
        for row in range(ROWS):
            has_child[row, parents[row, 1:][real[row, 1:]]] = True
        np.testing.assert_allclose(law.sum(-1)[has_child], 1, atol=1e-5)

"""What holds after every round, whoever drafts and whichever rule decides."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fixtures import (
    BUFFER,
    EVERY_RULE,
    PAIRS,
    ROWS,
    Prompts,
    Session,
    assert_same,
    counting,
    method,
    outputs,
    row_keys,
    rules_tried,
    scripted,
)

from specjax.accept import RULES
from specjax.sampling import Sampling
from specjax.types import LENGTH as OUT_OF_ROOM
from specjax.types import STOPPED

PROMPT_LENGTHS = (5, 9, 1, 7)
BUDGETS = (40, 3, 20, 64)


def _begin(name, rule, **options) -> Session:
    subject = method(name)
    prompts = Prompts.random(PROMPT_LENGTHS, subject.vocabulary, seed=2)
    return Session.begin(
        subject, rule, prompts, row_keys(3, ROWS), budget=np.array(BUDGETS), **options
    )


def _caches(tree):
    """Every cache inside a state, however the drafter names it."""
    nodes = jax.tree.leaves(tree, is_leaf=lambda node: hasattr(node, "commit"))
    return [node for node in nodes if hasattr(node, "commit")]


def _held(cache, row, end):
    """What a cache holds of a row's first ``end`` tokens; slots beyond may hold anything."""
    if hasattr(cache, "tokens"):
        return cache.tokens[row, :end]
    return cache.k[:, row, :, :end], cache.v[:, row, :, :end]


@pytest.mark.parametrize(("name", "rule"), EVERY_RULE)
def test_invariants_after_every_round(name, rule):
    session = _begin(name, rule, eos_ids=(0, 11))
    before = session.snapshot()
    _check_lengths(before)
    for _ in range(BUFFER):
        if not session.running:
            break
        session = session.advance()
        after = session.snapshot()
        _check_lengths(after)
        _check_growth(before, after)
        _check_done_rows(before, after)
        before = after
    assert not session.running
    assert set(np.asarray(after.finish)) <= {STOPPED, OUT_OF_ROOM}


def _check_lengths(state):
    np.testing.assert_array_equal(state.cache.length, state.context.length - 1)
    for cache in _caches(state.draft_state):
        np.testing.assert_array_equal(cache.length, np.maximum(state.context.length - 2, 0))


def _check_growth(before, after):
    active = before.finish == 0
    grown = after.context.length - before.context.length
    assert (grown >= active).all(), "a running row emits at least one token a round"
    old, new = before.stats, after.stats
    np.testing.assert_array_equal(new.rounds - old.rounds, active)
    np.testing.assert_array_equal(new.emitted - old.emitted, grown)
    drafted, accepted = new.drafted - old.drafted, new.accepted - old.accepted
    assert (accepted <= drafted).all(), "padding was accepted"
    assert (accepted[:, 1:] <= accepted[:, :-1]).all()
    cut = new.truncated - old.truncated
    assert (cut[after.finish == 0] == 0).all()
    np.testing.assert_array_equal(grown[cut == 0], (accepted.sum(1) + active)[cut == 0])
    for row, length in enumerate(before.context.length):
        np.testing.assert_array_equal(
            after.context.tokens[row, :length], before.context.tokens[row, :length]
        )
        for was, now in zip(_caches(before), _caches(after), strict=True):
            end = was.length[row]
            assert_same(_held(was, row, end), _held(now, row, end))


def _check_done_rows(before, after):
    for row in np.flatnonzero(before.finish):
        assert_same(
            jax.tree.map(lambda x, row=row: x[row], (before.context, before.finish, before.stats)),
            jax.tree.map(lambda x, row=row: x[row], (after.context, after.finish, after.stats)),
        )


@pytest.mark.parametrize(("name", "rule"), PAIRS)
def test_results_do_not_depend_on_the_chunk_of_rounds(name, rule):
    whole = _begin(name, rule).advance(10_000).snapshot()
    for rounds in (1, 3, 16):
        session = _begin(name, rule)
        while session.running:
            session = session.advance(rounds)
        assert_same(session.snapshot(), whole)


@pytest.mark.parametrize(("name", "rule"), PAIRS)
def test_the_state_is_a_tree_of_arrays(name, rule):
    """Taken to the host and back in the middle, it goes on as if nothing had happened."""
    session = _begin(name, rule).advance(2)
    snapshot = session.snapshot()
    assert all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(snapshot))
    moved = Session(
        session.method, session.programs, session.request, jax.tree.map(jnp.array, snapshot)
    )
    assert_same(moved.advance(10_000).snapshot(), session.advance(10_000).snapshot())


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("rule", rules_tried())
def test_padding_is_never_accepted(rule, temperature):
    """The columns beyond the drafted ones carry the very tokens that the target wants."""
    if RULES[rule].greedy_only:
        temperature = 0.0
    prompts = Prompts.of(*[[3, 4, 5]] * ROWS)
    session = Session.begin(
        scripted(counting(), prompts, right=4, drafted=2),
        rule,
        prompts,
        row_keys(0, ROWS),
        sampling=Sampling.create(ROWS, temperature=temperature),
        budget=20,
    )
    state = session.advance(3).snapshot()
    np.testing.assert_array_equal(state.stats.accepted, [[3, 3, 0, 0]] * ROWS)
    np.testing.assert_array_equal(state.context.length, [3 + 1 + 9] * ROWS)
    assert outputs(state) == [list(range(3, 16))] * ROWS

"""Case A5: a drafter that equals the target is accepted every time."""

from dataclasses import replace

import jax
import numpy as np
import pytest
from fixtures import (
    DRAFT_LENGTHS,
    ROWS,
    Prompts,
    Session,
    on_tiny,
    row_keys,
    tiny_params,
)

from specjax.sampling import Sampling

EACH_WAY = Sampling.create(ROWS, temperature=[0.0, 1.0, 0.0, 1.0])


def _twin(draft_length, *, params=None):
    subject = on_tiny("draft_model", num_speculative_tokens=draft_length)
    drafter = replace(subject.drafter, model=subject.target)
    return replace(
        subject, drafter=drafter, drafter_params=subject.params if params is None else params
    )


def _rounds(subject, rule):
    prompts = Prompts.random((5, 9, 1, 7), subject.vocabulary, seed=2)
    session = Session.begin(subject, rule, prompts, row_keys(3, ROWS), sampling=EACH_WAY)
    while session.running:
        session = session.advance()
        yield session.snapshot()


CASES = [(length, "rejection") for length in DRAFT_LENGTHS] + [(4, "coupled")]


@pytest.mark.parametrize(("draft_length", "rule"), CASES)
def test_A5_the_targets_own_weights_are_always_accepted(draft_length, rule):
    for state in _rounds(_twin(draft_length), rule):
        _assert_lengths(state)
        running = state.finish == 0
        np.testing.assert_array_equal(state.stats.accepted[running], state.stats.drafted[running])
    emitted = state.stats.emitted + state.stats.truncated
    np.testing.assert_array_equal(emitted, state.stats.rounds * (draft_length + 1))


def test_A5_partial_accepts_leave_the_caches_alike():
    """A drafter with other weights: every count of accepted drafts occurs."""
    seen = set()
    before = None
    for state in _rounds(_twin(4, params=_blurred(tiny_params())), "rejection"):
        _assert_lengths(state)
        if before is not None:
            seen |= set((state.stats.accepted - before.stats.accepted).sum(axis=1).tolist())
        before = state
    assert seen >= {0, 1, 2}


def _blurred(params):
    rng = np.random.default_rng(3)
    return jax.tree.map(
        lambda leaf: leaf + leaf.std() * rng.normal(size=leaf.shape).astype(leaf.dtype) * 0.2,
        params,
    )


def _assert_lengths(state):
    np.testing.assert_array_equal(state.cache.length, state.context.length - 1)
    np.testing.assert_array_equal(state.draft_state.cache.length, state.context.length - 2)

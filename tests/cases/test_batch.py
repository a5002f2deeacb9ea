"""Cases B1, B3, B5: rows that accept different counts stay in step with themselves."""

import typing
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
import pytest
from fixtures import (
    METHODS,
    ROWS,
    TINY,
    Prompts,
    Session,
    decode,
    method,
    on_tiny,
    oracle_decode,
    outputs,
    row_keys,
    scripted,
    trimmed,
)
from flax import struct
from scipy.special import log_softmax

from specjax.draft import ModelDrafter
from specjax.sampling import Sampling

LENGTHS = (5, 9, 2, 7)
PATTERN = [0, 1, 3, 4]


def test_B1_rows_in_rotation_equal_their_solo_runs():
    """Rows accept 0, 1, 3 and 4 in turn, each at another time; one ends at its third token."""
    subject = on_tiny("none")
    prompts = Prompts.random(LENGTHS, subject.vocabulary, seed=6)
    right = [np.roll(PATTERN, row).tolist() for row in range(ROWS)]
    script = scripted(subject, prompts, right=right)
    budget, keys = np.array([40, 3, 40, 40]), row_keys(0, ROWS)

    session = Session.begin(script, "greedy", prompts, keys, budget=budget)
    before = session.snapshot()
    for turn in range(4):
        session = session.advance()
        after = session.snapshot()
        np.testing.assert_array_equal(after.cache.length, after.context.length - 1)
        grown = after.cache.length - before.cache.length
        running = before.finish == 0
        full = np.array([PATTERN[(turn - row) % 4] + 1 for row in range(ROWS)])
        expected = np.minimum(full, prompts.length + budget - before.context.length)
        np.testing.assert_array_equal(grown, np.where(running, expected, 0))
        for row in np.flatnonzero(~running):
            _assert_frozen(before, after, row)
        before = after
    assert before.finish[1] != 0
    state = session.advance(100).snapshot()

    plain = oracle_decode(subject.logits, prompts, 40)
    assert outputs(state) == trimmed(plain, prompts.length + budget)
    for row in range(ROWS):
        only = np.array([row])
        alone = replace(script, drafter_params=script.drafter_params.take(only))
        solo = decode(alone, "greedy", prompts.take(only), keys[only], budget=budget[only])
        assert outputs(solo)[0] == outputs(state)[row]
        for one, many in zip(
            jax.tree.leaves(solo.stats), jax.tree.leaves(state.stats), strict=True
        ):
            np.testing.assert_array_equal(one[0], many[row])


def _assert_frozen(before, after, row):
    """Ids, counts, round number and the committed keys and values of a row that is done."""
    end = before.cache.length[row]
    assert after.cache.length[row] == end
    np.testing.assert_array_equal(after.context.tokens[row], before.context.tokens[row])
    assert after.draft_state[row] == before.draft_state[row]
    for part in ("k", "v"):
        now, was = getattr(after.cache, part), getattr(before.cache, part)
        np.testing.assert_array_equal(now[:, row, :, :end], was[:, row, :, :end])


@typing.no_type_check
@struct.dataclass
class Record:
    """A model drafter's state, and what it drew in the last round from which law."""

    inner: Any
    tokens: Any
    log_q: Any


@dataclass(frozen=True)
class Tampered(ModelDrafter):
    """A model drafter whose draft is corrupted at one node after it was drawn; -1: nowhere."""

    node: int = -1

    def init(self, params, prompt, features, slots):
        rows, size = prompt.tokens.shape[0], self.num_nodes
        tokens = np.zeros((rows, size), np.int32)
        log_q = np.zeros((rows, size, self.vocab_size), np.float32)
        return Record(ModelDrafter.init(self, params, prompt, features, slots), tokens, log_q)

    def draft(self, params, state, context, choose):
        draft, inner = ModelDrafter.draft(self, params, state.inner, context, choose)
        record = Record(inner, draft.tokens, draft.log_q)
        if self.node > 0:
            changed = (draft.tokens[:, self.node] + 1) % self.vocab_size
            draft = replace(draft, tokens=draft.tokens.at[:, self.node].set(changed))
        return draft, record

    def update(self, params, state, feedback):
        return replace(state, inner=ModelDrafter.update(self, params, state.inner, feedback))


@pytest.mark.parametrize("node", [2, -1])
def test_B3_rejected_drafts_leave_nothing_behind_in_the_draft_models_cache(node):
    """Drafter = target. Its logits equal a recompute without a cache at every draft step.

    At temperature 0, where a corrupted token is refused for certain.
    """
    subject = on_tiny("draft_model", num_speculative_tokens=8)
    drafter = Tampered(TINY, 8, subject.vocabulary, 10_000, prefill_chunk=8, node=node)
    subject = replace(subject, drafter=drafter, drafter_params=subject.params)
    prompts = Prompts.random((5, 9, 2), subject.vocabulary, seed=8)
    sampling = Sampling.create(3, temperature=0.0)
    session = Session.begin(
        subject, "rejection", prompts, row_keys(1, 3), sampling=sampling, budget=30
    )
    for _ in range(3 if node < 0 else 8):
        context = jax.tree.map(np.array, session.state.context)
        stats = jax.tree.map(np.array, session.state.stats)
        session = session.advance()
        _assert_laws_recomputed(subject, context, session.state.draft_state)
        accepted = np.asarray(session.state.stats.accepted) - stats.accepted
        if node > 0:
            assert (accepted[:, 0] == 1).all()
        else:
            np.testing.assert_array_equal(session.state.stats.accepted, session.state.stats.drafted)


def _assert_laws_recomputed(subject, context, record):
    drawn, laws = np.asarray(record.tokens), np.asarray(record.log_q)
    depth = drawn.shape[1] - 1
    for row, length in enumerate(context.length):
        path = np.concatenate([context.tokens[row, :length], drawn[row, 1:]])[None]
        logits = subject.logits(path)[0, length - 1 : length - 1 + depth]
        drafted = log_softmax(laws[row, :depth].astype(np.float64), axis=-1)
        np.testing.assert_allclose(drafted, log_softmax(logits, axis=-1), atol=1e-5)


@pytest.mark.parametrize("name", METHODS)
def test_B5_acceptance_of_a_row_is_that_of_the_row_alone(name):
    subject = method(name)
    prompts, keys = Prompts.random(LENGTHS, subject.vocabulary, seed=9), row_keys(2, ROWS)
    rule = subject.default_rule
    together = decode(subject, rule, prompts, keys)
    for row in range(ROWS):
        only = np.array([row])
        alone = decode(subject, rule, prompts.take(only), keys[only])
        np.testing.assert_array_equal(alone.stats.drafted[0], together.stats.drafted[row])
        np.testing.assert_array_equal(alone.stats.accepted[0], together.stats.accepted[row])

"""Cases L1, L3: a draft reaches the end of the room, the target's or the draft model's."""

from dataclasses import replace

import jax
import numpy as np
import pytest
from fixtures import (
    BUFFER,
    METHODS,
    ROWS,
    Prompts,
    Session,
    decode,
    on_table,
    on_tiny,
    oracle_decode,
    outputs,
    row_keys,
    trimmed,
)

from specjax.sampling import Sampling
from specjax.types import LENGTH as OUT_OF_ROOM

CAPACITY = 32
PROMPT_LENGTHS = (26, 27, 28, 29, 30, 31)


@pytest.mark.parametrize("name", METHODS)
def test_L1_the_buffer_fills_to_the_last_slot_and_the_prompt_stays(name):
    subject = on_tiny(name, num_speculative_tokens=5)
    prompts = Prompts.random(PROMPT_LENGTHS, subject.vocabulary, seed=1, buffer=CAPACITY)
    session = Session.begin(
        subject, "greedy", prompts, row_keys(0, len(PROMPT_LENGTHS)), budget=100
    )
    before = session.snapshot()
    after = session.advance(100).snapshot()
    expected = oracle_decode(subject.logits, prompts, CAPACITY)
    assert outputs(after) == expected.tolist()
    assert (after.finish == OUT_OF_ROOM).all()
    for row, length in enumerate(PROMPT_LENGTHS):
        for part in ("k", "v"):
            prompt = (slice(None), row, slice(None), slice(length))
            was, now = getattr(before.cache, part)[prompt], getattr(after.cache, part)[prompt]
            np.testing.assert_array_equal(now, was)
            assert np.abs(was).max() > 0


def test_L1_a_prompt_that_fills_the_buffer_is_refused():
    subject = on_tiny("none")
    prompts = Prompts.random((CAPACITY,), subject.vocabulary, buffer=CAPACITY)
    with pytest.raises(ValueError, match="32 tokens leaves no room in a buffer of 32"):
        decode(subject, "greedy", prompts, row_keys(0, 1))


@pytest.mark.parametrize("draft_context", [16, 32])
def test_L3_drafting_stops_where_the_draft_models_context_ends(draft_context):
    subject = on_table("draft_model")
    subject = replace(subject, drafter=replace(subject.drafter, max_context=draft_context))
    prompts = Prompts.random((10, 20, 14, 15), subject.vocabulary, seed=3)
    keys = row_keys(4, ROWS)
    session = Session.begin(subject, "coupled", prompts, keys, budget=40)
    while session.running:
        length = np.asarray(session.state.context.length)
        drafted = np.asarray(session.state.stats.drafted)
        session = session.advance()
        drew = np.asarray(session.state.stats.drafted) - drafted
        depth = np.arange(1, drew.shape[1] + 1)
        active = length < np.minimum(prompts.length + 40, BUFFER)
        fits = (length[:, None] + depth <= draft_context) & active[:, None]
        np.testing.assert_array_equal(drew, fits)
    expected = oracle_decode(subject.logits, prompts, 40, Sampling.create(ROWS), keys)
    state = session.snapshot()
    assert outputs(state) == trimmed(expected, prompts.length + 40)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state.draft_state))

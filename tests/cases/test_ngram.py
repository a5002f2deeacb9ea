"""Cases N1, N3, N5: what prompt lookup finds, and rounds that find nothing."""

import jax.numpy as jnp
import numpy as np
import pytest
from fixtures import (
    ROWS,
    Prompts,
    Session,
    on_tiny,
    oracle_decode,
    outputs,
    row_keys,
    scripted,
    trimmed,
)

from specjax.draft import NGram
from specjax.types import Context


def _found(context, *, least, most, draft_length=3, beyond=0, buffer=16):
    """The tokens drafted below a context; ``beyond`` fills the buffer behind it."""
    drafter = NGram(draft_length, least, most)
    tokens = np.resize(np.asarray(beyond, np.int32), buffer)
    tokens[: len(context)] = context
    length = jnp.array([len(context)], jnp.int32)
    choose = None
    draft, _ = drafter.draft(None, (), Context(jnp.asarray(tokens[None]), length), choose)
    real = np.asarray(draft.parents[0]) >= 0
    return np.asarray(draft.tokens[0])[real].tolist()


@pytest.mark.fast
@pytest.mark.parametrize(
    ("context", "expected"),
    [([1, 2, 3], []), ([7, 7, 7], [7]), ([1, 2, 1, 2], [1, 2])],
)
def test_N1_a_suffix_never_matches_itself(context, expected):
    assert _found(context, least=2, most=2) == expected


@pytest.mark.fast
@pytest.mark.parametrize("most", [2, 3])
@pytest.mark.parametrize(
    ("context", "expected"), [([4], []), ([5, 5], [5]), ([5, 6], []), ([1, 2, 9, 1], [2, 9, 1])]
)
def test_N3_short_contexts(context, expected, most):
    assert _found(context, least=1, most=most) == expected


@pytest.mark.fast
def test_N3_an_empty_context_finds_nothing():
    assert _found([], least=1, most=3, beyond=[5]) == []


@pytest.mark.fast
@pytest.mark.parametrize("context", [[4], [5, 6], [1, 2, 3], [8, 1, 2, 8, 1, 2]])
def test_N3_what_lies_beyond_the_context_never_matters(context):
    clean = _found(context, least=1, most=3)
    for beyond in (context, [context[-1]], context[::-1], [*context, 7]):
        assert _found(context, least=1, most=3, beyond=beyond) == clean


@pytest.mark.fast
@pytest.mark.parametrize("least", [1, 2])
def test_N3_equals_a_search_by_hand(least):
    """The longest n, then the most recent match that leaves K tokens, else the longest copy."""
    rng = np.random.default_rng(4)
    for _ in range(60):
        context = rng.integers(0, 3, rng.integers(1, 15)).tolist()
        assert _found(context, least=least, most=3) == _by_hand(context, least, 3, 3), context


def _by_hand(context, least, most, draft_length):
    for size in range(min(most, len(context) - 1), least - 1, -1):
        suffix = context[-size:]
        ends = [
            start + size
            for start in range(len(context) - size)
            if context[start : start + size] == suffix
        ]
        if ends:
            roomy = [end for end in ends if len(context) - end >= draft_length]
            end = max(roomy) if roomy else min(ends)
            return context[end : end + draft_length]
    return []


def test_N5_rounds_without_a_draft_between_rounds_with_one():
    """Full, empty, partial, empty, empty, full; rows out of step, so that one drafts alone."""
    subject = on_tiny("none")
    prompts = Prompts.random((5, 9, 2, 7), subject.vocabulary, seed=5)
    drafted = np.array([4, 0, 4, 0, 0, 4])
    right = np.array([4, 0, 2, 0, 0, 4])
    turned = [(np.roll(drafted, row), np.roll(right, row)) for row in (0, 1, 1, 4)]
    script = scripted(
        subject,
        prompts,
        drafted=[turn[0].tolist() for turn in turned],
        right=[turn[1].tolist() for turn in turned],
    )
    session = Session.begin(script, "greedy", prompts, row_keys(0, ROWS), budget=40)
    plain = oracle_decode(subject.logits, prompts, 40)
    turn = 0
    while session.running:
        length = np.asarray(session.state.context.length)
        session = session.advance()
        state = session.snapshot()
        assert outputs(state) == trimmed(plain, state.context.length)
        grown = state.context.length - length
        empty = np.array([turns[0][turn % 6] == 0 for turns in turned])
        assert (grown[empty] <= 1).all()
        assert (grown[empty & (length < prompts.length + 40)] == 1).all()
        turn += 1
    assert turn > 6

"""Cases W1, W3, W5: rejected tokens and windows that wrap."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
from fixtures import (
    BUFFER,
    CHUNK,
    ROWS,
    TINY,
    TINY_CONFIG,
    Prompts,
    Session,
    decoder_oracle,
    on_tiny,
    oracle_decode,
    outputs,
    row_keys,
    scripted,
    tiny_params,
    trimmed,
)

from specjax.cache import KVCache
from specjax.prefill import prefill
from specjax.recompute import Recompute, TokenCache
from specjax.types import Context

WINDOW = 8


def test_W1_forced_rejects_past_the_window():
    """Prompt 5, 40 new tokens, every round partly rejected: the output at every length."""
    subject = on_tiny("none")
    assert WINDOW in TINY_CONFIG.windows
    prompts = Prompts.random((5, 6, 7, 8), subject.vocabulary, seed=1)
    right = [[0, 1, 2, 3], [3, 3, 0, 0], [2, 2, 2, 2], [1, 3, 0, 2]]
    session = Session.begin(
        scripted(subject, prompts, right=right), "greedy", prompts, row_keys(0, ROWS), budget=40
    )
    expected = oracle_decode(subject.logits, prompts, 40)
    while session.running:
        session = session.advance()
        assert outputs(session.snapshot()) == trimmed(expected, session.state.context.length)
    np.testing.assert_array_equal(session.state.context.length, prompts.length + 40)


def test_W1_without_the_window_the_output_is_another():
    """The window matters in the test above: the oracle without it says other tokens."""
    subject = on_tiny("none")
    prompts = Prompts.random((5, 6, 7, 8), subject.vocabulary, seed=1)
    blind = replace(TINY_CONFIG, windows=())
    unwindowed = oracle_decode(
        lambda tokens: decoder_oracle(blind, tiny_params(), tokens), prompts, 40
    )
    assert (unwindowed != oracle_decode(subject.logits, prompts, 40)).any(axis=1).all()


def test_W3_the_first_query_of_a_block_still_sees_its_own_window():
    """Blocks of 5 behind 6 to 18 tokens, one row each, against the whole sequence at once."""
    starts, block = np.arange(6, 19), 5
    tokens = np.random.default_rng(2).integers(0, TINY_CONFIG.vocab_size, (len(starts), 32))
    tokens = tokens.astype(np.int32)
    rows = jnp.asarray(tokens)
    prompt = Context(rows, jnp.asarray(starts, jnp.int32))
    cache = TINY.init_cache(len(starts), BUFFER)
    cache = prefill(TINY, tiny_params(), prompt, cache, chunk=CHUNK).cache
    take = jnp.asarray(starts)[:, None] + jnp.arange(block)
    out = TINY(tiny_params(), jnp.take_along_axis(rows, take, axis=1), None, cache)
    expected = decoder_oracle(TINY_CONFIG, tiny_params(), tokens)
    for row, start in enumerate(starts):
        np.testing.assert_allclose(
            out.logits[row], expected[row, start : start + block], atol=2e-5, rtol=1e-5
        )


@pytest.mark.parametrize("kind", [KVCache, TokenCache])
def test_W5_rollback_drops_what_it_says_and_never_more_than_there_is(kind):
    empty = {
        KVCache: lambda: KVCache.empty(1, 3, 1, 8, 4),
        TokenCache: lambda: Recompute(jnp.asarray).init_cache(3, 8),
    }[kind]()
    three = replace(empty, length=jnp.array([3, 3, 3], jnp.int32))
    dropped = three.rollback(jnp.array([0, 3, 6], jnp.int32))
    np.testing.assert_array_equal(dropped.length, [3, 0, 0])

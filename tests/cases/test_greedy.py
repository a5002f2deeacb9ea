"""Cases G1, G3, G7: greedy output with speculation on is the plain output."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fixtures import (
    BUFFER,
    DRAFT_LENGTHS,
    FULL_SCALE,
    METHODS,
    ROWS,
    SPECULATING,
    TINY_CONFIG,
    Prompts,
    counting,
    decode,
    method,
    on_table,
    on_tiny,
    oracle_decode,
    outputs,
    row_keys,
    rules_tried,
    scripted,
    trimmed,
)
from jax.sharding import NamedSharding, PartitionSpec

from specjax.accept import RULES
from specjax.models import DecoderTarget
from specjax.sampling import Sampling
from specjax.sharding import make_mesh

PROMPTS, LONG = (50, 256) if FULL_SCALE else (8, BUFFER)
NEAR_TIE = 1e-5
ONE_IN = 10_000
# Two steps of bfloat16 below a logit.
BF16_STEPS = 2 * 2.0**-7


def _prompts(rows, buffer):
    lengths = np.random.default_rng(7).integers(1, 20, rows)
    return Prompts.random(lengths, TINY_CONFIG.vocab_size, seed=8, buffer=buffer)


def _greedy(subject, prompts):
    rows, buffer = prompts.tokens.shape
    sampling = Sampling.create(rows, temperature=0.0)
    result = decode(subject, "greedy", prompts, row_keys(0, rows), sampling=sampling, budget=buffer)
    assert (np.asarray(result.length) == buffer).all()
    return np.asarray(result.tokens)


def _shortfall(logits, tokens, prompts):
    """By how much each emitted token's logit misses the largest one."""
    chosen = np.take_along_axis(logits[:, :-1], tokens[:, 1:, None], axis=-1)[..., 0]
    emitted = np.arange(1, tokens.shape[1]) >= prompts.length[:, None]
    return (logits[:, :-1].max(-1) - chosen)[emitted]


@pytest.mark.parametrize("draft_length", DRAFT_LENGTHS)
@pytest.mark.parametrize("name", SPECULATING)
def test_G1_in_float32_every_token_is_the_argmax(name, draft_length):
    subject = on_tiny(name, num_speculative_tokens=draft_length)
    prompts = _prompts(PROMPTS, LONG)
    tokens = _greedy(subject, prompts)
    short = _shortfall(subject.logits(tokens), tokens, prompts)
    excused = np.sum(short > 0)
    assert short.max() <= NEAR_TIE
    assert excused <= 1 + short.size // ONE_IN


@pytest.mark.parametrize("name", METHODS)
def test_G1_in_bfloat16_every_token_is_nearly_the_argmax(name, record_property):
    """Blocks round differently from single rows: equality is not promised, a near tie is."""
    exact = on_tiny(name)
    target = DecoderTarget(TINY_CONFIG, dtype="bfloat16")
    subject = replace(
        exact,
        target=target,
        params=_bfloat16(exact.params),
        drafter=_bfloat16_drafter(exact.drafter),
        drafter_params=_bfloat16(exact.drafter_params),
    )
    prompts = _prompts(ROWS, BUFFER)
    tokens = _greedy(subject, prompts)
    logits = _plain_logits(target)(subject.params, jnp.asarray(tokens))
    logits = np.asarray(logits, np.float64)
    short = _shortfall(logits, tokens, prompts)
    record_property("near ties", int(np.sum(short > 0)))
    assert short.max() <= BF16_STEPS * np.abs(logits).max()


def _bfloat16(params):
    return jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)


def _bfloat16_drafter(drafter):
    if not hasattr(drafter, "model"):
        return drafter
    return replace(drafter, model=replace(drafter.model, dtype="bfloat16"))


@functools.cache
def _plain_logits(target):
    def forward(params, tokens):
        cache = target.init_cache(*tokens.shape)
        return target(params, tokens, None, cache).logits

    return jax.jit(forward)


def test_G1_a_wrong_token_would_be_seen():
    subject = on_tiny("none")
    prompts = _prompts(ROWS, BUFFER)
    tokens = _greedy(subject, prompts).copy()
    assert _shortfall(subject.logits(tokens), tokens, prompts).max() <= NEAR_TIE
    tokens[1, 40] = (tokens[1, 40] + 1) % TINY_CONFIG.vocab_size
    assert _shortfall(subject.logits(tokens), tokens, prompts).max() > 100 * NEAR_TIE


# Every logit twice: the lower id must win, so the upper half is never said.


def _doubled(leaf):
    """Logits of the upper half of the vocabulary are copies of the lower half's."""
    half = leaf.shape[-1] // 2
    return leaf.at[..., half : 2 * half].set(leaf[..., :half])


def _with_ties(name):
    subject = method(name)
    if isinstance(subject.params, dict):
        params = subject.params | {"head": _doubled(subject.params["head"].T).T}
    else:
        params = _doubled(subject.params)
    shared = subject.drafter_params is subject.params
    return replace(
        subject, params=params, drafter_params=params if shared else subject.drafter_params
    )


BOTH_WAYS = Sampling.create(ROWS, temperature=[0.0, 1.0, 0.0, 2.0], top_k=[0, 1, 5, 1])


@pytest.mark.parametrize("name", METHODS)
def test_G3_of_equal_logits_the_lowest_id_wins(name):
    """At temperature 0 and with top-k 1, in the draft, in verification and plainly."""
    subject = _with_ties(name)
    prompts = Prompts.random((5, 9, 2, 7), subject.vocabulary // 2, seed=9)
    keys = row_keys(1, ROWS)
    result = decode(subject, subject.default_rule, prompts, keys, sampling=BOTH_WAYS)
    expected = oracle_decode(subject.logits, prompts, BUFFER)
    assert outputs(result) == trimmed(expected, result.length)
    said, half = np.asarray(result.tokens), subject.vocabulary // 2
    assert not np.isin(said, range(half, 2 * half)).any()


def test_G3_across_vocabulary_shards():
    """Each pair of equal logits lies on two devices."""
    subject = _with_ties("none")
    mesh = make_mesh(data=1, model=2)
    halves = NamedSharding(mesh, PartitionSpec(None, None, "model"))
    split = replace(subject, params=jax.device_put(subject.params, halves))
    prompts = Prompts.random((5, 9, 2, 7), subject.vocabulary // 2, seed=9)
    result = decode(split, "matching", prompts, row_keys(1, ROWS), sampling=BOTH_WAYS, mesh=mesh)
    expected = oracle_decode(subject.logits, prompts, BUFFER)
    assert outputs(result) == trimmed(expected, result.length)


def test_G3_a_draft_of_equal_logits_is_accepted():
    """Draft and target break the tie alike: nothing is rejected."""
    subject = _with_ties("draft_model")
    subject = replace(subject, drafter_params=subject.params)
    prompts = Prompts.random((5, 9, 2, 7), subject.vocabulary // 2, seed=9)
    result = decode(
        subject, subject.default_rule, prompts, row_keys(1, ROWS), sampling=BOTH_WAYS, budget=31
    )
    np.testing.assert_array_equal(result.stats.accepted, result.stats.drafted)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("rule", rules_tried())
@pytest.mark.parametrize("draft_length", [1, 4])
def test_G7_a_count_has_no_gap_and_no_repeat(draft_length, rule, temperature):
    """Every third token is drafted wrong."""
    if RULES[rule].greedy_only:
        temperature = 0.0
    prompts = Prompts.of([3], [0, 1], [9, 10, 11], [15])
    right = oracle_decode(counting().logits, prompts, BUFFER)
    proposal = np.where(np.arange(BUFFER) % 3 == 2, (right + 5) % 16, right)
    subject = scripted(
        counting(), prompts, right=draft_length, draft_length=draft_length, proposal=proposal
    )
    result = decode(
        subject,
        rule,
        prompts,
        row_keys(2, ROWS),
        sampling=Sampling.create(ROWS, temperature=temperature),
        budget=40,
    )
    assert outputs(result) == trimmed(right, prompts.length + 40)
    emitted, uncut = result.stats.emitted, np.asarray(result.stats.truncated) == 0
    committed = result.stats.accepted.sum(axis=1) + result.stats.rounds
    np.testing.assert_array_equal(emitted, [39] * ROWS)
    np.testing.assert_array_equal(emitted[uncut], committed[uncut])
    assert uncut.any()


def test_G7_the_table_counts():
    prompts = Prompts.of([3, 4, 5], [14])
    tokens = oracle_decode(on_table("none").logits, prompts, 4)
    counted = oracle_decode(counting().logits, prompts, 4)
    assert counted[0, :7].tolist() == [3, 4, 5, 6, 7, 8, 9]
    assert counted[1, :5].tolist() == [14, 15, 0, 1, 2]
    assert (tokens != counted).any()

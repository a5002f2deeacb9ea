"""Speculative output is the plain output: token for token where that is promised."""

import numpy as np
import pytest
from fixtures import (
    BUFFER,
    METHODS,
    PAIRS,
    ROWS,
    Prompts,
    decode,
    method,
    oracle_decode,
    outputs,
    row_keys,
    rules_tried,
    trimmed,
)

from specjax.sampling import Sampling
from specjax.types import LENGTH as OUT_OF_ROOM

PROMPT_LENGTHS = (5, 9, 1, 7)
GREEDY = Sampling.create(ROWS, temperature=0.0)
MIXED = Sampling.create(
    ROWS,
    temperature=[1.0, 0.0, 0.7, 1.3],
    top_k=[0, 0, 5, 0],
    top_p=[1.0, 1.0, 1.0, 0.8],
    min_p=[0.0, 0.0, 0.0, 0.02],
)


def _prompts(subject) -> Prompts:
    return Prompts.random(PROMPT_LENGTHS, subject.vocabulary, seed=4)


@pytest.mark.parametrize(("name", "rule"), PAIRS)
def test_greedy_rows_emit_what_plain_greedy_decoding_does(name, rule):
    subject = method(name)
    prompts = _prompts(subject)
    result = decode(subject, rule, prompts, row_keys(5, ROWS), sampling=GREEDY)
    expected = oracle_decode(subject.logits, prompts, BUFFER)
    assert outputs(result) == trimmed(expected, result.length)
    assert (np.asarray(result.length) == BUFFER).all()
    assert (np.asarray(result.finish) == OUT_OF_ROOM).all()


@pytest.mark.parametrize("name", METHODS)
def test_coupled_rows_emit_what_plain_sampling_with_their_key_does(name):
    """Differently tempered and truncated rows in one call, a greedy one among them."""
    subject = method(name)
    prompts, keys = _prompts(subject), row_keys(6, ROWS)
    result = decode(subject, "coupled", prompts, keys, sampling=MIXED)
    expected = oracle_decode(subject.logits, prompts, BUFFER, MIXED, keys)
    assert outputs(result) == trimmed(expected, result.length)
    assert (np.asarray(result.length) == BUFFER).all()


@pytest.mark.parametrize("rule", rules_tried(sampling=True))
def test_without_a_draft_every_rule_samples_plainly(rule):
    """A round without a draft is a plain step: the residual against nothing is p itself."""
    subject = method("none")
    prompts, keys = _prompts(subject), row_keys(7, ROWS)
    result = decode(subject, rule, prompts, keys, sampling=MIXED)
    expected = oracle_decode(subject.logits, prompts, BUFFER, MIXED, keys)
    assert outputs(result) == trimmed(expected, result.length)


def test_the_oracle_hears_the_noise_and_the_parameters():
    """Were it deaf to either, the tests above could not fail."""
    subject = method("none")
    prompts = _prompts(subject)
    tokens = [
        oracle_decode(subject.logits, prompts, 40, sampling, row_keys(seed, ROWS))
        for sampling, seed in ((MIXED, 6), (MIXED, 8), (Sampling.create(ROWS), 6))
    ]
    differ = [(tokens[0] != other).any(axis=1).tolist() for other in tokens[1:]]
    assert differ == [[True, False, True, True], [False, True, True, True]]

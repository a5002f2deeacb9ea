"""Cases E1, E3: a request's tokens depend on its own key and nothing else that runs."""

from dataclasses import replace

import jax
import numpy as np
import pytest
from fixtures import METHODS, Prompts, decode, method, outputs, row_keys, uniform_llm

from specjax import SamplingParams

SLOTS = 8


@pytest.mark.parametrize("name", METHODS)
def test_E1_the_same_request_alone_twice_and_in_every_slot(name):
    subject = method(name)
    prompts = Prompts.random((6, *range(1, SLOTS)), subject.vocabulary, seed=1)
    keys = row_keys(5, SLOTS)
    asked, key = prompts.take(np.array([0])), keys[:1]

    def alone():
        return outputs(decode(subject, subject.default_rule, asked, key))[0]

    solo = alone()
    assert alone() == solo
    for slot in range(SLOTS):
        order = np.roll(np.arange(SLOTS), slot)
        shuffled = decode(subject, subject.default_rule, prompts.take(order), keys[order])
        assert outputs(shuffled)[slot] == solo
    assert alone() == solo


@pytest.mark.parametrize("name", METHODS)
def test_E1_another_key_says_something_else(name):
    subject = method(name)
    prompts = Prompts.of(*[[3, 4]] * SLOTS)
    said = outputs(decode(subject, subject.default_rule, prompts, row_keys(6, SLOTS)))
    assert len({tuple(row) for row in said}) == SLOTS


def test_E1_one_key_gives_row_i_its_own():
    """`generate` folds the row's number into a single key: the rows of a batch differ."""
    subject = method("none")
    prompts = Prompts.of(*[[3, 4]] * SLOTS)
    key = jax.random.key(6)
    single = outputs(decode(subject, "matching", prompts, key))
    assert single == outputs(decode(subject, "matching", prompts, row_keys(6, SLOTS)))


PARAMS = SamplingParams(temperature=1.0, max_tokens=8)


def _said(llm, prompts, params=PARAMS):
    return [result.outputs[0].token_ids for result in llm.generate(prompts, params)]


def test_E1_a_seeded_request_says_the_same_whatever_else_ran():
    llm, seeded = uniform_llm(), replace(PARAMS, seed=7)
    (first,) = _said(llm, ["abcab"], seeded)
    for _ in range(20):
        _said(llm, ["ba"])
    assert _said(llm, ["abcab"], seeded) == [first]
    assert _said(uniform_llm(seed=99), ["abcab"], seeded) == [first]
    for slot in range(4):
        prompts = ["b", "ca", "dad", "aa"]
        prompts[slot] = "abcab"
        params = [PARAMS] * 4
        params[slot] = seeded
        assert _said(llm, prompts, params)[slot] == first


def test_E3_requests_without_a_seed_differ():
    """Ten one after another and four in one batch: 32 bits of luck each to coincide."""
    llm = uniform_llm()
    said = [_said(llm, ["ab"])[0] for _ in range(10)] + _said(llm, ["ab"] * 4)
    assert len({tuple(tokens) for tokens in said}) == 14
    assert _said(uniform_llm(), ["ab"]) == said[:1], "a script repeats"


def test_E3_samples_of_one_prompt_differ():
    (result,) = uniform_llm().generate(["ab"], replace(PARAMS, n=4, seed=3))
    assert len({tuple(output.token_ids) for output in result.outputs}) == 4

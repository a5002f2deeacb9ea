"""Case X1: prompts at and over the limit, as text and on arrays."""

import jax.numpy as jnp
import numpy as np
import pytest
from fixtures import (
    BUFFER,
    SPECULATING,
    Prompts,
    alphabet_llm,
    announcements,
    compilations,
    decode,
    method,
    oracle_decode,
    outputs,
    row_keys,
    trimmed,
)

from specjax import SamplingParams
from specjax.generation import generate


@pytest.mark.parametrize("length", [64, 65, 500])
def test_X1_a_prompt_over_the_limit_is_refused_with_both_numbers(length):
    subject = method("none")
    tokens = jnp.zeros((1, length), jnp.int32)
    sentence = f"prompt of {length} tokens leaves no room in a buffer of {BUFFER}"
    with announcements() as programs, pytest.raises(ValueError, match=sentence):
        generate(subject.target, subject.params, tokens, row_keys(0, 1), buffer=BUFFER)
    assert programs == []


@pytest.mark.parametrize("name", SPECULATING)
def test_X1_the_longest_prompt_gets_its_one_token(name):
    """Longer than a draft model's context, and beside a short one."""
    subject = method(name)
    prompts = Prompts.random((63, 5, 62, 60), subject.vocabulary, seed=2)
    result = decode(subject, "greedy", prompts, row_keys(0, 4), budget=4)
    expected = oracle_decode(subject.logits, prompts, 4)
    length = np.minimum(prompts.length + 4, BUFFER)
    assert outputs(result) == trimmed(expected, length)


@pytest.mark.parametrize("length", [64, 65, 500])
def test_X1_the_engine_refuses_before_anything_is_streamed(length):
    llm, params = alphabet_llm(), SamplingParams(temperature=0.0, max_tokens=5)
    sentence = f"prompt 1 has {length} tokens and max_model_len is {BUFFER}"
    for serve in (llm.generate, llm.stream):
        with compilations() as names, pytest.raises(ValueError, match=sentence):
            serve(["ab", [0] * length], params)
        assert names == []
    answer = llm.generate([[3] * 63], params)[0].outputs[0]
    assert (answer.token_ids, answer.finish_reason) == ([4], "length")

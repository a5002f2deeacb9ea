"""Cases M1, M3: prompts of length 0 and 1, as text and on arrays."""

import jax.numpy as jnp
import pytest
from fixtures import (
    BUFFER,
    METHODS,
    ROWS,
    Prompts,
    alphabet_llm,
    announcements,
    decode,
    method,
    oracle_decode,
    outputs,
    row_keys,
)

from specjax import SamplingParams
from specjax.generation import generate
from specjax.sampling import Sampling


def test_M3_a_row_of_length_0_is_refused_before_compiling():
    subject = method("none")
    prompts = Prompts.of([3, 4], [], [5], [6])
    with (
        announcements() as programs,
        pytest.raises(ValueError, match="every row needs at least one"),
    ):
        decode(subject, "greedy", prompts, row_keys(0, ROWS))
    assert programs == []


def test_M3_an_empty_batch_and_an_empty_width_are_refused():
    subject = method("none")
    for shape in ((0, 5), (3, 0)):
        tokens = jnp.zeros(shape, jnp.int32)
        with pytest.raises(ValueError, match="at least one row and one token"):
            generate(subject.target, subject.params, tokens, row_keys(0, 1)[0])


@pytest.mark.parametrize("name", METHODS)
def test_M3_prompts_of_one_token(name):
    subject = method(name)
    prompts = Prompts.of([3], [5], [0], [subject.vocabulary - 1])
    keys = row_keys(1, ROWS)
    sampling = Sampling.create(ROWS, temperature=[0.0, 0.0, 1.0, 1.0])
    result = decode(subject, "coupled", prompts, keys, sampling=sampling)
    expected = oracle_decode(subject.logits, prompts, BUFFER, sampling, keys)
    assert outputs(result) == expected.tolist()


@pytest.mark.parametrize("prompt", ["", [], "  \t", {"prompt": ""}])
def test_M1_an_empty_prompt_is_refused_and_harms_nobody(prompt):
    """White space is no token of this vocabulary."""
    llm, params = alphabet_llm(), SamplingParams(temperature=0.0, max_tokens=5)
    for serve in (llm.generate, llm.stream):
        with pytest.raises(ValueError, match="prompt 0 is empty: give at least one token"):
            serve([prompt], params)
        with pytest.raises(ValueError, match="prompt 1 is empty"):
            serve(["ab", prompt], params)
    running = llm.stream(["abcab"], params)
    begun = [next(running)]
    with pytest.raises(ValueError, match="empty"):
        llm.generate([prompt], params)
    text = "".join(delta.text for delta in [*begun, *running])
    assert text == llm.generate(["abcab"], params)[0].outputs[0].text == "cdefg"


def test_M1_no_prompt_and_no_message_are_refused():
    llm = alphabet_llm()
    with pytest.raises(ValueError, match="the list of prompts is empty"):
        llm.generate([])
    with pytest.raises(ValueError, match="the conversation is empty"):
        llm.chat([])
    with pytest.raises(ValueError, match="prompt 0 is empty"):
        llm.chat([{"role": "user", "content": ""}])

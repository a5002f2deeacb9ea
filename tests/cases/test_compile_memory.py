"""Cases C1, C3, C5: what compiles again, buffers of any size, and calls that fail."""

from dataclasses import dataclass, replace

import jax.numpy as jnp
import numpy as np
import pytest
from fixtures import (
    BUFFER,
    ROWS,
    Prompts,
    Session,
    alphabet_llm,
    announcements,
    compilations,
    counting,
    decode,
    letter_model,
    letter_tokenizer,
    method,
    oracle_decode,
    outputs,
    row_keys,
    trimmed,
)

from specjax import LLM, SamplingParams
from specjax.draft import NGram
from specjax.generation import generate
from specjax.sampling import Sampling


def test_C1_sixty_prompt_lengths_one_prefill_and_one_decode_program():
    """Prompts of every length that the buffer takes, each as wide as it is long."""
    subject = method("ngram")
    # A drafter that no other test has compiled for.
    drafter = NGram(3, 1, 2)

    def run(length):
        tokens = jnp.asarray(np.resize(np.arange(7), (1, length)), jnp.int32)
        return generate(
            subject.target,
            subject.params,
            tokens,
            row_keys(0, 1),
            drafter=drafter,
            max_new_tokens=3,
            buffer=BUFFER,
            prefill_chunk=8,
        )

    with announcements() as programs:
        for length in range(1, BUFFER):
            run(length)
    assert len(programs) == len(set(programs)) <= 3
    with compilations() as again:
        for length in range(1, BUFFER):
            run(length)
    assert again == []


def test_C3_a_capacity_that_is_no_power_of_two():
    subject = method("ngram")
    draft_length = subject.drafter.num_speculative_tokens
    lengths = (256, 257, 300, 317 - draft_length)
    prompts = Prompts.random(lengths, subject.vocabulary, seed=1, buffer=317)
    result = decode(subject, "greedy", prompts, row_keys(0, ROWS), budget=100)
    expected = oracle_decode(subject.logits, prompts, 61)
    assert outputs(result) == trimmed(expected, np.minimum(prompts.length + 100, 317))


@dataclass(frozen=True)
class Failing(NGram):
    """Raises in the draft step, when it is traced."""

    def draft(self, params, state, context, choose):
        raise RuntimeError("no draft today")


def test_C5_a_failed_call_spoils_nothing():
    subject = method("ngram")
    prompts = Prompts.random((5, 9, 2, 7), subject.vocabulary, seed=2)
    broken = replace(subject, drafter=Failing(4, 1, 4))
    with pytest.raises(RuntimeError, match="no draft today"):
        decode(broken, "greedy", prompts, row_keys(0, ROWS))
    result = decode(
        subject,
        "greedy",
        prompts,
        row_keys(0, ROWS),
        sampling=Sampling.create(ROWS, temperature=0.0),
    )
    expected = oracle_decode(subject.logits, prompts, BUFFER)
    assert outputs(result) == trimmed(expected, result.length)


def test_C5_a_state_that_was_advanced_is_used_up_and_says_so():
    subject = method("ngram")
    prompts = Prompts.random((5, 9, 2, 7), subject.vocabulary, seed=3)
    session = Session.begin(subject, "greedy", prompts, row_keys(0, ROWS))
    old = session.state
    new = session.advance()
    with pytest.raises(RuntimeError, match="deleted|donated"):
        np.asarray(old.context.tokens)
    assert outputs(new.snapshot()) == trimmed(
        oracle_decode(subject.logits, prompts, BUFFER), new.state.context.length
    )


def test_C1_the_engine_compiles_once_for_all_prompt_lengths():
    """Prompts and budgets in one bucket, seeds and temperatures: one prefill and one decode."""
    llm = alphabet_llm(speculative_config={"method": "ngram", "num_speculative_tokens": 2})

    def run(length):
        params = SamplingParams(temperature=length % 3 / 2, max_tokens=1 + length % 7, seed=length)
        llm.generate([[length % 16] * length], params)

    with announcements() as programs:
        for length in range(1, BUFFER, 5):
            run(length)
    assert len(programs) == len(set(programs)) <= 3
    run(1)
    with compilations() as again:
        for length in range(2, BUFFER, 5):
            run(length)
    assert again == []


def test_C3_the_engines_last_bucket_is_its_capacity():
    """317 is no power of two; prompts up to one draft below it."""
    model = letter_model(counting().params, max_position=317)
    llm = LLM(model, speculative_config={"method": "ngram", "num_speculative_tokens": 4})
    prompts = [(list(range(16)) * 20)[:length] for length in (256, 257, 300, 313)]
    results = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=100))
    for prompt, result in zip(prompts, results, strict=True):
        ids = result.outputs[0].token_ids
        assert len(ids) == min(100, 317 - len(prompt))
        assert ids == [(prompt[-1] + 1 + step) % 16 for step in range(len(ids))]


class BreaksOnce:
    """A tokenizer's backend that fails in its third decode, once."""

    def __init__(self, backend):
        self.backend, self.calls = backend, 0

    def __getattr__(self, name):
        return getattr(self.backend, name)

    def decode(self, ids, **options):
        self.calls += 1
        if self.calls == 3:
            raise RuntimeError("no text today")
        return self.backend.decode(ids, **options)


def test_C5_the_engine_goes_on_after_a_request_that_failed():
    tokenizer = letter_tokenizer()
    tokenizer = replace(tokenizer, backend=BreaksOnce(tokenizer.backend))
    llm = LLM(
        letter_model(counting().params, tokenizer=tokenizer),
        speculative_config={"method": "ngram", "num_speculative_tokens": 4},
        rounds_per_chunk=1,
    )
    params = SamplingParams(temperature=0.0, max_tokens=20)
    with pytest.raises(RuntimeError, match="no text today"):
        llm.generate(["abcab"], params)
    answer = llm.generate(["abcab"], params)[0].outputs[0]
    assert answer.text == "cdefghijklmnopabcdef"
    stream = llm.stream(["abcab"], params)
    next(stream)
    stream.close()
    assert llm.generate(["abcab"], params)[0].outputs[0].text == answer.text

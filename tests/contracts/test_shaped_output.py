"""Penalties, bans and the rest inside verification: the output is still plain decoding's."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest
from fixtures import METHODS, ROWS, SPECULATING, Prompts, decode, method, outputs, row_keys
from fixtures import token_noise as noise_of

from specjax.sampling import Sampling
from specjax.testing import reference

PROMPT_LENGTHS = (5, 9, 1, 7)
EOS = 2
NEW = 24


def doubles_after_an_even_token(logits, past):
    """A user's function: what follows an even token is twice as sharp."""
    last = past.tokens[past.length - 1]
    return jnp.where(last % 2 == 0, 2 * logits, logits)


def reference_processor(logits, tokens):
    return 2 * logits if tokens[-1] % 2 == 0 else logits


# All of them in one row, one in the next, none in the third, and a greedy row with its own.
PARAMETERS = [
    {
        "temperature": 0.8,
        "top_k": 9,
        "top_p": 0.95,
        "repetition_penalty": 1.2,
        "frequency_penalty": 0.3,
        "min_tokens": 12,
        "bad_words": ((4, 1), (7,)),
        "logit_bias": {5: 1.5, 6: -np.inf},
        "logits_processor": reference_processor,
    },
    {"temperature": 1.1, "presence_penalty": 1.5},
    {"temperature": 0.9},
    {"temperature": 0.0, "repetition_penalty": 1.4, "min_tokens": NEW},
]


def sampling(vocabulary: int) -> Sampling:
    def column(name, off):
        return [row.get(name, off) for row in PARAMETERS]

    bias = np.zeros((ROWS, vocabulary), np.float32)
    bias[0, 5], bias[0, 6] = 1.5, -np.inf
    nothing = [[-1, -1], [-1, -1]]
    return Sampling.create(
        ROWS,
        temperature=column("temperature", 1.0),
        top_k=column("top_k", 0),
        top_p=column("top_p", 1.0),
        repetition_penalty=column("repetition_penalty", 1.0),
        presence_penalty=column("presence_penalty", 0.0),
        frequency_penalty=column("frequency_penalty", 0.0),
        bias=bias,
        min_tokens=column("min_tokens", 0),
        ends=[EOS],
        bad_words=[[[4, 1], [-1, 7]], nothing, nothing, nothing],
        processor=doubles_after_an_even_token,
        processed=[True, False, False, False],
    )


@functools.cache
def expected(name: str, seed: int):
    """Plain decoding in NumPy by the reference, a row at a time: [row][token]."""
    subject, keys = method(name), row_keys(seed, ROWS)
    prompts = Prompts.random(PROMPT_LENGTHS, subject.vocabulary, seed=4)
    rows = []
    for row, parameters in enumerate(PARAMETERS):
        prompt = prompts.tokens[row, : prompts.length[row]].tolist()
        output: list[int] = []
        while len(output) < NEW and EOS not in output:
            logits = subject.logits(np.array([[*prompt, *output]]))[0, -1]
            law = reference.log_probs(
                logits, prompt=prompt, output=output, stop_token_ids=[EOS], **parameters
            )
            place = np.array([len(prompt) + len(output)])
            drawn = law + noise_of(keys[row : row + 1], place, len(law))[0]
            output.append(int(np.argmax(drawn)))
        rows.append(prompt + output)
    return prompts, keys, rows


@pytest.mark.parametrize("name", METHODS)
def test_coupled_output_is_plain_decodings_with_every_parameter(name):
    prompts, keys, rows = expected(name, 11)
    given = sampling(method(name).vocabulary)
    result = decode(
        method(name), "coupled", prompts, keys, sampling=given, budget=NEW, eos_ids=[EOS]
    )
    assert outputs(result) == rows
    if name in SPECULATING:
        assert np.asarray(result.stats.accepted).sum() > 0


def test_a_row_that_forgets_its_drafts_is_found():
    """The twin: with counts of what is committed alone, the output differs."""
    name = SPECULATING[0]
    prompts, keys, rows = expected(name, 11)
    forgetful = [{**row, "repetition_penalty": 1.0, "frequency_penalty": 0.0} for row in PARAMETERS]
    assert forgetful != PARAMETERS
    without = sampling(method(name).vocabulary).replace(penalties=None)
    result = decode(
        method(name), "coupled", prompts, keys, sampling=without, budget=NEW, eos_ids=[EOS]
    )
    assert outputs(result) != rows

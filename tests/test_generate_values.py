"""What `specjax.generate` refuses of parameters, by which sentence, before it compiles the loop."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fixtures import BUFFER, CHUNK, ROWS, TABLE, VOCABULARY, announcements, lagged

from specjax.generation import generate
from specjax.grammar import Grammar
from specjax.sampling import Sampling

BIAS = np.zeros((ROWS, VOCABULARY))
NOTHING = Grammar(
    jnp.zeros((2, 1), jnp.int32), jnp.zeros((VOCABULARY,), jnp.int32), jnp.zeros((), jnp.int32)
)


def continued(sampling=None, prompt=None, key=None, **options):
    options = {"max_new_tokens": 2, "buffer": BUFFER, "prefill_chunk": CHUNK} | options
    return generate(
        TABLE,
        lagged(),
        jnp.ones((ROWS, 3), jnp.int32) if prompt is None else prompt,
        jax.random.key(0) if key is None else key,
        sampling=sampling,
        **options,
    )


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"temperature": np.nan}, "temperature must be 0 or more"),
        ({"temperature": np.inf}, "temperature must be 0 or more, at most"),
        ({"top_p": np.nan}, "top_p must lie in"),
        ({"min_p": np.nan}, "min_p must lie in"),
        ({"repetition_penalty": np.nan}, "repetition_penalty must be more than 0"),
        ({"repetition_penalty": 1e30}, "repetition_penalty must be more than 0"),
        ({"presence_penalty": 5}, "presence_penalty must lie in"),
        ({"top_k": -5}, "top_k must be at least 1, or 0 or -1"),
        ({"min_tokens": -3, "ends": [0]}, "min_tokens must be 0 or more"),
        ({"min_tokens": 3, "ends": [0, 16]}, "ends has the id 16: .* 0 to 15, and -1 pads"),
        ({"bad_words": [[0, -1]]}, "bad_words has -1 after a token: a word is padded at its start"),
        ({"bad_words": [[-1, 16]]}, "bad_words has the id 16: the vocabulary has 16"),
        ({"bad_words": [[-2]]}, "bad_words has the id -2"),
        ({"grammar": NOTHING, "grammar_start": 7}, "grammar_start must be .* 0 to 1"),
        ({"grammar": NOTHING, "grammar_start": -1}, "grammar_start must be .* 0 to 1"),
        ({"processor": lambda logits, past: logits[:1]}, "logits_processor returns"),
        ({"processor": lambda logits, past: np.asarray(logits)}, "logits_processor asks for"),
        ({"presence_penalty": np.nan}, r"presence_penalty must lie in \[-2, 2\]"),
        ({"frequency_penalty": np.inf}, "frequency_penalty must lie in"),
        ({"bias": BIAS * np.nan}, "bias must be of numbers"),
        ({"bias": BIAS + np.inf}, "bias must be of numbers"),
        ({"bias": BIAS - np.inf}, "bias bans every token"),
    ],
)
def test_values_that_would_leave_no_law_are_refused(values, sentence):
    with announcements() as programs, pytest.raises(ValueError, match=sentence):
        continued(Sampling.create(ROWS, **values))
    assert programs == []


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"top_k": 1.7}, "top_k is of type float64: give integers"),
        ({"top_k": True}, "top_k is of type bool: give integers"),
        ({"top_k": [1 << 40]}, "top_k is of numbers beyond 32 bits"),
        ({"top_k": np.uint32(1 << 31)}, "top_k is of numbers beyond 32 bits"),
        ({"temperature": True}, "temperature is of type bool: give numbers"),
        ({"temperature": [1.0] * 3}, r"temperature has the shape \[3\]: .* or \[2\]"),
        ({"temperature": [[1.0], [1.0, 2.0]]}, "temperature has parts of different lengths"),
        ({"top_p": "most"}, "top_p is of type <U4: give numbers"),
        ({"repetition_penalty": [1.0] * 3}, r"repetition_penalty has the shape \[3\]"),
        ({"min_tokens": 2.5, "ends": [0]}, "min_tokens is of type float64"),
        ({"min_tokens": 2, "ends": [0.5]}, "ends is of type float64"),
        ({"min_tokens": 2, "ends": 0}, r"ends has the shape \[\]: give \[Z\]"),
        ({"bad_words": [0, 1]}, r"bad_words has the shape \[2\]: give \[Q, J\] .*, or \[2, Q, J\]"),
        ({"bias": 0.5}, r"bias has the shape \[\]: give \[V\]"),
        ({"grammar_start": 1}, "grammar_start needs grammar"),
        ({"processor": max, "processed": [True] * 3}, r"processed has the shape \[3\]"),
    ],
)
def test_parameters_of_another_type_or_shape_are_refused(values, sentence):
    with pytest.raises(ValueError, match=sentence):
        Sampling.create(2, **values)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"prompt": jnp.full((ROWS, 3), VOCABULARY)}, "prompt has the id 16: .* 0 to 15"),
        ({"prompt": jnp.full((ROWS, 3), -1)}, "prompt has the id -1"),
        ({"eos_ids": (1, VOCABULARY)}, "eos_ids has the id 16: the vocabulary has 16"),
        ({"eos_ids": (-2,)}, "eos_ids has the id -2"),
        ({"max_new_tokens": 2**31 - 1}, "max_new_tokens is 2147483647, and with the prompt beyond"),
        ({"prefill_chunk": 0}, "prefill_chunk is 0: it must be at least 1"),
        ({"buffer": 0}, "buffer is 0: it must be at least 1"),
        ({"key": jax.random.split(jax.random.key(0), 3)}, r"key has the shape \(3,\) .* 4 rows"),
    ],
)
def test_arguments_that_fit_no_call_are_refused(options, sentence):
    with announcements() as programs, pytest.raises(ValueError, match=sentence):
        continued(**options)
    assert programs == []


def test_what_pads_a_prompt_may_be_anything():
    prompt = jnp.ones((ROWS, 3), jnp.int32)
    lengths = jnp.full((ROWS,), 2)
    plain, padded = (
        continued(prompt=prompt.at[:, 2].set(padding), prompt_length=lengths) for padding in (1, -1)
    )
    assert (plain.tokens[:, :4] == padded.tokens[:, :4]).all()


def test_values_that_are_traced_are_not_looked_at():
    """Where a caller's ``jit`` traces them; their types and shapes are still."""

    def traced(top_k, prompt):
        sampling = Sampling.create(ROWS, top_k=top_k)
        return continued(sampling, prompt=prompt, eos_ids=(1,)).length

    prompt = jax.ShapeDtypeStruct((ROWS, 3), jnp.int32)
    assert jax.eval_shape(traced, jax.ShapeDtypeStruct((), jnp.int32), prompt).shape == (ROWS,)
    with pytest.raises(ValueError, match="top_k is of type float32"):
        jax.eval_shape(traced, jax.ShapeDtypeStruct((), jnp.float32), prompt)


def test_parameters_of_other_rows_are_refused():
    for rows in (1, ROWS - 1):
        with pytest.raises(ValueError, match=r"sampling\.temperature has the shape"):
            continued(Sampling.create(rows))
    penalties = Sampling.create(1, repetition_penalty=1.1).penalties
    given = replace(Sampling.create(ROWS), penalties=penalties)
    with pytest.raises(ValueError, match=r"sampling\.penalties\.repetition has the shape"):
        continued(given)


def test_a_draft_of_less_than_no_levels_is_refused():
    for levels in (-1, jnp.array([1, 2, -1, 0])):
        with pytest.raises(ValueError, match="max_drafted is -1"):
            continued(max_drafted=levels)


def test_what_is_made_for_another_vocabulary_is_refused():
    """Known once the first token's program is traced, and before it compiles."""
    with pytest.raises(ValueError, match="bias is for 8 ids and the logits have 16"):
        continued(Sampling.create(ROWS, bias=BIAS[:, :8]))
    with pytest.raises(ValueError, match="logprobs is 17, more than the 16 ids"):
        continued(logprobs=VOCABULARY + 1)

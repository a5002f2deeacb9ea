"""What `specjax.generate` refuses of parameters, by which sentence, before it compiles the loop."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fixtures import BUFFER, CHUNK, ROWS, TABLE, VOCABULARY, announcements, lagged

from specjax.generation import generate
from specjax.sampling import Sampling

BIAS = np.zeros((ROWS, VOCABULARY))


def continued(sampling=None, **options):
    prompt = jnp.ones((ROWS, 3), jnp.int32)
    return generate(
        TABLE,
        lagged(),
        prompt,
        jax.random.key(0),
        sampling=sampling,
        max_new_tokens=2,
        buffer=BUFFER,
        prefill_chunk=CHUNK,
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
        ({"presence_penalty": np.nan}, "presence_penalty must be a number"),
        ({"frequency_penalty": np.inf}, "frequency_penalty must be a number"),
        ({"bias": BIAS * np.nan}, "bias must be of numbers"),
        ({"bias": BIAS + np.inf}, "bias must be of numbers"),
        ({"bias": BIAS - np.inf}, "bias bans every token"),
    ],
)
def test_values_that_would_leave_no_law_are_refused(values, sentence):
    with announcements() as programs, pytest.raises(ValueError, match=sentence):
        continued(Sampling.create(ROWS, **values))
    assert programs == []


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
    narrow = Sampling.create(ROWS, processor=lambda logits, past: logits[:1])
    with pytest.raises(ValueError, match="logits_processor returns .* it must return 16 logits"):
        continued(narrow)

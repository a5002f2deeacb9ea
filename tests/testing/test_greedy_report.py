"""The numerics report: right output passes, a near-tie is excused, anything else is a fault."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fixtures import TINY, TINY_CONFIG, decoder_oracle, tiny_params

from specjax.draft import NGram
from specjax.generation import generate
from specjax.models import DecoderTarget
from specjax.recompute import Recompute
from specjax.sampling import Sampling
from specjax.testing.greedy import greedy_report
from specjax.testing.tables import second_order

PROMPT_LENGTHS = np.array([3, 9, 1, 6, 2])
NEW = 70


@functools.cache
def generated():
    rows = len(PROMPT_LENGTHS)
    prompt = np.random.default_rng(0).integers(0, TINY_CONFIG.vocab_size, (rows, 9))
    return generate(
        TINY,
        tiny_params(),
        jnp.asarray(prompt, jnp.int32),
        jax.random.key(0),
        drafter=NGram(3, prompt_lookup_min=1),
        sampling=Sampling.create(rows, temperature=0.0),
        prompt_length=jnp.asarray(PROMPT_LENGTHS),
        max_new_tokens=NEW,
    )


def report(tokens, **options):
    generation = generated()
    lengths = generation.prompt_length, generation.length
    return greedy_report(TINY, tiny_params(), tokens, *lengths, **options)


def test_greedy_output_is_the_plain_models_best():
    found = report(generated().tokens)
    assert found.passed and found.tokens == NEW * len(PROMPT_LENGTHS)
    assert found.near_ties == () and found.widest == 0
    assert str(found) == f"{found.tokens} tokens: {found.tokens} the plain model's best, " + (
        "0 near-ties, 0 faults"
    )


def test_another_token_is_a_fault_and_is_named():
    """By how much it is below is what the NumPy oracle says."""
    tokens = np.array(generated().tokens)
    row, position = 4, PROMPT_LENGTHS[4] + NEW - 1
    best = tokens[row, position]
    tokens[row, position] = (best + 1) % TINY_CONFIG.vocab_size
    found = report(tokens)
    (fault,) = found.faults
    assert (fault.row, fault.position, fault.best) == (row, position, best)
    logits = decoder_oracle(TINY_CONFIG, tiny_params(), tokens[row : row + 1, :position])[0, -1]
    assert fault.gap == pytest.approx(logits[best] - logits[fault.token], abs=1e-3)
    assert not found.passed and f"row {row}, position {position}" in str(found)


@pytest.mark.parametrize(
    "dtype, gap, is_fault",
    [
        (jnp.float32, 5e-5, False),
        (jnp.float32, 5e-4, True),
        # Logits around 10 are 2**-4 apart in bfloat16, and 2**-7 in float16.
        (jnp.bfloat16, 0.12, False),
        (jnp.bfloat16, 0.14, True),
        (jnp.float16, 0.015, False),
        (jnp.float16, 0.02, True),
    ],
)
def test_a_near_tie_is_within_the_dtypes_step(dtype, gap, is_fault):
    """A table whose second best token is ``gap`` below the best, and output that takes it."""
    table = jnp.zeros((3, 3, 3)).at[..., 0].set(10.0).at[..., 1].set(10.0 - gap)
    tokens = np.ones((1, 8), np.int32)
    target = Recompute(second_order)
    found = greedy_report(target, table, tokens, np.array([2]), np.array([8]), dtype=dtype)
    assert found.tokens == 6
    assert len(found.faults if is_fault else found.near_ties) == 6
    assert found.passed is not is_fault
    assert found.widest == pytest.approx(gap, rel=0.01)


def test_an_exact_tie_is_a_near_tie():
    table = jnp.zeros((3, 3, 3))
    tokens = np.full((1, 5), 2, np.int32)
    found = greedy_report(Recompute(second_order), table, tokens, np.array([1]), np.array([5]))
    assert len(found.near_ties) == 4 and found.passed


def test_bfloat16_output_is_within_its_steps():
    target = DecoderTarget(TINY_CONFIG, dtype="bfloat16")
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), tiny_params())
    rows = len(PROMPT_LENGTHS)
    prompt = np.random.default_rng(1).integers(0, TINY_CONFIG.vocab_size, (rows, 4))
    generation = generate(
        target,
        params,
        jnp.asarray(prompt, jnp.int32),
        jax.random.key(0),
        drafter=NGram(3, prompt_lookup_min=1),
        sampling=Sampling.create(rows, temperature=0.0),
        max_new_tokens=40,
    )
    found = greedy_report(
        target,
        params,
        generation.tokens,
        generation.prompt_length,
        generation.length,
        dtype=jnp.bfloat16,
    )
    assert found.passed, str(found)


NOTHING_TO_SCORE = {
    "before it begins": ([4, 4], [2, 8], "row 0 has prompt_length 4 and length 2 of 8 tokens"),
    "beyond the array": ([4, 4], [8, 9], "row 1 has prompt_length 4 and length 9 of 8 tokens"),
    "no prompt": ([0, 4], [8, 8], "row 0 has prompt_length 0 .* give 1 <= prompt_length"),
    "no output": ([4, 4], [4, 4], "no row has any output to be scored"),
}


@pytest.mark.fast
@pytest.mark.parametrize(
    "prompt_length, length, sentence", NOTHING_TO_SCORE.values(), ids=list(NOTHING_TO_SCORE)
)
def test_rows_without_output_to_score_are_refused(prompt_length, length, sentence):
    tokens = np.zeros((2, 8), np.int32)
    with pytest.raises(ValueError, match=sentence):
        greedy_report(
            Recompute(second_order),
            jnp.zeros((3, 3, 3)),
            tokens,
            np.array(prompt_length),
            np.array(length),
        )


@pytest.mark.fast
def test_a_row_may_lack_output_that_another_has():
    tokens = np.zeros((2, 8), np.int32)
    lengths = np.array([4, 4]), np.array([4, 6])
    found = greedy_report(Recompute(second_order), jnp.zeros((3, 3, 3)), tokens, *lengths)
    assert found.passed and found.tokens == 2

"""Rows of one call: vanishing temperatures, seeds and fresh noise, whatever stands beside them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fixtures import rules_tried
from law.models import CHUNK, DEPTH, MAX_CONTEXT, PROMPT, VOCABULARY, table_model

from specjax import noise
from specjax.accept import RULES
from specjax.draft import ModelDrafter, NGram, NoDraft
from specjax.generation import generate
from specjax.recompute import Recompute
from specjax.sampling import Sampling
from specjax.testing.joint import output
from specjax.testing.pearson import pearson
from specjax.testing.tables import second_order

ROWS = 8
DRAFTED = 3
TEMPERATURES = (0, 1.0, 1e-6, 1.0, 1e-30, 1e-38, 1e-45, 0.0)


@pytest.fixture(scope="module")
def table():
    return table_model()


def drafter_of(vocabulary):
    return ModelDrafter(Recompute(second_order), DRAFTED, vocabulary, MAX_CONTEXT, CHUNK)


def generated(table, keys, rule, drafter=None, **options):
    rows = keys.shape[0]
    drafts = drafter is None
    return generate(
        table.target,
        table.params,
        jnp.broadcast_to(PROMPT, (rows, PROMPT.shape[0])),
        keys,
        drafter=drafter_of(VOCABULARY) if drafts else drafter,
        drafter_params=table.draft_params if drafts else None,
        rule=rule,
        max_new_tokens=DEPTH * 2,
        buffer=16,
        prefill_chunk=CHUNK,
        **options,
    )


def greedy_tokens(table, count):
    last = PROMPT.tolist()
    for _ in range(count):
        last.append(int(np.argmax(table.params[last[-2], last[-1]])))
    return last[-count:]


@pytest.mark.parametrize(
    "rule, drafter",
    [(name, None) for name in rules_tried()]
    + [("matching", NGram(DRAFTED, prompt_lookup_min=1)), ("coupled", NoDraft())],
)
def test_LAW7_vanishing_temperatures_are_greedy_beside_rows_that_sample(table, rule, drafter):
    temperatures = np.array(TEMPERATURES)
    if RULES[rule].greedy_only:
        temperatures[temperatures == 1] = 0
    keys = noise.row_keys(jax.random.key(1), ROWS)
    sampling = Sampling.create(ROWS, temperature=temperatures)
    generation = generated(table, keys, rule, drafter, sampling=sampling)
    tokens = np.asarray(output(generation, DEPTH * 2))
    assert np.all(tokens[temperatures < 1] == greedy_tokens(table, DEPTH * 2))
    assert np.all(np.asarray(generation.stats.accepted) >= 0)
    assert np.all((tokens >= 0) & (tokens < VOCABULARY))


UNIFORM = 16
LENGTH = 400


@pytest.fixture(scope="module")
def from_uniform():
    """Generations of four rows from a flat law over 16 tokens, 400 at most, for a key."""
    flat = jnp.zeros((UNIFORM, UNIFORM, UNIFORM))
    drafters = {"draft_model": (drafter_of(UNIFORM), flat), "ngram": (NGram(DRAFTED, 1), None)}

    def tokens(method, key, count):
        drafter, params = drafters[method]
        generation = generate(
            Recompute(second_order),
            flat,
            jnp.zeros((4, 1), jnp.int32),
            key,
            drafter=drafter,
            drafter_params=params,
            max_new_tokens=count,
            buffer=LENGTH + 1,
            prefill_chunk=CHUNK,
        )
        return np.asarray(output(generation, count))

    return tokens


@pytest.mark.parametrize("method", ["draft_model", "ngram"])
def test_R1_noise_is_fresh_in_every_round(from_uniform, method):
    tokens = from_uniform(method, jax.random.key(0), LENGTH)
    for period in range(1, 2 * DRAFTED + 3):
        repeated = np.mean(tokens[:, period:] == tokens[:, :-period])
        assert repeated == pytest.approx(1 / UNIFORM, abs=5 * 0.25 / np.sqrt(4 * LENGTH))
    counts = np.bincount(tokens.ravel(), minlength=UNIFORM)
    assert abs(pearson(counts, np.full(UNIFORM, 1 / UNIFORM)).z) < 5
    assert np.any(tokens != from_uniform(method, jax.random.key(1), LENGTH))


def test_E3_calls_and_rows_with_different_keys_differ(from_uniform):
    calls = [from_uniform("draft_model", jax.random.key(call), 8) for call in range(10)]
    assert len(np.unique(np.concatenate(calls), axis=0)) == 40

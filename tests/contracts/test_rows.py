"""A row's tokens and counts depend on the row alone."""

import jax
import numpy as np
import pytest
from fixtures import (
    METHODS,
    Prompts,
    allowed,
    assert_same,
    decode,
    method,
    row_keys,
    rules_tried,
    sampling_for,
)

MANY = 64
PLACES = (0, 1, 31, 62, 63)
# Every drafter with its own rule, and every rule, or one of each kind, with one drafter.
DECIDERS = [(name, method(name).default_rule) for name in METHODS]
DECIDERS += [("draft_model", rule) for rule in allowed("draft_model") if rule in rules_tried()]


@pytest.mark.parametrize(("name", "rule"), sorted(set(DECIDERS)))
def test_a_row_alone_equals_the_row_in_a_batch(name, rule):
    """At any place among 64 rows of other lengths, budgets, parameters and ends."""
    subject = method(name)
    rng = np.random.default_rng(1)
    prompts = Prompts.random(rng.integers(1, 24, MANY), subject.vocabulary, seed=2)
    keys, budget = row_keys(3, MANY), rng.integers(1, 40, MANY)
    sampling = sampling_for(
        rule,
        MANY,
        temperature=rng.choice([0.0, 0.5, 1.0, 2.0], MANY),
        top_k=rng.choice([0, 3, 8], MANY),
        top_p=rng.choice([1.0, 0.9], MANY),
    )
    together = decode(
        subject, rule, prompts, keys, sampling=sampling, budget=budget, eos_ids=(2, 9)
    )
    for row in PLACES:
        only = np.array([row])
        alone = decode(
            subject,
            rule,
            prompts.take(only),
            keys[only],
            sampling=jax.tree.map(lambda x, only=only: x[only], sampling),
            budget=budget[only],
            eos_ids=(2, 9),
        )
        assert_same(alone, jax.tree.map(lambda x, only=only: x[only], together))

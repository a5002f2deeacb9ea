"""Nothing but the shapes, the drafter and the rule makes a program be compiled again."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fixtures import (
    PAIRS,
    ROWS,
    Prompts,
    announcements,
    compilations,
    decode,
    method,
    row_keys,
    sampling_for,
)

from specjax.accept import RULES


def _calls(rule):
    """Calls that differ in everything a request may vary."""
    tempers = [0.0] if RULES[rule].greedy_only else [0.0, 0.3, 1.7]
    for seed, temperature in enumerate(tempers * 2):
        yield {
            "lengths": (3 + seed, 1, 20 - seed, 9),
            "seed": seed,
            "budget": np.array([1, 7 + seed, 30, 64]),
            "eos_ids": ((), (3,), (3, 4), (5, seed))[seed % 4],
            "sampling": sampling_for(
                rule,
                ROWS,
                temperature=temperature,
                top_k=[0, seed, 3, 100],
                top_p=[1.0, 0.9, 0.5, 0.1 + 0.1 * seed],
                min_p=0.01 * seed,
            ),
        }


@pytest.mark.parametrize(("name", "rule"), PAIRS)
def test_one_compilation_a_program(name, rule):
    subject = method(name)
    reweighted = _reweighted(subject)
    _run(subject, rule, next(_calls(rule)))
    with compilations() as names:
        for call in _calls(rule):
            _run(subject, rule, call)
        _run(reweighted, rule, next(_calls(rule)))
    assert names == []


def _run(subject, rule, call):
    prompts = Prompts.random(call["lengths"], subject.vocabulary, seed=call["seed"])
    return decode(
        subject,
        rule,
        prompts,
        row_keys(call["seed"], ROWS),
        sampling=call["sampling"],
        budget=call["budget"],
        eos_ids=call["eos_ids"],
    )


def _reweighted(subject):
    """The same method over other values of target and draft parameters."""

    def scale(params):
        return jax.tree.map(lambda leaf: leaf * jnp.asarray(1.25, leaf.dtype), params)

    return replace(
        subject, params=scale(subject.params), drafter_params=scale(subject.drafter_params)
    )


def test_a_new_shape_is_noticed():
    """The counter counts: without it the test above could not fail."""
    subject = method("none")
    prompts = Prompts.random((3, 4), subject.vocabulary, buffer=16)
    with compilations() as names, announcements() as programs:
        decode(subject, "greedy", prompts, row_keys(0, 2))
    assert "jit(_advance_program)" in names
    assert len(programs) == len(set(programs)) >= 2

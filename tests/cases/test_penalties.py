"""Cases Q1, Q3: penalties and the minimum length count every token of a block, node by node."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fixtures import (
    ROWS,
    VOCABULARY,
    Method,
    Prompts,
    Session,
    decode,
    markov,
    on_table,
    outputs,
    row_keys,
    rules_tried,
    scripted,
)

from specjax.accept import RULES
from specjax.history import History, Seen
from specjax.sampling import Sampling
from specjax.shaping import shape
from specjax.types import Context

EOS, SEVEN = 2, 7
LEAST = 6


def always(logits: dict[int, float], name: str = "none") -> Method:
    """A target with the same logits after every token, 0 where none is given."""
    table = np.zeros((VOCABULARY, VOCABULARY))
    table[:, list(logits)] = list(logits.values())
    subject = on_table(name)
    return subject.__class__(**{**vars(subject), "params": markov(table)})


def sampling(rule: str, **values) -> Sampling:
    """Greedy rows, and rows that sample from what is as good as certain."""
    temperature = 0.0 if RULES[rule].greedy_only else np.array([0.0, 1.0, 0.0, 1.0])
    return Sampling.create(ROWS, temperature=temperature, **values)


@pytest.mark.parametrize("rule", rules_tried())
def test_Q1_the_minimum_length_counts_tokens_and_not_rounds(rule):
    """The end is likeliest and a 7 comes next; all drafts are 7s, and all may stand."""
    prompts = Prompts.of([3], [7, 7], [1, 2, 3], [7])
    sevens = np.full(prompts.tokens.shape, SEVEN)
    subject = scripted(always({EOS: 60.0, SEVEN: 30.0}), prompts, right=4, proposal=sevens)
    given = sampling(rule, min_tokens=[LEAST, LEAST, 1, 0], ends=[EOS])
    result = decode(subject, rule, prompts, row_keys(0, ROWS), sampling=given, eos_ids=[EOS])
    said = [row[size:] for row, size in zip(outputs(result), prompts.length, strict=True)]
    assert said == [[SEVEN] * LEAST + [EOS]] * 2 + [[SEVEN, EOS], [EOS]]


def test_Q1_a_copying_drafter_waits_too():
    prompts = Prompts.of(*[[7, 7, 7, 7]] * ROWS)
    subject = always({EOS: 60.0, SEVEN: 30.0}, "ngram")
    given = sampling("matching", min_tokens=LEAST, ends=[EOS])
    result = decode(subject, "matching", prompts, row_keys(0, ROWS), sampling=given, eos_ids=[EOS])
    assert [row[4:] for row in outputs(result)] == [[SEVEN] * LEAST + [EOS]] * ROWS
    assert np.asarray(result.stats.accepted).sum() > 0


THREE, FIVE = 3, 5
LIKELY = {THREE: 2.0, FIVE: 1.2}


@pytest.mark.parametrize("rule", rules_tried())
def test_Q3_a_round_counts_the_drafts_above_each_node(rule):
    """After one 3 another is worth 1.5, then 1.0, less than the 5: the second draft is refused."""
    sharp = {token: 100 * logit for token, logit in LIKELY.items()}
    prompts = Prompts.of([1], [4, 4], [9], [0])
    proposal = np.full(prompts.tokens.shape, THREE)
    place = prompts.length[:, None] + 3
    np.put_along_axis(proposal, place, FIVE, axis=1)
    subject = scripted(always(sharp), prompts, right=3, drafted=3, proposal=proposal)
    given = sampling(rule, frequency_penalty=50.0)
    session = Session.begin(subject, rule, prompts, row_keys(0, ROWS), sampling=given)
    first = outputs(session.snapshot())
    after = outputs(session.advance().snapshot())
    for row, size in enumerate(prompts.length):
        assert first[row][size:] == [THREE]
        assert after[row][size:] == [THREE, THREE, FIVE]


def test_Q3_the_logits_of_each_row_of_the_block():
    given = Sampling.create(1, frequency_penalty=0.5)
    prompt = Context(jnp.array([[1, 3, 0, 0]]), jnp.array([1]))
    seen = Seen.of_prompts(given, prompt, VOCABULARY)
    seen = seen.after(given, jnp.array([[THREE]]), jnp.array([1]))
    path = jnp.array([[[-1, -1, -1], [3, -1, -1], [3, 3, -1], [3, 3, 5]]])
    history = History(Context(prompt.tokens, jnp.array([2])), prompt.length, seen, path)
    logits = jnp.zeros((1, 4, VOCABULARY)).at[:, :, THREE].set(2.0).at[:, :, FIVE].set(1.2)
    shaped = np.asarray(jax.jit(shape)(given, logits, history))[0]
    np.testing.assert_allclose(shaped[:3, THREE], [1.5, 1.0, 0.5], atol=1e-6)
    np.testing.assert_allclose(shaped[:, FIVE], [1.2, 1.2, 1.2, 0.7], atol=1e-6)

"""What changes logits before the temperature: every node against a reference for one vector."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fixtures import VOCABULARY

from specjax import tree
from specjax.grammar import Grammar
from specjax.history import History, Seen, drafted_paths
from specjax.sampling import Sampling, log_probs
from specjax.shaping import shape
from specjax.testing import reference
from specjax.types import Context, Draft

PARENTS = np.array([[-1, 0, 0, 1, 1, 4], [-1, 0, 1, 2, -1, -1], [-1, 0, 0, 0, 3, 4]])
ROWS, NODES = PARENTS.shape
ENDS = (2, 5)
PROMPT, LENGTH = np.array([1, 3, 2]), np.array([4, 3, 9])

SETTINGS = {
    "repetition": {"repetition_penalty": 1.7},
    "presence": {"presence_penalty": 0.8},
    "frequency": {"frequency_penalty": 0.6},
    "encouraged": {"repetition_penalty": 0.6, "presence_penalty": -1.0, "frequency_penalty": -0.3},
    "bias": {"logit_bias": {3: 2.5, 7: -np.inf, 0: -1.0}},
    "allowed": {"allowed_token_ids": (1, 2, 3, 8)},
    "bad words": {"bad_words": ((4,), (1, 3), (6, 1, 3), (0, 0))},
    "minimum": {"min_tokens": 3, "stop_token_ids": ENDS},
    "all": {
        "repetition_penalty": 1.3,
        "frequency_penalty": 0.4,
        "logit_bias": {1: 1.0, 9: -np.inf},
        "bad_words": ((1,), (2, 3)),
        "min_tokens": 4,
        "stop_token_ids": ENDS,
        "temperature": 0.7,
        "top_k": 6,
        "top_p": 0.9,
        "min_p": 0.02,
    },
}


def sampling_of(settings):
    """The reference's parameters as `Sampling` takes them."""
    own = dict(settings)
    bias = np.zeros(VOCABULARY)
    if "allowed_token_ids" in own:
        bias[:] = -np.inf
        bias[list(own.pop("allowed_token_ids"))] = 0
    for token, value in own.pop("logit_bias", {}).items():
        bias[token] += value
    words = own.pop("bad_words", ())
    longest = max(map(len, words), default=0)
    return Sampling.create(
        ROWS,
        bias=bias if bias.any() else None,
        bad_words=np.array([[-1] * (longest - len(word)) + [*word] for word in words])
        if words
        else None,
        ends=own.pop("stop_token_ids", None),
        **own,
    )


@pytest.fixture(scope="module")
def scene():
    """Random contexts over few tokens, so that words, repetitions and drafts meet."""
    rng = np.random.default_rng(5)
    context = rng.integers(0, 5, (ROWS, 12))
    drafted = rng.integers(0, 5, (ROWS, NODES))
    logits = 2 * rng.standard_normal((ROWS, NODES, VOCABULARY))
    return context, drafted, logits


def history_of(sampling, context, drafted):
    prompt = Context(jnp.asarray(context), jnp.asarray(PROMPT))
    seen = Seen.of_prompts(sampling, prompt, VOCABULARY)
    for place in range(context.shape[1]):
        emitted = jnp.asarray(np.take_along_axis(context, (PROMPT + place)[:, None] % 12, axis=1))
        seen = seen.after(sampling, emitted, jnp.asarray((place < LENGTH - PROMPT) * 1))
    draft = Draft(jnp.asarray(drafted), jnp.asarray(PARENTS))
    path = drafted_paths(draft, NODES - 1)
    return History(replace(prompt, length=jnp.asarray(LENGTH)), prompt.length, seen, path)


def own_tokens(drafted, row, node):
    path = []
    while node > 0:
        path.append(int(drafted[row, node]))
        node = PARENTS[row, node]
    return path[::-1]


@pytest.mark.parametrize("name", SETTINGS)
def test_every_node_is_shaped_by_its_own_past(scene, name):
    context, drafted, logits = scene
    sampling = sampling_of(SETTINGS[name])
    history = history_of(sampling, context, drafted) if sampling.looks_back else None
    shaped = shape(sampling, jnp.asarray(logits, jnp.float32), history)
    given = np.asarray(log_probs(sampling, shaped))
    for row in range(ROWS):
        for node in np.flatnonzero(np.asarray(tree.reachable(jnp.asarray(PARENTS)))[row]):
            output = [*context[row, PROMPT[row] : LENGTH[row]], *own_tokens(drafted, row, node)]
            expected = reference.log_probs(
                logits[row, node],
                prompt=context[row, : PROMPT[row]].tolist(),
                output=[int(token) for token in output],
                **SETTINGS[name],
            )
            np.testing.assert_allclose(given[row, node], expected, atol=2e-5)


def test_a_function_is_given_prompt_output_and_own_ancestors(scene):
    context, drafted, _ = scene

    def marks_last(logits, past):
        last = past.tokens[past.length - 1]
        inside = jnp.sum(past.tokens >= 0) == past.length
        return jnp.zeros_like(logits).at[last].set(jnp.where(inside, 1.0 + past.prompt_length, 0))

    sampling = Sampling.create(ROWS, processor=marks_last, processed=[True, False, True])
    history = history_of(sampling, context, drafted)
    logits = jnp.full((ROWS, NODES, VOCABULARY), 9.0)
    shaped = np.asarray(shape(sampling, logits, history))
    assert np.all(shaped[1] == 9.0)
    for row in (0, 2):
        for node in np.flatnonzero(PARENTS[row] >= 0).tolist():
            assert shaped[row, node, drafted[row, node]] == 1 + PROMPT[row]
            assert shaped[row, node].sum() == 1 + PROMPT[row]


def test_a_grammar_follows_each_nodes_path():
    """The automaton counts tokens: in state s only token s may come."""
    states = 6
    table = np.full((states, states), -1)
    table[np.arange(states - 1), np.arange(states - 1)] = np.arange(1, states)
    classes = jnp.minimum(jnp.arange(VOCABULARY), states - 1)
    grammar = Grammar(jnp.asarray(table), classes, jnp.int32(0))
    sampling = Sampling.create(1, grammar=grammar)
    prompt = Context(jnp.zeros((1, 4), jnp.int32), jnp.array([2]))
    seen = Seen.of_prompts(sampling, prompt, VOCABULARY)
    seen = seen.after(sampling, jnp.array([[0, 7]]), jnp.array([1]))
    draft = Draft(jnp.array([[0, 1, 1, 2]]), jnp.array([[-1, 0, 0, 1]]))
    history = History(
        Context(prompt.tokens, jnp.array([3])), prompt.length, seen, drafted_paths(draft, 3)
    )
    shaped = shape(sampling, jnp.zeros((1, 4, VOCABULARY)), history)
    possible = [np.flatnonzero(np.isfinite(node)).tolist() for node in np.asarray(shaped[0])]
    assert possible == [[1], [2], [2], [3]]


def test_bans_that_leave_nothing_are_dropped():
    sampling = Sampling.create(
        1,
        bias=np.where(np.arange(VOCABULARY) == 3, 0, -np.inf),
        bad_words=[[3]],
        min_tokens=5,
        ends=[3],
    )
    prompt = Context(jnp.zeros((1, 4), jnp.int32), jnp.array([2]))
    history = History(prompt, prompt.length, Seen(), jnp.full((1, 1, 1), -1))
    shaped = np.asarray(shape(sampling, jnp.zeros((1, 1, VOCABULARY)), history))
    assert np.flatnonzero(np.isfinite(shaped)).tolist() == [3]


def test_what_no_row_asks_for_is_not_traced():
    plain = jax.make_jaxpr(shape)(Sampling.create(2), jnp.zeros((2, 3, 8)), None)
    assert not plain.eqns

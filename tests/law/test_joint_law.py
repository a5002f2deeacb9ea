"""The law of what is generated, through the whole loop: every rule, every drafter, every row.

One Pearson statistic over the joint law of the first tokens of many rows. Of three drafts a round
most are rejected, so that second and third rounds lie inside.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fixtures import rules_tried
from law.models import CHUNK, DEPTH, PROMPT, VOCABULARY, table_model, transformer_model

from specjax import noise
from specjax.accept import RULES, default_rule
from specjax.draft import DRAFTERS, NoDraft
from specjax.generation import generate
from specjax.sampling import Sampling
from specjax.testing import reference
from specjax.testing.faulty_rules import (
    FaultyRule,
    fresh_noise,
    target_for_residual,
)
from specjax.testing.joint import (
    next_token_laws,
    output,
    sequence_counts,
    transition_counts,
)
from specjax.testing.pearson import SCORE_LIMIT, pearson

pytestmark = pytest.mark.slow

DRAFTED = 3
BUFFER = 16
FOUND = 20

# Options of `build`, and whether the drafter needs a target with layers.
DRAFTER_OPTIONS = {
    "none": ({}, False),
    "ngram": ({"num_speculative_tokens": DRAFTED, "prompt_lookup_min": 1}, False),
    "draft_model": ({"num_speculative_tokens": DRAFTED, "model": "draft"}, False),
    "early_exit": ({"num_speculative_tokens": DRAFTED, "exit_layer": 1}, True),
}
LAWS = [name for name, rule in RULES.items() if hasattr(rule, "stop_law")]
SAMPLING_RULES = [name for name, rule in RULES.items() if rule.lossless and not rule.greedy_only]


@pytest.fixture(scope="module")
def rows(scale):
    return scale(40_000, 400_000)


@pytest.fixture(scope="module")
def table():
    return table_model()


@pytest.fixture(scope="module")
def transformer():
    return transformer_model()


def generated(model, rows, drafter, rule, *, drafter_params=None, sampling=None, budget=DEPTH):
    """``rows`` generations from the prompt, each with a key of its own."""
    return generate(
        model.target,
        model.params,
        jnp.broadcast_to(PROMPT, (rows, PROMPT.shape[0])),
        jax.random.key(2024),
        drafter=drafter,
        drafter_params=drafter_params,
        rule=rule,
        sampling=sampling,
        max_new_tokens=budget,
        buffer=BUFFER if budget == DEPTH else PROMPT.shape[0] + budget,
        prefill_chunk=CHUNK,
    )


def score(model, generation):
    counts = sequence_counts(output(generation, DEPTH), VOCABULARY)
    return pearson(counts, model.law)


def assert_speculated(generation):
    """Drafts were accepted and rejected, and some rows needed a second round."""
    drafted = np.asarray(generation.stats.drafted).sum()
    accepted = np.asarray(generation.stats.accepted).sum()
    assert 0.05 < accepted / drafted < 0.95
    assert np.mean(np.asarray(generation.stats.rounds) >= 2) > 0.1


def recipe(name):
    if name not in DRAFTER_OPTIONS:
        pytest.fail(f"drafter {name!r} has no entry in DRAFTER_OPTIONS: say how to build it here")
    return DRAFTER_OPTIONS[name]


def draft_model(model):
    return model.build("draft_model", DRAFTER_OPTIONS["draft_model"][0])


@pytest.mark.parametrize("name", SAMPLING_RULES)
def test_every_rule_keeps_the_joint_law(table, rows, name):
    distances = table.distances(table.draft, table.draft_params)
    assert 0.2 < distances.min() and distances.max() < 0.5
    drafter, params = draft_model(table)
    generation = generated(table, rows, drafter, name, drafter_params=params)
    assert_speculated(generation)
    result = score(table, generation)
    assert abs(result.z) < SCORE_LIMIT, result
    assert result.detectable_tv() < 0.04


@pytest.mark.parametrize("name", DRAFTERS)
def test_every_drafter_keeps_the_joint_law(table, transformer, rows, name):
    options, needs_layers = recipe(name)
    model = transformer if needs_layers else table
    drafter, params = model.build(name, options)
    if drafter.has_law:
        distances = model.distances(drafter.model, params)
        assert 0.2 < distances.min() and distances.max() < 0.5
    rule = default_rule(drafter.has_law)
    generation = generated(model, rows, drafter, rule, drafter_params=params)
    if drafter.num_nodes > 1:
        assert_speculated(generation)
    result = score(model, generation)
    assert abs(result.z) < SCORE_LIMIT, result


@pytest.mark.parametrize("name", rules_tried(sampling=True))
def test_a_faulty_rule_is_found(table, rows, name):
    drafter, params = draft_model(table)
    rule = RULES[name]
    wrong = FaultyRule(rule, follows=target_for_residual)
    wrong = wrong if name in LAWS else FaultyRule(rule, decides=fresh_noise)
    generation = generated(table, rows, drafter, wrong, drafter_params=params)
    assert score(table, generation).z > FOUND


@pytest.mark.parametrize("name", [name for name, rule in RULES.items() if rule.greedy_only])
def test_greedy_rules_emit_the_most_likely_tokens(table, rows, name):
    drafter, params = draft_model(table)
    greedy = Sampling.create(rows, temperature=0.0)
    generation = generated(table, rows, drafter, name, drafter_params=params, sampling=greedy)
    last, expected = PROMPT.tolist(), []
    for _ in range(DEPTH):
        expected.append(int(np.argmax(table.params[last[-2], last[-1]])))
        last.append(expected[-1])
    assert np.all(np.asarray(output(generation, DEPTH)) == expected)
    assert np.all(np.asarray(generation.stats.accepted) <= np.asarray(generation.stats.drafted))


@pytest.mark.parametrize("name", [name for name in SAMPLING_RULES if name not in LAWS])
def test_rules_that_are_no_law_emit_plain_decodings_own_tokens(table, rows, name):
    drafter, params = draft_model(table)
    speculative = generated(table, rows, drafter, name, drafter_params=params)
    plain = generated(table, rows, NoDraft(), "matching")
    np.testing.assert_array_equal(output(speculative, DEPTH), output(plain, DEPTH))
    assert_speculated(speculative)


SETTINGS = (
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 2},
    {"temperature": 1.3, "top_p": 0.8},
    {"temperature": 0.9, "min_p": 0.3},
)


def processed_law(model, settings):
    """The joint law under sampling parameters, by the reference transforms."""
    log_p = np.asarray(next_token_laws(model.log_p, DEPTH), np.float64)
    laws = np.apply_along_axis(reference.log_probs, -1, log_p, **settings)
    tokens = np.asarray(model.sequences)[:, -DEPTH:, None]
    law = np.exp(np.take_along_axis(laws, tokens, axis=-1).sum((1, 2)))
    return law / law.sum()


@pytest.mark.parametrize("name", rules_tried(sampling=True))
def test_rows_with_different_parameters_each_keep_their_law(table, rows, name):
    """Greedy, plain and truncated rows side by side in one call."""
    every = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
    each_row = [every | SETTINGS[row % len(SETTINGS)] for row in range(rows)]
    columns = {key: np.array([row[key] for row in each_row]) for key in each_row[0]}
    drafter, params = draft_model(table)
    sampling = Sampling.create(rows, **columns)
    generation = generated(table, rows, drafter, name, drafter_params=params, sampling=sampling)
    tokens = output(generation, DEPTH)
    for first, settings in enumerate(SETTINGS):
        counts = sequence_counts(tokens[first :: len(SETTINGS)], VOCABULARY)
        result = pearson(counts, processed_law(table, settings))
        assert abs(result.z) < SCORE_LIMIT, (settings, result)


TABLE_PAIRS = [(rule, "draft_model") for rule in rules_tried(sampling=True)] + [
    (None, name) for name in DRAFTERS if name != "draft_model" and not recipe(name)[1]
]


@pytest.mark.parametrize("rule, name", TABLE_PAIRS)
def test_late_rounds_keep_the_law_of_transitions(table, scale, rule, name):
    """64 tokens a row: what the first four tokens don't show yet."""
    length = 64
    drafter, params = table.build(name, DRAFTER_OPTIONS[name][0])
    rule = default_rule(drafter.has_law) if rule is None else rule
    generation = generated(
        table, scale(2000, 20_000), drafter, rule, drafter_params=params, budget=length
    )
    law = np.exp(np.asarray(table.params, np.float64)).reshape(-1, VOCABULARY)
    late = output(generation, length)[:, DEPTH:]
    result = pearson(transition_counts(late, VOCABULARY, order=2), law)
    assert result.degrees == VOCABULARY**2 * (VOCABULARY - 1)
    assert abs(result.z) < SCORE_LIMIT, result


def test_rows_are_independent_of_their_neighbours(table, rows):
    """Every second key twice gives the same row twice, wherever it stands."""
    drafter, params = draft_model(table)
    keys = noise.row_keys(jax.random.key(7), rows)
    shuffled = np.random.default_rng(0).permutation(rows)

    def tokens(keys):
        generation = generate(
            table.target,
            table.params,
            jnp.broadcast_to(PROMPT, (rows, PROMPT.shape[0])),
            keys,
            drafter=drafter,
            drafter_params=params,
            rule="rejection",
            max_new_tokens=DEPTH,
            buffer=BUFFER,
            prefill_chunk=CHUNK,
        )
        return np.asarray(output(generation, DEPTH))

    np.testing.assert_array_equal(tokens(keys)[shuffled], tokens(keys[shuffled]))

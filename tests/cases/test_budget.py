"""Cases K1, K3, K5: as many tokens as asked for, the same for any draft length, and settings."""

import inspect
from dataclasses import replace

import numpy as np
import pytest
from fixtures import (
    DRAFT_LENGTHS,
    FULL_SCALE,
    ROWS,
    SPECULATING,
    TABLE,
    Prompts,
    alphabet_llm,
    counting,
    decode,
    on_tiny,
    oracle_decode,
    outputs,
    row_keys,
    rules_tried,
    scripted,
    table_host,
    tiny_host,
    trimmed,
)

from specjax import SamplingParams
from specjax.accept import RULES
from specjax.draft import DRAFTERS
from specjax.draft.host import Loaded
from specjax.sampling import Sampling
from specjax.speculative_config import ALIASES, SpeculativeConfig
from specjax.types import LENGTH as OUT_OF_ROOM

GREEDY = Sampling.create(ROWS, temperature=0.0)


@pytest.mark.parametrize("rule", rules_tried())
@pytest.mark.parametrize("budgets", [(1, 2, 3, 4), (5, 6, 7, 5)])
def test_K1_never_more_than_the_budget(budgets, rule):
    """K = 4, every draft accepted, rows with different budgets."""
    prompts = Prompts.of([3], [0, 1], [9, 10, 11], [14])
    result = decode(
        scripted(counting(), prompts, right=4),
        rule,
        prompts,
        row_keys(0, ROWS),
        sampling=GREEDY,
        budget=np.array(budgets),
    )
    expected = oracle_decode(counting().logits, prompts, 8)
    assert outputs(result) == trimmed(expected, prompts.length + budgets)
    assert (np.asarray(result.finish) == OUT_OF_ROOM).all()
    in_rounds = np.array(budgets) - 1
    np.testing.assert_array_equal(result.stats.emitted, in_rounds)
    np.testing.assert_array_equal(result.stats.rounds, -(-in_rounds // 5))
    np.testing.assert_array_equal(result.stats.truncated, -in_rounds % 5)


@pytest.mark.parametrize("budget", [0, -3])
def test_K1_a_budget_below_one_is_refused(budget):
    prompts = Prompts.of(*[[3]] * ROWS)
    with pytest.raises(ValueError, match=f"max_new_tokens is {budget}: it must be at least 1"):
        decode(counting(), "greedy", prompts, row_keys(0, ROWS), budget=budget)


@pytest.mark.parametrize("draft_length", [*DRAFT_LENGTHS, 20] if FULL_SCALE else [20])
@pytest.mark.parametrize("name", SPECULATING)
def test_K3_one_output_for_every_draft_length(name, draft_length):
    """Draft lengths beyond the budget of 12 among them."""
    subject = on_tiny(name, num_speculative_tokens=draft_length)
    prompts = Prompts.random((5, 9, 2, 7), subject.vocabulary, seed=3)
    result = decode(subject, "greedy", prompts, row_keys(0, ROWS), sampling=GREEDY, budget=12)
    expected = oracle_decode(subject.logits, prompts, 12)
    assert outputs(result) == trimmed(expected, prompts.length + 12)


# Values that no default has; a newcomer's options go here.
UNUSUAL = {
    "num_speculative_tokens": 7,
    "prompt_lookup_min": 3,
    "prompt_lookup_max": 6,
    "exit_layer": 2,
    "model": "a draft model",
}


EVERY_OPTION = [
    (name, option)
    for name, builder in DRAFTERS.items()
    for option in list(inspect.signature(builder).parameters)[1:]
]


def _config(name):
    takes = list(inspect.signature(DRAFTERS[name]).parameters)[1:]
    return {"method": name} | {option: UNUSUAL[option] for option in takes}


def _build(config):
    """A drafter and its parameters; each draft model has a name and weights of its own."""
    loads = replace(table_host(), load=lambda name: Loaded(TABLE, len(name), 10_000))
    built, _ = SpeculativeConfig.parse(config).build(
        tiny_host() if config["method"] == "early_exit" else loads
    )
    return built.drafter, built.params if config["method"] == "draft_model" else None


@pytest.mark.parametrize(("name", "option"), EVERY_OPTION)
def test_K5_every_option_changes_what_is_built(name, option):
    """Left out, or put to another value, it gives another drafter: none is dropped."""
    given = _build(_config(name))
    other = {key: value for key, value in _config(name).items() if key != option}
    other |= {"model": {"model": "another"}, "exit_layer": {"exit_layer": 1}}.get(option, {})
    assert _build(other) != given
    if option in ("num_speculative_tokens", "prompt_lookup_min", "prompt_lookup_max"):
        assert getattr(given[0], option) == UNUSUAL[option]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("key", ["rule", "rejection_sample_method"])
def test_K5_the_rule_arrives(key, rule):
    config = SpeculativeConfig.parse({"method": "ngram", key: rule})
    assert config.build(table_host())[1] == RULES[rule]


@pytest.mark.parametrize("alias", ALIASES)
def test_K5_every_alias_sets_what_it_stands_for(alias):
    option, implied = ALIASES[alias]
    if option == "rule":
        assert SpeculativeConfig.parse({"method": "ngram", alias: "coupled"}).rule == "coupled"
        return
    name = implied or "ngram"
    config = _config(name)
    value = config.pop(option)
    assert SpeculativeConfig.parse(config | {alias: value}).options[option] == value


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ({"method": "ngram", "num_speculative_token": 3}, "did you mean 'num_speculative_tokens'"),
        ({"method": "ngrams"}, "did you mean 'ngram'"),
        ({"method": "ngram", "rule": "matchin"}, "did you mean 'matching'"),
        ({"method": "ngram", "exit_layer": 3}, "'exit_layer' belongs to method 'early_exit'"),
        ({"method": "draft_model"}, "method 'draft_model' needs 'model'"),
        ({"method": "ngram", "num_speculative_tokens": 0}, "must be at least 1"),
        ({"method": "ngram", "num_speculative_tokens": 64}, "more than the 64 tokens"),
    ],
)
def test_K5_a_misspelt_or_impossible_setting_is_an_error(config, sentence):
    with pytest.raises(ValueError, match=sentence):
        alphabet_llm(speculative_config=config)


def test_K5_the_metrics_tell_whether_anything_is_speculated():
    params = SamplingParams(temperature=0.0, max_tokens=20)
    counts = [
        alphabet_llm(speculative_config=config).generate(["abcab"], params)[0].outputs[0].metrics
        for config in ({"method": "ngram", "num_speculative_tokens": 3}, None)
    ]
    assert len(counts[0].counts.drafted) == 3
    assert counts[0].counts.drafted.sum() > 0
    assert counts[1].counts.drafted.sum() == 0
    assert counts[1].counts.rounds == 19

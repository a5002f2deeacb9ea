"""The report of acceptance: against exact laws and closed forms, and never above the bound."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from llm.engines import CONFIG, TARGET, VOCABULARY, tiny_model

from specjax.accept import RULES
from specjax.testing.acceptance import (
    DRAFTED,
    FLAT,
    PEAKED,
    Laws,
    acceptance_table,
    chain_acceptance,
    sibling_acceptance,
    synthetic_laws,
)
from specjax.testing.exact import drawn_drafts, num_contexts, round_law
from specjax.testing.text_laws import text_acceptance, text_laws
from specjax.testing.transport import chain_optimum, coupled_acceptance, optimum
from specjax.types import AcceptResult

SAMPLING = {name for name, rule in RULES.items() if rule.lossless and not rule.greedy_only}
WIDE = 5


@pytest.fixture(scope="module")
def siblings():
    """Acceptance by rule and number of siblings, on laws of 12 tokens."""
    rows = sibling_acceptance(synthetic_laws(FLAT, vocabulary=12, pairs=24), drafts=64)
    return {(row.rule, row.drafted): row for row in rows}


@pytest.fixture(scope="module")
def chains():
    laws = synthetic_laws(FLAT, vocabulary=4, contexts=num_contexts(4, 3), pairs=24)
    rows = chain_acceptance(laws, drafted=(1, 3), drafts=64)
    return laws, {(row.rule, row.drafted): row for row in rows}


def test_every_lossless_rule_is_reported_and_none_is_above_the_bound(siblings):
    assert {name for name, _ in siblings} == SAMPLING
    for (name, k), row in siblings.items():
        assert k == 1 or RULES[name].trees
        assert 0 < row.accepted < 1
        assert row.share < 1 + WIDE * row.share_error + 1e-5, row
        assert row.error < 0.05 and row.share_error < 0.05, row
    assert {k for name, k in siblings if name == "coupled"} == set(DRAFTED)


def test_rules_that_are_optimal_at_a_node_reach_the_bound(siblings):
    optimal = {("matching", k) for k in DRAFTED}
    optimal |= {
        (name, 1) for name, rule in RULES.items() if rule.draws == "sample" and name in SAMPLING
    }
    for key in optimal:
        row = siblings[key]
        assert abs(row.share - 1) < WIDE * row.share_error + 1e-5, row


def test_coupled_drafts_are_accepted_as_computed(siblings):
    laws = synthetic_laws(FLAT, vocabulary=12, pairs=24)
    for k in DRAFTED:
        pairs = zip(np.exp(laws.log_p), np.exp(laws.log_q), strict=True)
        exact = np.mean([coupled_acceptance(*pair, k) for pair in pairs])
        chance = 0.5 / np.sqrt(24 * 64)
        assert siblings["coupled", k].accepted == pytest.approx(exact, abs=WIDE * chance)


def test_siblings_are_accepted_as_enumerated():
    """Two of four tokens: every draft, from the exact law of the round."""
    laws = synthetic_laws(PEAKED, vocabulary=4, pairs=4)
    name = "recursive"
    (row,) = sibling_acceptance(laws, {name: RULES[name]}, drafted=(2,), drafts=1000)

    @jax.jit
    def exact(log_p, log_q):
        contexts = num_contexts(4, 2)
        log_p, log_q = (jnp.broadcast_to(law, (contexts, 4)) for law in (log_p, log_q))
        draft, log_weight = drawn_drafts(log_q, jnp.array([-1, 0, 0]))
        return round_law(RULES[name], draft, log_weight, log_p).mean_accepted

    expected = np.mean([exact(*pair) for pair in zip(laws.log_p, laws.log_q, strict=True)])
    assert row.accepted == pytest.approx(expected, abs=WIDE * 0.5 / np.sqrt(4 * 1000))


@pytest.mark.usefixtures("x64")
def test_block_verification_is_optimal_on_chains_and_token_by_token_is_not():
    drafted, vocabulary = 3, 3
    contexts = num_contexts(vocabulary, drafted + 1)
    laws = synthetic_laws(FLAT, vocabulary=vocabulary, contexts=contexts, pairs=6)

    @jax.jit
    def exact(log_p, log_q):
        draft, log_weight = drawn_drafts(log_q, jnp.arange(drafted + 1) - 1)
        return [
            round_law(RULES[name], draft, log_weight, log_p).mean_accepted
            for name in ("block", "rejection")
        ]

    for log_p, log_q in zip(laws.log_p, laws.log_q, strict=True):
        log_p, log_q = (jax.nn.log_softmax(jnp.asarray(law, jnp.float64)) for law in (log_p, log_q))
        best = chain_optimum(np.exp(log_p), np.exp(log_q), drafted)
        block, rejection = exact(log_p, log_q)
        assert block == pytest.approx(best, abs=1e-9)
        assert rejection < best - 1e-3


def test_chains_reach_the_bound_under_block_verification(chains):
    _, rows = chains
    assert {name for name, _ in rows} == {
        name for name in SAMPLING if RULES[name].draws in ("sample", "coupled")
    }
    for name, row in rows.items():
        assert row.share < 1 + WIDE * row.share_error + 1e-5, name
    block = rows["block", 3]
    assert abs(block.share - 1) < WIDE * block.share_error
    assert rows["rejection", 3].share < 1 - WIDE * rows["rejection", 3].share_error


@dataclass(frozen=True)
class Credulous:
    """Accepts whatever was drafted first, which no lossless rule can."""

    draws: str = "sample"
    lossless: bool = True
    trees: bool = True
    greedy_only: bool = False

    def __call__(self, draft, log_p, noise):
        one = jnp.ones((), jnp.int32)
        path = jnp.minimum(jnp.arange(draft.tokens.shape[0]), 1)
        return AcceptResult(path=path, num_accepted=one, next_token=one)


def test_a_rule_that_accepts_too_much_stands_above_the_bound():
    laws = synthetic_laws(FLAT, vocabulary=12, pairs=24)
    (row,) = sibling_acceptance(laws, {"credulous": Credulous()}, drafted=(2,), drafts=16)
    assert row.share > 1 + WIDE * row.share_error


def test_the_table_has_a_line_for_each_rule_and_each_bound(siblings, chains):
    text = acceptance_table([*siblings.values(), *chains[1].values()])
    for name in SAMPLING:
        assert f" {name} " in text
    for k in DRAFTED:
        assert f"{siblings['coupled', k].accepted:.3f} ± " in text
        assert f"{siblings['matching', k].optimum:.3f}" in text
    assert text.count("best possible") >= 3
    assert len({line.count("|") for line in text.splitlines()}) == 1


def test_laws_along_text_are_those_that_the_model_and_its_first_layers_draw_from():
    model = tiny_model()
    prompts = [[5, 6, 7], [8, 9, 10, 11]]
    log_p, log_q = text_laws(model, 1, prompts, temperature=0.7, positions=5)
    assert log_p.shape == log_q.shape == (5, VOCABULARY)
    np.testing.assert_allclose(np.exp(log_p).sum(-1), 1, rtol=1e-5)
    np.testing.assert_allclose(np.exp(log_q).sum(-1), 1, rtol=1e-5)
    tokens = jnp.asarray([prompts[0]])
    first = TARGET(model.params, tokens, None, TARGET.init_cache(1, 8)).logits[0, -1]
    np.testing.assert_allclose(log_p[0], jax.nn.log_softmax(first / 0.7), atol=1e-4)
    early = TARGET.first_layers(1)
    first = early(model.params, tokens, None, early.init_cache(1, 8)).logits[0, -1]
    np.testing.assert_allclose(log_q[0], jax.nn.log_softmax(first / 0.7), atol=1e-4)
    (row,) = sibling_acceptance(
        Laws("text", log_p, log_q), {"rejection": RULES["rejection"]}, drafted=(1,), drafts=64
    )
    bound = np.mean([optimum(_law(p), _law(q), 1) for p, q in zip(log_p, log_q, strict=True)])
    assert row.optimum == pytest.approx(bound, abs=1e-3)


def test_text_is_reported_at_each_temperature():
    rules = {name: RULES[name] for name in ("rejection", "matching")}
    rows = text_acceptance(
        tiny_model(), 1, [[5, 6, 7]], rules=rules, temperatures=(1.0, 0.5), positions=2
    )
    assert {(row.laws, row.rule, row.drafted) for row in rows} == {
        (f"exit after 1 layers, temperature {temperature}", name, k)
        for temperature in ("1", "0.5")
        for name in rules
        for k in (DRAFTED if RULES[name].trees else (1,))
    }


def _law(log_p):
    law = np.exp(np.asarray(log_p, np.float64))
    return law / law.sum()


def test_text_without_laws_is_refused():
    model = tiny_model()
    with pytest.raises(ValueError, match="temperature 0.0"):
        text_laws(model, 1, temperature=0.0)
    with pytest.raises(ValueError, match="early exit"):
        text_laws(model, CONFIG.num_layers)
    with pytest.raises(ValueError, match="positions"):
        text_laws(model, 1, positions=0)

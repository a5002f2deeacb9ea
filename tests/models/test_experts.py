"""Routed experts: four ways to one sum, chosen by the number of tokens and the platform."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.models import experts
from specjax.models.experts import Biases, Experts, Routing, gated_by

COUNT, CHOSEN, WIDTH, INNER = 6, 2, 12, 8
GATE = gated_by(jax.nn.silu)
WAYS = {
    "gathered": experts.gathered,
    "sliced": experts.sliced,
    "one_by_one": experts.one_by_one,
    "grouped": experts.grouped,
}


def _weights(seed=0):
    rng = np.random.default_rng(seed)
    shapes = ((WIDTH, COUNT), (COUNT, WIDTH, 2, INNER), (COUNT, INNER, WIDTH))
    return [rng.normal(size=shape).astype(np.float32) for shape in shapes]


def _tokens(count, seed=1):
    return np.random.default_rng(seed).normal(size=(1, count, WIDTH)).astype(np.float32)


def _biases(seed=2):
    rng = np.random.default_rng(seed)
    shapes = ((COUNT,), (1, COUNT, 2, INNER), (1, COUNT, WIDTH))
    return Biases(*(jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes))


def _oracle(tokens, router, gate_up, down, renormalise):
    """Token by token, expert by expert, in float64."""
    out = np.zeros(tokens.shape, np.float64)
    for place, x in enumerate(np.asarray(tokens[0], np.float64)):
        share = np.exp(x @ router)
        share /= share.sum()
        best = np.argsort(-share, kind="stable")[:CHOSEN]
        for expert in best:
            gate, up = x @ gate_up[expert, :, 0], x @ gate_up[expert, :, 1]
            weight = share[expert] / (share[best].sum() if renormalise else 1.0)
            out[0, place] += weight * ((gate / (1 + np.exp(-gate)) * up) @ down[expert])
    return out


@pytest.mark.parametrize("renormalise", [True, False])
@pytest.mark.parametrize("count", [1, 3, 9])
def test_the_sum_equals_the_oracles(count, renormalise):
    routing, tokens, weights = Routing(COUNT, CHOSEN, renormalise), _tokens(count), _weights()
    router, *stacks = weights[0], *(np.stack([weight * np.nan, weight]) for weight in weights[1:])
    mixed = jax.jit(experts.mix_experts, static_argnums=(3, 4))(
        jnp.asarray(tokens), router, Experts(*stacks, 1), routing, jax.nn.silu
    )
    expected = _oracle(tokens, *weights, renormalise)
    np.testing.assert_allclose(mixed, expected, atol=1e-5)


@pytest.mark.parametrize("way", WAYS)
def test_each_way_gives_the_same_sum(way):
    """An expert that no token takes and one that all take among them."""
    router, gate_up, down = _weights()
    router[:, 4], router[:, 1] = 0.0, 0.0
    tokens = _tokens(7)
    tokens[..., 0] = 5.0
    router[0, 4], router[0, 1] = -20.0, 20.0
    routing = Routing(COUNT, CHOSEN)
    share, chosen = experts.route(jnp.asarray(tokens), jnp.asarray(router), routing)
    assert (chosen == 1).any(axis=1).all() and not (chosen == 4).any()
    stacks = jnp.asarray(gate_up[None]), jnp.asarray(down[None])
    args = (jnp.asarray(tokens[0]), share, chosen, Experts(*stacks, 0))
    mixed = jax.jit(WAYS[way], static_argnums=4)(*args, GATE)
    np.testing.assert_allclose(mixed, _oracle(tokens, router, gate_up, down, True)[0], atol=2e-4)


@pytest.mark.parametrize("way", WAYS)
def test_each_way_adds_biases_and_bounds_what_it_multiplies(way):
    router, gate_up, down = _weights()
    tokens, biases, limit = jnp.asarray(_tokens(5)), _biases(), 0.5
    routing = Routing(COUNT, CHOSEN, biased=True, limit=limit)

    @jax.jit
    def mix(tokens, router, gate_up, down, biases):
        share, chosen = experts.route(tokens, router, routing, biases.router)
        stacks = Experts(gate_up[None], down[None], 0, biases)
        return WAYS[way](tokens[0], share, chosen, stacks, gated_by(jax.nn.silu, limit))

    mixed = mix(tokens, router, gate_up, down, biases)
    for place, x in enumerate(np.asarray(tokens[0], np.float64)):
        logits, expected = x @ router + np.asarray(biases.router), 0.0
        best = np.argsort(-logits)[:CHOSEN]
        for expert, part in zip(best, np.exp(logits[best]), strict=True):
            gate, up = np.einsum("d,dpf->pf", x, gate_up[expert]) + biases.gate_up[0, expert]
            gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
            out = (up + 1) * gate / (1 + np.exp(-gate)) @ down[expert] + biases.down[0, expert]
            expected += out * part / np.exp(logits[best]).sum()
        np.testing.assert_allclose(mixed[place], expected, atol=2e-5)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ((4, 5), "5 experts cannot be taken out of 4"),
        ((4, 0), "chosen: 0 is no whole number"),
        ((-4, -5), "count: -4 is no whole number"),
    ],
)
def test_impossible_choices_are_refused(settings, said):
    with pytest.raises(ValueError, match=said):
        Routing(*settings)


def test_equally_likely_experts_are_taken_in_order():
    share, chosen = experts.route(
        jnp.ones((1, 2, WIDTH)), jnp.zeros((WIDTH, COUNT)), Routing(COUNT, CHOSEN)
    )
    np.testing.assert_array_equal(chosen, [[0, 1], [0, 1]])
    np.testing.assert_allclose(share, 0.5)


@pytest.mark.parametrize("way", ["gathered", "sliced", "one_by_one"])
def test_experts_that_nobody_chose_are_not_read(way):
    """Their weights may be anything."""
    router, gate_up, down = _weights()
    tokens, routing = jnp.asarray(_tokens(2)), Routing(COUNT, CHOSEN)
    share, chosen = experts.route(tokens, jnp.asarray(router), routing)
    others = np.setdiff1d(np.arange(COUNT), np.asarray(chosen))
    assert others.size
    gate_up[others], down[others] = np.nan, np.nan
    stacks = jnp.asarray(gate_up[None]), jnp.asarray(down[None])
    mixed = WAYS[way](tokens[0], share, chosen, Experts(*stacks, 0), GATE)
    assert np.isfinite(mixed).all()


@pytest.mark.parametrize("way", WAYS)
def test_another_tokens_expert_may_overflow(way):
    tokens = jnp.asarray([[1.0] * WIDTH, [1e30] * WIDTH])
    gate_up = jnp.asarray([np.ones((WIDTH, 2, INNER)), np.full((WIDTH, 2, INNER), 1e-30)])
    stacks = gate_up[None], jnp.ones((1, 2, INNER, WIDTH))
    share, chosen = jnp.ones((2, 1)), jnp.asarray([[0], [1]])
    mixed = WAYS[way](tokens, share, chosen, Experts(*stacks, 0), GATE)
    assert np.isfinite(mixed).all()

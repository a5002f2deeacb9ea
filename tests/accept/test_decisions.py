"""What a rule decides, given its noise: draws from its law, or plain decoding's own tokens."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from accept.instances import law_pairs, padded_chains, random_trees
from accept.registry import LAW_FORM, WALKS

from specjax import noise, tree
from specjax.accept.law import sample
from specjax.noise import Noise
from specjax.testing.pearson import pearson
from specjax.types import Draft

pytestmark = pytest.mark.fast

ROOT_POSITION = 11


@pytest.mark.parametrize("name", LAW_FORM)
def test_the_sampler_draws_the_stop_and_the_next_token_from_the_law(name):
    rule, vocabulary, nodes, draws = LAW_FORM[name], 4, 4, 4000
    log_p, log_q = (
        jnp.asarray(law, jnp.float32) for law in law_pairs(1, nodes, vocabulary, repeats=2)
    )
    parents = padded_chains(0, log_p.shape[0], nodes)
    tokens = jax.random.randint(jax.random.key(2), parents.shape, 0, vocabulary)
    keys = noise.row_keys(jax.random.key(3), draws)

    def one(log_p, log_q, parents, tokens):
        draft = Draft(tokens, parents, log_q)
        log_stop, aux = rule.stop_law(draft, log_p)
        residual = jax.vmap(lambda node: rule.residual(draft, log_p, aux, node))(jnp.arange(nodes))
        law = jnp.exp(log_stop)[:, None] * jax.nn.softmax(residual, axis=-1)
        law = jnp.where(log_stop[:, None] > -jnp.inf, law, 0.0)
        drawn = jax.vmap(
            lambda key: sample(rule, draft, log_p, Noise(key, jnp.int32(ROOT_POSITION)))
        )(keys)
        cell = drawn.path[:, -1] * vocabulary + drawn.next_token
        agrees = jnp.all(drawn.num_accepted == tree.depth(parents)[drawn.path[:, -1]])
        return law.reshape(-1), jnp.bincount(cell, length=nodes * vocabulary), agrees

    law, counts, agrees = jax.jit(jax.vmap(one))(log_p, log_q, parents, tokens)
    assert np.all(agrees)
    assert np.sum(np.asarray(law), axis=1) == pytest.approx(1, abs=1e-5)
    # Float32 leaves some 1e-7 of mass where float64 has none.
    law = np.where(np.asarray(law, np.float64) > 1e-6, law, 0.0)
    assert abs(pearson(np.asarray(counts), law).z) < 5


def plain_tokens(log_p, perturbation, parents, tokens):
    """One token at a time: the token after each node reached, until no child carries it."""
    node, emitted, path = 0, [], [0]
    while True:
        wanted = int(np.argmax(log_p[node] + perturbation[len(emitted)]))
        emitted.append(wanted)
        children = [n for n in range(len(parents)) if parents[n] == node and tokens[n] == wanted]
        if not children:
            return emitted, path
        node = children[0]
        path.append(node)


@pytest.mark.parametrize("name", WALKS)
def test_a_walk_emits_what_plain_decoding_would(name):
    """Token for token, with the same noise: the proof of the rules that are no law."""
    rule, vocabulary, nodes = WALKS[name], 3, 7
    log_p = jnp.asarray(law_pairs(5, nodes, vocabulary, repeats=12)[0], jnp.float32)
    parents, tokens = random_trees(5, log_p.shape[0], nodes, vocabulary)
    keys = noise.row_keys(jax.random.key(6), log_p.shape[0])
    root = jnp.int32(ROOT_POSITION)

    def one(log_p, parents, tokens, key):
        result = rule(Draft(tokens, parents), log_p, Noise(key, root))
        depths = jnp.arange(nodes)
        gumbel = jax.vmap(lambda depth: noise.token(key, root + 1 + depth, vocabulary))(depths)
        return result, jnp.where(rule.greedy_only, 0.0, gumbel)

    results, perturbation = jax.jit(jax.vmap(one))(log_p, parents, tokens, keys)
    arrays = [np.asarray(x) for x in (log_p, perturbation, parents, tokens)]
    deepest = 0
    for row, instance in enumerate(zip(*arrays, strict=True)):
        emitted, path = plain_tokens(*instance)
        deepest = max(deepest, len(path) - 1)
        assert int(results.num_accepted[row]) == len(path) - 1
        assert results.path[row].tolist() == path + [path[-1]] * (nodes - len(path))
        assert int(results.next_token[row]) == emitted[-1]
    assert deepest >= 3

"""Every random number is drawn once: keys of roles, positions, nodes and rows never meet."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import loop, noise
from specjax.accept import RULES
from specjax.draft.model import ModelDrafter
from specjax.noise import Noise
from specjax.recompute import Recompute
from specjax.sampling import Sampling
from specjax.testing.pearson import pearson
from specjax.testing.tables import laws_apart, second_order
from specjax.types import Request

pytestmark = pytest.mark.fast

ROWS, POSITIONS, NODES = 4, 512, 16
SEEDS = (5, 6)


def words_of(bits):
    """`noise.gumbel` of given threefry words."""

    def fixed(key, shape, dtype):
        return jnp.asarray(bits, dtype).reshape(shape)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax.random, "bits", fixed)
        return np.asarray(noise.gumbel(jax.random.key(0), len(bits)), np.float64)


def test_noise_is_standard_gumbel():
    draws = np.asarray(jax.jit(noise.gumbel, static_argnums=1)(jax.random.key(1), 200_000))
    uniform = np.exp(-np.exp(-draws.astype(np.float64)))
    assert abs(pearson(np.histogram(uniform, 64, (0, 1))[0], np.full(64, 1 / 64)).z) < 5


def test_the_tail_that_decides_resolves_single_words():
    """A token of probability 2e-10 can win, and no two of the rarest words look alike."""
    rare = words_of([0, 1, 2, 3, 2**20])
    np.testing.assert_allclose(rare[:4], -np.log((np.arange(4) + 0.5) * 2.0**-32), rtol=1e-6)
    assert np.all(np.diff(rare) < 0)


def test_noise_is_always_finite():
    assert np.all(np.isfinite(words_of([0, 2**31, 2**32 - 2**8, 2**32 - 1])))


def all_draws(key):
    """The first two entries of every vector that one row could ask for."""
    positions, nodes = jnp.arange(POSITIONS), jnp.arange(NODES)

    def at(position):
        of_round = Noise(key, position)
        drafts = jax.vmap(lambda node: noise.draft(key, position, node, 2))(nodes)
        return jnp.concatenate(
            [noise.token(key, position, 2)[None], of_round.accept(2)[None], drafts]
        )

    return jax.vmap(at)(positions).reshape(-1, 2)


def test_no_two_draws_share_a_key():
    """Equal keys would give equal vectors; different ones do so once in 2**46 pairs."""
    draws = jax.jit(jax.vmap(all_draws))(noise.row_keys(jax.random.key(9), ROWS))
    assert len(np.unique(draws.reshape(-1, 2), axis=0)) == ROWS * POSITIONS * (2 + NODES)


def test_the_token_after_a_node_has_the_noise_of_its_position():
    key, root = jax.random.key(4), jnp.int32(20)
    for depth in range(3):
        expected = noise.token(key, root + depth + 1, 5)
        np.testing.assert_array_equal(Noise(key, root).token(jnp.int32(depth), 5), expected)


def test_E3_a_row_has_its_own_key_whatever_the_batch():
    three, five = (jax.random.key_data(noise.row_keys(jax.random.key(0), n)) for n in (3, 5))
    np.testing.assert_array_equal(three, five[:3])
    assert len(np.unique(five, axis=0)) == 5


@functools.cache
def recorded_runs(name):
    """Every noise vector that one row's generation draws, and its rounds, for each of `SEEDS`."""
    drawn, genuine = [], noise.gumbel

    def recorded(key, size):
        vector = genuine(key, size)
        jax.debug.callback(lambda values: drawn.append(tuple(values.tolist())), vector)
        return vector

    runs = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(noise, "gumbel", recorded)
        generate = rounds_of_a_run(RULES[name])
        for seed in SEEDS:
            rounds = int(generate(jax.random.key(seed)))
            jax.effects_barrier()
            runs.append((list(drawn), rounds))
            drawn.clear()
    return runs


def rounds_of_a_run(rule):
    """A function from a row's key to the rounds that 24 tokens take."""
    target, draft = laws_apart(0, (4, 4, 4))
    model = Recompute(second_order)
    drafter = ModelDrafter(model, num_speculative_tokens=3, vocab_size=4, max_context=64)
    tokens = jnp.zeros((1, 32), jnp.int32)

    @jax.jit
    def generate(key):
        request = Request(
            prompt_length=jnp.array([2]),
            limit=jnp.array([26]),
            eos_ids=jnp.array([[-1]]),
            keys=key[None],
            sampling=Sampling.create(1),
        )
        bound = (model, target, drafter, draft, rule, request)
        state = loop.start(*bound, tokens, chunk=8)
        return loop.run(*bound, state, 1000)[0].stats.rounds[0]

    return generate


@pytest.mark.parametrize("name", [name for name, rule in RULES.items() if rule.draws == "sample"])
def test_a_whole_generation_draws_from_no_key_twice(name):
    """Three drafts, one decision and one token a round; decision and token for the first one."""
    for drawn, rounds in recorded_runs(name):
        assert rounds > 5
        assert len(drawn) == 5 * rounds + 2
        assert len(set(drawn)) == len(drawn)


def test_rows_draw_from_no_common_key():
    one, other = (set(drawn) for drawn, _ in recorded_runs("rejection"))
    assert not one & other


def test_coupled_draws_one_vector_a_position():
    """Draft and target share it, rounds overlap in it, and nothing else is drawn."""
    positions = jnp.arange(64)
    for seed, (drawn, _) in zip(SEEDS, recorded_runs("coupled"), strict=True):
        every = jax.vmap(noise.token, in_axes=(None, 0, None))(jax.random.key(seed), positions, 4)
        assert set(drawn) <= {tuple(vector) for vector in every.tolist()}
        assert len(drawn) > len(set(drawn))


def test_noises_are_uncorrelated():
    """Neighbouring positions, roles and rows: correlations within five standard errors of 0."""
    keys = noise.row_keys(jax.random.key(3), 2)
    size, position = 20_000, jnp.int32(7)
    vectors = [
        noise.token(keys[0], position, size),
        noise.token(keys[0], position + 1, size),
        noise.token(keys[1], position, size),
        noise.draft(keys[0], position, jnp.int32(0), size),
        noise.draft(keys[0], position, jnp.int32(1), size),
        Noise(keys[0], position).accept(size),
    ]
    for one, other in itertools.combinations(vectors, 2):
        assert abs(np.corrcoef(one, other)[0, 1]) < 5 / np.sqrt(size)

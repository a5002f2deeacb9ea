"""Sampling transforms against full sorts in NumPy, and the settings that others got wrong."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from specjax.sampling import Sampling, first_argmax, log_probs
from specjax.sharding import make_mesh
from specjax.testing import reference
from specjax.testing.pearson import pearson
from specjax.truncation import SORTED

pytestmark = pytest.mark.fast

LAW = jax.jit(log_probs)
OFF = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}


def processed(logits, **settings):
    """Laws of rows with one vector of logits each."""
    logits = jnp.asarray(logits)
    return np.asarray(LAW(Sampling.create(logits.shape[0], **settings), logits[:, None]))[:, 0]


def random_settings(rng, rows):
    """Every transform alone, off, and together with the others."""

    def some(values, off):
        return np.where(rng.random(rows) < 0.5, off, values)

    return {
        "temperature": np.float32(some(rng.choice([0.0, 1e-6, 0.3, 0.9, 2.5], rows), 1.0)),
        "top_k": some(rng.integers(-1, 15, rows), 0),
        "top_p": np.float32(some(rng.uniform(0.01, 1, rows), 1.0)),
        "min_p": np.float32(some(rng.uniform(0, 1, rows), 0.0)),
    }


@pytest.mark.parametrize("kind", ["distinct", "tied", "excluded"])
def test_transforms_agree_with_full_sorts(x64, kind):
    rng, rows, vocabulary = np.random.default_rng(3), 400, 13
    logits = 3 * rng.standard_normal((rows, vocabulary))
    if kind == "tied":
        logits = np.round(logits / 2)
    if kind == "excluded":
        logits[rng.random(logits.shape) < 0.4] = -np.inf
        logits[:, 5] = 0.0
    settings = random_settings(rng, rows)
    laws = processed(logits, **settings)
    assert laws.dtype == np.float64
    for row in range(rows):
        own = {name: values[row].item() for name, values in settings.items()}
        expected = reference.log_probs(logits[row], **own)
        np.testing.assert_array_equal(laws[row] > -np.inf, expected > -np.inf, str(own))
        np.testing.assert_allclose(np.exp(laws[row]), np.exp(expected), atol=1e-12)


def test_the_reference_keeps_what_its_parameters_say():
    """The oracle itself, on laws that can be read off."""
    law = np.log([0.1, 0.4, 0.1, 0.25, 0.15])

    def kept(**settings):
        return np.flatnonzero(reference.log_probs(law, **settings) > -np.inf).tolist()

    assert kept(top_k=2) == [1, 3]
    assert kept(top_k=4) == [0, 1, 3, 4]
    assert kept(top_p=0.6) == [1, 3]
    assert kept(top_p=0.7) == [1, 3, 4]
    assert kept(min_p=0.5) == [1, 3]
    assert kept(temperature=0.0) == [1]
    assert np.exp(reference.log_probs(law, top_k=2)).sum() == pytest.approx(1)


def test_cuts_beyond_the_sorted_head_agree_with_full_sorts(x64):
    """With top-k about as large as the head, and top-p sharing out what top-k leaves.

    A row at a time: beside one that the head can't serve, all rows would be looked at closely.
    """
    rng = np.random.default_rng(5)
    for top_k in np.repeat([0, SORTED - 1, SORTED, SORTED + 1, 2 * SORTED], 16).tolist():
        logits = rng.choice([0.2, 1.0, 3.0]) * rng.normal(size=3 * SORTED)
        top_p, min_p = np.float32(rng.choice([0.05, 0.3, 0.6, 1.0])), rng.choice([0.0, 0.001])
        own = {"top_k": top_k, "top_p": top_p.item(), "min_p": np.float32(min_p).item()}
        law, expected = processed(logits[None], **own)[0], reference.log_probs(logits, **own)
        np.testing.assert_array_equal(law > -np.inf, expected > -np.inf, str(own))
        np.testing.assert_allclose(np.exp(law), np.exp(expected), atol=1e-12)


def test_ties_at_the_cut_keep_the_lowest_ids():
    flat = np.zeros((2, 8), np.float32)
    laws = processed(flat, top_k=[3, 0], top_p=[1.0, 0.5])
    assert np.flatnonzero(laws[0] > -np.inf).tolist() == [0, 1, 2]
    assert np.flatnonzero(laws[1] > -np.inf).tolist() == [0, 1, 2, 3]


def test_rows_do_not_see_each_others_parameters():
    logits = np.random.default_rng(0).normal(size=(4, 50)).astype(np.float32)
    alone = processed(logits, **OFF)
    mixed = processed(logits, temperature=[1, 0, 1, 1], top_k=[0, 0, 3, 0], top_p=[1, 1, 1, 0.3])
    np.testing.assert_array_equal(mixed[0], alone[0])
    assert np.all((mixed[1:] > -np.inf).sum(-1) < 50)


def test_a_law_is_the_same_to_the_last_bit_beside_any_neighbour():
    """Beside one that keeps all, one that is cut in the sorted head, and one cut beyond it."""
    rng = np.random.default_rng(2)
    logits = np.repeat(2 * rng.normal(size=(16, 1500)).astype(np.float32), 2, axis=0)
    logits[1::2] = 0.0
    for own in ({"top_p": 1.0}, {"top_p": 0.1}, {"top_p": 0.6}, {"top_k": 40}):
        laws = []
        for beside in ({}, {"top_p": 0.01}, {"top_p": 0.9}):
            pairs = {
                name: [own.get(name, off), beside.get(name, off)] * 16 for name, off in OFF.items()
            }
            laws.append(processed(logits, **pairs)[::2])
        np.testing.assert_array_equal(laws[0], laws[1])
        np.testing.assert_array_equal(laws[0], laws[2])


def test_nan_is_never_drawn():
    law = processed([[1.0, np.nan, 0.5]])
    np.testing.assert_allclose(np.exp(law[0])[[0, 2]].sum(), 1, rtol=1e-6)
    assert law[0, 1] == -np.inf


@pytest.mark.parametrize("top_k", [0, -1, 16, 999])
@pytest.mark.parametrize("top_p, min_p", [(1.0, 0.0), (1.0, -1.0)])
def test_LAW5_switched_off_transforms_change_nothing(top_k, top_p, min_p):
    law = processed(np.zeros((1, 16), np.float32), top_k=top_k, top_p=top_p, min_p=min_p)
    np.testing.assert_allclose(np.exp(law), 1 / 16, rtol=1e-6)
    draws = np.asarray(
        jax.random.categorical(jax.random.key(0), jnp.asarray(law[0]), shape=(2000,))
    )
    counts = np.bincount(draws, minlength=16)
    assert np.all(counts > 0)
    assert abs(pearson(counts, np.full(16, 1 / 16)).z) < 5


def test_LAW5_one_token_is_left_by_top_k_1():
    law = processed(np.zeros((1, 16), np.float32), top_k=1)
    np.testing.assert_array_equal(np.exp(law[0]), np.arange(16) == 0)


@pytest.mark.parametrize("temperature", [0, 0.0, 1e-6, 1e-30, 1e-38, 1e-45])
def test_LAW7_vanishing_temperatures_are_greedy(temperature):
    logits = np.random.default_rng(0).normal(size=(2, 50)).astype(np.float32)
    laws = processed(logits, temperature=[temperature, 1.0], top_p=[0.5, 1.0])
    np.testing.assert_array_equal(np.exp(laws[0]), np.arange(50) == np.argmax(logits[0]))
    assert np.exp(laws[1]).sum() == pytest.approx(1, abs=1e-5)


def test_LAW9e_bfloat16_logits_keep_a_normalised_law_in_float32():
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(1, 32_000)) * 3, jnp.bfloat16)
    law = processed(logits.astype(jnp.float32), top_p=0.9)
    expected = reference.log_probs(np.asarray(logits[0], np.float64), top_p=float(np.float32(0.9)))
    assert np.exp(law.astype(np.float64)).sum() == pytest.approx(1, abs=1e-4)
    # bfloat16 has hundreds of exact ties, and sums in another order move the cut by a token.
    assert abs((law[0] > -np.inf).sum() - (expected > -np.inf).sum()) <= 2


@pytest.mark.parametrize("largest", [1e3, 1e20])
def test_large_logits_keep_a_law_at_low_temperatures(largest):
    logits = np.random.default_rng(0).normal(size=(3, 50)).astype(np.float32)
    logits[:, 7] = largest
    law = processed(logits, temperature=[1.0, 1e-3, 2e-5])
    np.testing.assert_array_equal(np.exp(law), np.broadcast_to(np.arange(50) == 7, law.shape))


def test_first_argmax_is_numpys():
    rng = np.random.default_rng(1)
    values = np.round(rng.normal(size=(200, 40)).astype(np.float32))
    np.testing.assert_array_equal(first_argmax(jnp.asarray(values)), np.argmax(values, -1))
    values[rng.random(values.shape) < 0.2] = np.nan
    expected = np.argmax(np.where(np.isnan(values), -np.inf, values), -1)
    np.testing.assert_array_equal(first_argmax(jnp.asarray(values)), expected)


def test_G3_ties_go_to_the_lowest_id_across_vocabulary_shards():
    """Ids 3 and 9 tie and lie on different devices."""
    logits = jnp.zeros((1, 1, 12)).at[..., jnp.array([3, 9])].set(4.0)
    split = NamedSharding(make_mesh(model=2), PartitionSpec(None, None, "model"))
    for placed in (logits, jax.device_put(logits, split)):
        assert jax.jit(first_argmax)(placed).item() == 3
        for settings in ({"temperature": 0.0}, {"top_k": 1}):
            law = np.asarray(LAW(Sampling.create(1, **settings), placed))
            np.testing.assert_array_equal(np.exp(law[0, 0]), np.arange(12) == 3)

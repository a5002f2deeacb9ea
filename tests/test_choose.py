"""Children of draft nodes: distinct, drawn from the law that is reported, sensible when greedy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import noise
from specjax.choose import chooser
from specjax.sampling import Sampling, first_argmax, log_probs
from specjax.testing.pearson import pearson
from specjax.types import NO_TOKEN

pytestmark = pytest.mark.fast

LOGITS = jnp.log(jnp.array([0.1, 0.4, 0.3, 0.2]))
ROOT = 6


def choose(draws, logits, width, *, depths=None, root=ROOT, seed=0, **settings):
    """Children of the nodes 0..M-1 for the logits [B M V] of each row."""
    rows, parents = logits.shape[:2]
    depths = jnp.zeros((rows, parents), jnp.int32) if depths is None else depths
    return _choose(
        draws,
        width,
        # Truncation is always there, so that all settings share one program.
        Sampling.create(rows, **({"top_k": 0} | settings)),
        noise.row_keys(jax.random.key(seed), rows),
        jnp.full((rows,), root, jnp.int32),
        logits,
        depths,
    )


def _chosen(draws, width, sampling, keys, root, logits, depths):
    rows, parents = depths.shape
    node = jnp.broadcast_to(jnp.arange(parents), (rows, parents))
    path = jnp.where(jnp.arange(4) < depths[..., None], 0, NO_TOKEN)
    return chooser(draws, sampling, keys, root)(logits, node, path, width)


_choose = jax.jit(_chosen, static_argnums=(0, 1))


def pair_counts(first, second, size=4):
    cells = np.asarray(first) * size + np.asarray(second)
    return np.bincount(cells, minlength=size * size)


def repeated(rows, parents=1):
    return jnp.broadcast_to(LOGITS, (rows, parents, 4))


def test_siblings_are_drawn_without_replacement():
    tokens, _, log_q = choose("sample", repeated(40_000), 2)
    q = np.exp(np.asarray(LOGITS, np.float64))
    ordered = q[:, None] * q[None] / (1 - q[:, None])
    np.fill_diagonal(ordered, 0)
    assert abs(pearson(pair_counts(tokens[:, 0, 0], tokens[:, 0, 1]), ordered.ravel()).z) < 5
    np.testing.assert_allclose(np.exp(log_q), np.broadcast_to(q, log_q.shape), rtol=1e-5)


@pytest.mark.parametrize("width", [1, 3, 4])
@pytest.mark.parametrize("draws", ["sample", "coupled", "top_k", "top_and_one"])
@pytest.mark.parametrize("settings", [{}, {"top_k": 1}, {"temperature": 0.0}, {"top_p": 0.5}])
def test_children_are_always_distinct(draws, width, settings):
    tokens = np.asarray(choose(draws, repeated(64), width, **settings)[0])
    assert tokens.shape == (64, 1, width)
    assert all(len(set(row)) == width for row in tokens[:, 0].tolist())
    assert tokens.min() >= 0 and tokens.max() < 4


@pytest.mark.parametrize("draws", ["sample", "coupled", "top_k", "top_and_one"])
@pytest.mark.parametrize("sure", range(4))
def test_children_are_distinct_where_one_token_is_certain(draws, sure):
    """All other logits are -inf: none of them may be the certain one once more."""
    certain = jnp.where(jnp.arange(4) == sure, 0.0, -jnp.inf)
    tokens, _, _ = choose(draws, jnp.broadcast_to(certain, (8, 1, 4)), 3)
    assert all(len(set(row)) == 3 and row[0] == sure for row in tokens[:, 0].tolist())


@pytest.mark.parametrize("settings", [{}, {"temperature": 0.5}, {"top_k": 2}, {"min_p": 0.6}])
def test_the_reported_law_is_the_one_drawn_from(settings):
    rows = 20_000
    tokens, _, log_q = choose("sample", repeated(rows), 1, **settings)
    expected = log_probs(Sampling.create(rows, **settings), repeated(rows))
    np.testing.assert_array_equal(log_q, expected)
    law = np.exp(np.asarray(log_q[0, 0], np.float64))
    counts = np.bincount(np.asarray(tokens)[:, 0, 0], minlength=4)
    assert abs(pearson(counts, law / law.sum()).z) < 5


@pytest.mark.parametrize("draws", ["coupled", "top_k"])
def test_no_law_is_reported_for_what_was_not_drawn_from_one(draws):
    assert choose(draws, repeated(2), 1)[2] is None


def test_the_most_likely_children_come_before_one_drawn_from_the_rest():
    rows = 20_000
    tokens, _, log_q = choose("top_and_one", repeated(rows), 3)
    tokens, law = np.asarray(tokens)[:, 0], np.exp(np.asarray(log_q[0, 0], np.float64))
    assert np.all(tokens[:, :2] == [1, 2])
    np.testing.assert_allclose(law, [1 / 3, 0, 0, 2 / 3], rtol=1e-5)
    assert abs(pearson(np.bincount(tokens[:, 2], minlength=4), law / law.sum()).z) < 5


def test_a_law_without_a_rest_draws_nothing():
    tokens, _, log_q = choose("top_and_one", repeated(4), 3, top_k=2)
    assert np.all(np.asarray(tokens)[:, 0] == [1, 2, 3])
    assert np.all(np.asarray(log_q) == -np.inf)


def test_a_single_child_is_drawn_from_its_whole_law():
    (one, _, law), (other, _, expected) = (
        choose(draws, repeated(64), 1) for draws in ("top_and_one", "sample")
    )
    np.testing.assert_array_equal(one, other)
    np.testing.assert_allclose(law, expected, rtol=1e-6)


def test_parents_and_rounds_draw_independently():
    q = np.exp(np.asarray(LOGITS, np.float64))
    here = np.asarray(choose("sample", repeated(20_000, parents=2), 1)[0])[:, :, 0]
    later = np.asarray(choose("sample", repeated(20_000, parents=2), 1, root=ROOT + 1)[0])[:, :, 0]
    independent = np.outer(q, q).ravel()
    for first, second in ((here[:, 0], here[:, 1]), (here[:, 0], later[:, 0])):
        assert abs(pearson(pair_counts(first, second), independent).z) < 5


def test_coupled_children_are_the_largest_under_the_noise_of_their_position():
    rows, width = 32, 3
    depths = jnp.broadcast_to(jnp.array([0, 2]), (rows, 2))
    tokens = np.asarray(choose("coupled", repeated(rows, 2), width, depths=depths, seed=4)[0])
    keys = noise.row_keys(jax.random.key(4), rows)
    for parent, depth in enumerate((0, 2)):
        position = jnp.int32(ROOT + depth + 1)
        gumbel = jax.vmap(lambda key, at=position: noise.token(key, at, 4))(keys)
        perturbed = np.asarray(LOGITS + gumbel)
        np.testing.assert_array_equal(tokens[:, parent], np.argsort(-perturbed)[:, :width])


def test_top_k_children_are_the_most_likely():
    assert np.asarray(choose("top_k", repeated(1), 3)[0])[0, 0].tolist() == [1, 2, 3]


@pytest.mark.parametrize("draws", ["sample", "coupled", "top_k", "top_and_one"])
@pytest.mark.parametrize("settings", [{"temperature": 0.0}, {"top_k": 1}])
def test_rows_with_one_possible_token_draft_the_next_likely_ones_besides(draws, settings):
    """Alone, and beside a row that samples freely: the same children, best first."""
    alone = choose(draws, repeated(1), 3, **settings)
    columns = {
        name: [value, {"temperature": 1.0, "top_k": 0}[name]] for name, value in settings.items()
    }
    mixed = choose(draws, repeated(2), 3, **columns)
    for tokens, scores, _ in (alone, mixed):
        assert np.asarray(tokens)[0, 0].tolist() == [1, 2, 3]
        assert np.all(np.diff(np.asarray(scores)[0, 0]) < 0)
        assert np.all(np.isfinite(scores))


def test_scores_rank_drawn_children_above_spare_ones():
    tokens, scores, log_q = (np.asarray(x) for x in choose("sample", repeated(64), 4, top_k=2))
    possible = np.take_along_axis(log_q, tokens, axis=-1) > -np.inf
    assert np.all(possible.sum(-1) == 2)
    assert scores[possible].min() > scores[~possible].max()
    np.testing.assert_allclose(
        scores[possible], np.take_along_axis(log_q, tokens, axis=-1)[possible], rtol=1e-6
    )


def test_G3_tied_draft_logits_go_to_the_lowest_id():
    tied = jnp.zeros((1, 1, 12)).at[..., jnp.array([3, 9])].set(4.0)
    for draws in ("sample", "coupled", "top_k", "top_and_one"):
        for width in (1, 2):
            tokens = np.asarray(choose(draws, tied, width, temperature=0.0)[0])[0, 0]
            assert tokens.tolist() == [3, 9][:width]
    assert first_argmax(tied).item() == 3

"""The statistic, its score and its power, against SciPy's exact distributions."""

import math

import numpy as np
import pytest
from scipy import stats

from specjax.testing.pearson import detectable_tv, pearson
from specjax.testing.tables import laws_apart

pytestmark = pytest.mark.fast


def exact_score(counts, law):
    """Without pooling: the normal quantile of the exact tail probability."""
    return stats.norm.isf(stats.chisquare(counts, law * counts.sum()).pvalue)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("cells", [9, 64, 256])
def test_the_score_is_the_exact_normal_quantile(seed, cells):
    rng = np.random.default_rng(seed)
    law = rng.dirichlet(np.full(cells, 20.0))
    counts = rng.multinomial(50_000, law)
    result = pearson(counts, law)
    assert result.degrees == cells - 1
    assert result.samples == 50_000
    assert result.z == pytest.approx(exact_score(counts, law), abs=0.1)


def test_scores_of_the_right_law_are_standard_normal():
    rng = np.random.default_rng(0)
    law = rng.dirichlet(np.ones(64))
    scores = [pearson(counts, law).z for counts in rng.multinomial(5_000, law, size=2_000)]
    assert abs(np.mean(scores)) < 0.1
    assert np.std(scores) == pytest.approx(1, abs=0.07)


def test_rare_cells_are_pooled():
    law = np.array([0.5, 0.4, 0.09, 0.007, 0.003])
    assert pearson(np.array([500, 400, 90, 7, 3]), law).degrees == 3
    # The pool itself is too rare, and takes in the rarest of the others.
    assert pearson(np.array([500, 400, 91, 9]), np.array([0.5, 0.4, 0.091, 0.009])).degrees == 2
    assert pearson(np.array([5, 4]), np.array([0.5, 0.5])) == (0.0, 0, 9)


def test_contexts_are_conditioned_on_their_totals():
    law = np.array([[0.9, 0.1], [0.2, 0.8]])
    right = pearson(np.array([[900, 100], [20, 80]]), law)
    assert right.degrees == 2 and right.z < 0
    assert pearson(np.array([[100, 900], [20, 80]]), law).z > 20
    assert pearson(np.array([[0, 0], [20, 80]]), law).degrees == 1


def test_one_impossible_draw_is_infinitely_far():
    assert pearson(np.array([999, 1]), np.array([1.0, 0.0])).z == math.inf
    assert pearson(np.array([1000, 0]), np.array([1.0, 0.0])).z == 0


def test_a_law_that_is_none_is_refused():
    with pytest.raises(ValueError, match="no probability"):
        pearson(np.array([1, 2]), np.array([0.5, np.nan]))
    with pytest.raises(ValueError, match="degree of freedom"):
        detectable_tv(0, 100)


@pytest.mark.parametrize("degrees, samples", [(3, 1_000), (80, 40_000), (255, 40_000)])
def test_the_power_is_the_stated_one(degrees, samples):
    """At the smallest detectable distance the exact non-central tail holds 99%."""
    critical = stats.chi2.isf(stats.norm.sf(5), degrees)
    noncentrality = 4 * samples * detectable_tv(degrees, samples) ** 2
    assert stats.ncx2.sf(critical, degrees, noncentrality) == pytest.approx(0.99, abs=0.005)


def test_a_bias_of_the_detectable_size_is_detected():
    rng = np.random.default_rng(1)
    cells, samples = 256, 40_000
    law = np.full(cells, 1 / cells)
    distance = detectable_tv(cells - 1, samples)
    assert 0.03 < distance < 0.04
    half = np.where(np.arange(cells) < cells // 2, 1, -1)
    biased = law + half * 2 * distance / cells
    assert np.abs(biased - law).sum() / 2 == pytest.approx(distance)
    found = [pearson(counts, law).z > 5 for counts in rng.multinomial(samples, biased, size=300)]
    assert np.mean(found) > 0.97


def test_laws_apart_are_as_far_apart_as_they_say():
    log_p, log_q = (np.asarray(law) for law in laws_apart(0, (5, 5, 3), 0.1, 0.3))
    distance = np.abs(np.exp(log_p) - np.exp(log_q)).sum(-1) / 2
    assert distance.shape == (5, 5)
    assert 0.1 < distance.min() and distance.max() < 0.3
    np.testing.assert_allclose(np.exp(log_p).sum(-1), 1, rtol=1e-5)

"""Case V1: one tokenizer, different padded widths of target and draft logits."""

from dataclasses import replace

import numpy as np
import pytest
from fixtures import (
    CHUNK,
    TABLE,
    Prompts,
    decode,
    markov,
    on_table,
    oracle_decode,
    outputs,
    row_keys,
    trimmed,
)
from scipy import stats

from specjax.draft import ModelDrafter
from specjax.sampling import Sampling

REAL, ROWS = 61, 512


def _padded(width, real, seed):
    """The same law after every token; ids from ``real`` on are padding of probability 0."""
    logits = np.random.default_rng(seed).normal(size=width)
    logits[real:] = -np.inf
    return markov(np.broadcast_to(logits, (width, width)))


def _subject(target_width, draft_width, real):
    """Draft tables take target ids that they do not know: a gather clips."""
    drafter = ModelDrafter(TABLE, 4, target_width, 10_000, CHUNK)
    return replace(
        on_table("none"),
        vocabulary=target_width,
        params=_padded(target_width, real, 1),
        drafter=drafter,
        drafter_params=_padded(draft_width, min(real, draft_width), 2),
    )


WIDTHS = [(72, 64, 61), (64, 72, 61), (72, 64, 70)]


@pytest.mark.parametrize(("target_width", "draft_width", "real"), WIDTHS)
def test_V1_the_law_is_the_targets(target_width, draft_width, real):
    """Ids that only the target knows are never drafted, and are said all the same."""
    subject = _subject(target_width, draft_width, real)
    prompts = Prompts.of(*[[3, 4]] * ROWS, buffer=16)
    keys = row_keys(1, ROWS)
    result = decode(subject, "rejection", prompts, keys)
    said = np.asarray(result.tokens)[:, 2:].ravel()
    law = np.exp(np.asarray(subject.params[0, 0], np.float64))
    law /= law.sum()
    counts = np.bincount(said, minlength=target_width)
    assert counts.sum() == ROWS * 14
    assert (counts[law == 0] == 0).all()
    real_counts, expected = counts[law > 0], law[law > 0] * counts.sum()
    assert stats.chisquare(real_counts, expected).pvalue > 1e-3
    if real > draft_width:
        assert (counts[draft_width:real] > 0).all()
    assert 0 < result.stats.accepted.sum() < result.stats.drafted.sum()


@pytest.mark.parametrize(("target_width", "draft_width", "real"), WIDTHS)
def test_V1_coupled_output_is_the_plain_output(target_width, draft_width, real):
    subject = _subject(target_width, draft_width, real)
    prompts, keys = Prompts.random((3, 5, 1, 8), REAL, seed=3), row_keys(2, 4)
    sampling = Sampling.create(4, temperature=[0.0, 1.0, 0.7, 1.5])
    result = decode(subject, "coupled", prompts, keys, sampling=sampling, budget=30)
    expected = oracle_decode(subject.logits, prompts, 30, sampling, keys)
    assert outputs(result) == trimmed(expected, prompts.length + 30)

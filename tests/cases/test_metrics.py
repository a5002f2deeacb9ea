"""Case Z1: what is counted, and what is not."""

import numpy as np
import pytest
from fixtures import ROWS, Prompts, counting, decode, row_keys, rules_tried, scripted

from specjax.metrics import Counts, Metrics
from specjax.sampling import Sampling


def _measured(rule, right, budget):
    prompts = Prompts.of(*[[3, 4, 5]] * ROWS)
    result = decode(
        scripted(counting(), prompts, right=right),
        rule,
        prompts,
        row_keys(0, ROWS),
        sampling=Sampling.create(ROWS, temperature=0.0),
        budget=budget,
    )
    counts = Counts.of_row(result.stats, 2)
    return Metrics(3, int(result.length[2]) - 3, ttft=0.0, decode_seconds=1.0, counts=counts)


@pytest.mark.parametrize("rule", rules_tried())
def test_Z1_the_bonus_is_no_accepted_draft(rule):
    """K = 4, accepted 4, 0 and 2: the first token is prefill's, then come 5, 1 and 3."""
    metrics = _measured(rule, [4, 0, 2], budget=1 + 5 + 1 + 3)
    assert metrics.counts.rounds == 3
    assert metrics.acceptance_rate == 0.5
    assert metrics.tokens_per_target_forward == 3.0
    assert metrics.mean_accepted_tokens == 2.0
    np.testing.assert_allclose(metrics.acceptance_by_position, [2 / 3, 2 / 3, 1 / 3, 1 / 3])
    assert metrics.counts.truncated == 0
    assert metrics.output_tokens == 10


@pytest.mark.parametrize("rule", rules_tried())
def test_Z1_rejecting_everything_is_exactly_0(rule):
    metrics = _measured(rule, 0, budget=8)
    assert metrics.acceptance_rate == 0.0
    assert metrics.acceptance_by_position == [0.0] * 4
    assert metrics.tokens_per_target_forward == 1.0
    assert metrics.counts.rounds == 7

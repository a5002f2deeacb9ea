"""What the measures of an output mean, on counts and on clocks that are known."""

import itertools

import numpy as np
import pytest
from fixtures import alphabet_llm
from llm.engines import first_outputs

from specjax import SamplingParams
from specjax.metrics import Counts, Metrics
from specjax.types import Trace

pytestmark = pytest.mark.fast


def counts(rounds, emitted, drafted, accepted, forwards=0, truncated=0) -> Counts:
    return Counts(rounds, emitted, np.array(drafted), np.array(accepted), forwards, truncated)


def test_measures_of_known_counts():
    """Five rounds of three drafts; accepted 3, 2, 1, 0 and, cut at the end, 2 of 3."""
    known = counts(5, 4 + 3 + 2 + 1 + 2, [5, 5, 5], [4, 3, 1], forwards=15, truncated=2)
    metrics = Metrics(7, 13, ttft=0.5, decode_seconds=3.0, counts=known)
    assert metrics.acceptance_rate == 8 / 15
    assert metrics.acceptance_by_position == [4 / 5, 3 / 5, 1 / 5]
    assert metrics.mean_accepted_tokens == 8 / 5
    assert metrics.tokens_per_target_forward == 12 / 5
    assert metrics.target_forwards == 5
    assert metrics.tpot == 3.0 / 12
    assert metrics.tokens_per_second == 4.0
    assert metrics.as_dict() | {"truncated": 2, "draft_forwards": 15} == metrics.as_dict()


def test_measures_of_no_round():
    metrics = Metrics(3, 1, ttft=0.5, decode_seconds=0.0, counts=counts(0, 0, [], []))
    assert metrics.acceptance_rate == metrics.mean_accepted_tokens == metrics.tpot == 0.0
    assert metrics.tokens_per_second == 0.0
    assert metrics.tokens_per_target_forward == 1.0
    assert metrics.acceptance_by_position == []


# A chunk of four rounds that draft 3, 3, 0 and 3 and emit 4, 2, 1 and, cut by the device at an
# end after two of its four tokens, 2; another row's numbers beside it.
BEFORE = counts(2, 5, [2, 2, 1], [2, 1, 0], forwards=6, truncated=0)
AFTER = counts(6, 14, [5, 5, 4], [5, 3, 1], forwards=18, truncated=2)
TRACE = Trace(
    emitted=np.array([[1, 4], [9, 2], [9, 1], [9, 2], [9, 0]]),
    drafted=np.array([[0, 3], [9, 3], [9, 0], [9, 3], [9, 0]]),
    rounds=np.array(4),
)
EXPECTED = {
    1: counts(3, 6, [3, 3, 2], [3, 1, 0], 9, truncated=3),
    3: counts(3, 8, [3, 3, 2], [3, 2, 1], 9, truncated=1),
    4: counts(3, 9, [3, 3, 2], [3, 2, 1], 9, truncated=0),
    5: counts(4, 10, [4, 4, 3], [4, 2, 1], 12, truncated=1),
    6: counts(4, 11, [4, 4, 3], [4, 2, 1], 12, truncated=0),
    7: counts(5, 12, [4, 4, 3], [4, 2, 1], 15, truncated=0),
    8: counts(6, 13, [5, 5, 4], [5, 2, 1], 18, truncated=3),
    9: AFTER,
}


@pytest.mark.parametrize("kept", EXPECTED)
def test_a_chunk_is_cut_at_the_token_that_completes_a_stop(kept):
    found, expected = BEFORE.cut(AFTER, TRACE, 1, kept), EXPECTED[kept]
    for name in ("rounds", "emitted", "draft_forwards", "truncated"):
        assert getattr(found, name) == getattr(expected, name), name
    np.testing.assert_array_equal(found.drafted, expected.drafted)
    np.testing.assert_array_equal(found.accepted, expected.accepted)


class Clock:
    """Each look at it is a second after the one before."""

    def __init__(self):
        self._seconds = itertools.count(100)

    def perf_counter(self) -> float:
        return float(next(self._seconds))


def test_the_first_token_has_a_time_of_its_own(monkeypatch):
    """Looks: begin, first token, its text, and one a chunk of a round of five tokens."""
    llm = alphabet_llm(rounds_per_chunk=1)
    monkeypatch.setattr("specjax.llm.time", Clock())
    longer, shorter = first_outputs(
        llm,
        ["abcdefghijklmnopab", "abcdefghijklmnopbc"],
        [SamplingParams(temperature=0.0, max_tokens=n) for n in (11, 1)],
    )
    for output in (longer, shorter):
        assert output.metrics.ttft == 1.0
    assert longer.metrics.counts.rounds == 2
    assert longer.metrics.decode_seconds == 3.0
    assert longer.metrics.tpot == 3.0 / 10
    assert shorter.metrics.decode_seconds == shorter.metrics.tpot == 0.0

"""The test of a sampler against a law: who passes, who fails, and what the report says."""

import math

import numpy as np
import pytest

from specjax.testing.joint import joint_law_test
from specjax.testing.power_analysis import tilted, worst_direction
from specjax.testing.tables import TABLES

pytestmark = pytest.mark.fast

TABLE = TABLES["trigram"]
ROWS = 20_000


def drawing(law):
    """A sampler of whole sequences from a law [V, ..., V]."""

    def sampler(seed, rows):
        numbers = np.random.default_rng(seed).choice(law.size, size=rows, p=law.reshape(-1))
        return np.stack(np.unravel_index(numbers, law.shape), axis=1)

    return sampler


def biased(law, tv):
    flat = law.reshape(-1)
    return tilted(flat, worst_direction(flat), tv).reshape(law.shape)


@pytest.mark.parametrize("name", TABLES)
def test_a_right_sampler_passes(name):
    law = TABLES[name].law()
    result = joint_law_test(drawing(law), law, rows=ROWS)
    assert result.passed and result.fit.samples == ROWS
    assert "keeps the law" in str(result)


def test_a_target_that_has_a_law_will_do():
    assert joint_law_test(drawing(TABLE.law()), TABLE, rows=ROWS).passed


def test_rows_are_chosen_to_find_one_percent():
    law = TABLE.law()
    right = joint_law_test(drawing(law), law)
    assert right.passed and right.detectable_tv == pytest.approx(0.01, rel=1e-3)
    assert not joint_law_test(drawing(biased(law, 0.01)), law).passed


def test_a_wrong_sampler_fails_and_the_report_says_where():
    law = TABLE.law()
    wrong = law.copy()
    wrong[0, 0, 0, 0] += 0.05
    result = joint_law_test(drawing(wrong / wrong.sum()), law, rows=ROWS)
    assert not result.passed
    assert result.cells[0].tokens == (0, 0, 0, 0) and result.cells[0].deviation > 5
    assert "BREAKS the law" in str(result) and "0 0 0 0: expected" in str(result)


def test_one_impossible_sequence_fails():
    law = TABLES["counting"].law()

    def sampler(seed, rows):
        tokens = drawing(law)(seed, rows)
        tokens[-1, -1] = 0
        return tokens

    result = joint_law_test(sampler, law, rows=ROWS)
    assert result.p_value == 0 and math.isinf(result.cells[0].deviation)


def test_every_call_has_another_seed_and_the_test_repeats():
    law, seeds = TABLE.law(), []

    def sampler(seed, rows):
        seeds.append((seed, rows))
        return drawing(law)(seed, rows)

    first = joint_law_test(sampler, law, rows=2500, rows_a_call=1000, seed=3)
    again = joint_law_test(sampler, law, rows=2500, rows_a_call=1000, seed=3)
    assert [rows for _, rows in seeds[:3]] == [1000, 1000, 500]
    assert seeds[:3] == seeds[3:] and len(set(seeds)) == 3
    assert first == again


def test_a_sampler_that_repeats_itself_is_found():
    """A seed that is ignored: ten times the same rows are ten times as far from the law."""
    law = TABLE.law()
    stuck = joint_law_test(lambda _, rows: drawing(law)(0, rows), law, rows=ROWS, rows_a_call=500)
    assert not stuck.passed


def test_checks_share_the_level():
    law = TABLE.law()
    alone = joint_law_test(drawing(law), law, rows=ROWS)
    together = joint_law_test(drawing(law), law, rows=ROWS, checks=30)
    assert together.detectable_tv > alone.detectable_tv
    assert together.p_value == alone.p_value


def test_a_listed_law_lumps_what_it_does_not_list():
    law = TABLE.law(2)
    listed = {(0, 0): law[0, 0], (1, 2): law[1, 2]}
    result = joint_law_test(drawing(law), listed, rows=ROWS)
    assert result.passed and result.fit.degrees == 2
    assert {cell.tokens for cell in result.cells} == {(0, 0), (1, 2), None}
    assert "all others" in str(result)
    assert not joint_law_test(drawing(biased(law, 0.2)), listed, rows=ROWS).passed


def test_a_listed_law_of_everything_leaves_no_others():
    law = TABLE.law(2)
    listed = {tuple(sequence): law[tuple(sequence)] for sequence in np.argwhere(law > 0).tolist()}
    assert joint_law_test(drawing(law), listed, rows=ROWS).fit.degrees == 8

    def stranger(seed, rows):
        tokens = drawing(law)(seed, rows)
        tokens[0] = 77
        return tokens

    assert joint_law_test(stranger, listed, rows=ROWS).p_value == 0


def test_a_sampler_is_told_what_its_rows_find_before_it_draws():
    told = []

    class Told:
        def told(self, plan):
            told.append(plan)

        def __call__(self, seed, rows):
            assert told
            return drawing(TABLE.law())(seed, rows)

    result = joint_law_test(Told(), TABLE, rows=ROWS)
    assert told == [result.plan] and told[0].rows == ROWS


RIGHT = TABLE.law(2)
WRONG_LAWS = {
    "no law": (np.full((3, 3), 0.2), "sums to 1.8"),
    "negative": (np.array([1.5, -0.5]), "no probability"),
    "axes": (np.full((2, 3), 1 / 6), "an axis a token"),
    "lengths": ({(0,): 0.5, (0, 1): 0.5}, "different lengths"),
    "too much": ({(0,): 0.9, (1,): 0.9}, "more than 1"),
}


@pytest.mark.parametrize("law, sentence", WRONG_LAWS.values(), ids=list(WRONG_LAWS))
def test_a_law_that_is_none_is_refused(law, sentence):
    with pytest.raises(ValueError, match=sentence):
        joint_law_test(drawing(RIGHT), law, rows=10)


WRONG_TOKENS = {
    "one axis": (lambda rows: np.zeros(rows, int), "rows of at least 2"),
    "too few rows": (lambda rows: np.zeros((rows - 1, 2), int), "asked for 10 rows"),
    "too short": (lambda rows: np.zeros((rows, 1), int), "rows of at least 2"),
    "no integers": (lambda rows: np.zeros((rows, 2)), "integers"),
    "outside": (lambda rows: np.full((rows, 2), 3), "over 0 to 2"),
}


@pytest.mark.parametrize("tokens, sentence", WRONG_TOKENS.values(), ids=list(WRONG_TOKENS))
def test_tokens_that_are_none_are_refused(tokens, sentence):
    with pytest.raises(ValueError, match=sentence):
        joint_law_test(lambda _, rows: tokens(rows), RIGHT, rows=10)

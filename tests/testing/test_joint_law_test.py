"""The test of a sampler against a law: who passes, who fails, and what the report says."""

import math

import numpy as np
import pytest

from specjax.testing.independence import Coincidences
from specjax.testing.joint import joint_law_test
from specjax.testing.pearson import fit
from specjax.testing.power_analysis import rows_needed, tilted, worst_direction
from specjax.testing.tables import TABLES

pytestmark = pytest.mark.fast

TABLE = TABLES["trigram"]
ROWS = 20_000
RIGHT = TABLE.law(2)


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


@pytest.mark.parametrize("rows_a_call", [None, 500])
def test_a_sampler_that_ignores_its_seed_is_refused(rows_a_call):
    law = TABLE.law()
    with pytest.raises(ValueError, match="the same rows for two seeds"):
        joint_law_test(
            lambda _, rows: drawing(law)(0, rows), law, rows=ROWS, rows_a_call=rows_a_call
        )


def test_rows_that_come_in_pairs_are_found():
    """Each row twice keeps the law of one row, and its tests find half as much as they say."""

    def pairs(seed, rows):
        return np.repeat(drawing(RIGHT)(seed, rows // 2), 2, axis=0)

    result = joint_law_test(pairs, RIGHT, rows=4_000)
    assert result.keeps_law and not result.independent and not result.passed
    assert "NOT independent" in str(result) and "neighbouring rows are the same" in str(result)


def test_rows_that_never_agree_with_their_neighbours_are_found():
    law = np.full((3,), 1 / 3)

    def alternating(seed, rows):
        rng = np.random.default_rng(seed)
        first = rng.integers(3, size=rows // 2)
        second = (first + rng.integers(1, 3, size=rows // 2)) % 3
        return np.stack([first, second], axis=1).reshape(-1, 1)

    result = joint_law_test(alternating, law, rows=4_000)
    assert result.keeps_law and not result.passed


def test_quotas_are_found():
    law = TABLE.law()

    def quotas(seed, rows):
        numbers = np.random.default_rng(seed).permutation(
            np.searchsorted(law.reshape(-1).cumsum(), (np.arange(rows) + 0.5) / rows)
        )
        return np.stack(np.unravel_index(numbers, law.shape), axis=1)

    result = joint_law_test(quotas, law, rows=ROWS)
    assert not result.passed and "fit the law better than any that are" in str(result)


def test_right_rows_are_hardly_ever_said_to_depend_on_one_another():
    """Of 3,000 tests none comes near the level, and half have a p-value below a half."""
    rng, chance = np.random.default_rng(11), 0.03
    found = [
        Coincidences(2_000, int(k), chance).p_value for k in rng.binomial(2_000, chance, 3_000)
    ]
    assert min(found) > 1e-6 and np.mean(np.array(found) < 0.5) == pytest.approx(0.5, abs=0.08)


@pytest.mark.parametrize("shape", [(2,), (3, 3), (9, 9)])
@pytest.mark.parametrize("rows", [30, 1_000, 100_000])
def test_no_right_sample_fits_too_well(shape, rows):
    law = np.random.default_rng(12).dirichlet(np.ones(math.prod(shape)))
    counts = np.random.default_rng(13).multinomial(rows, law, size=2_000)
    even = np.array([fit(one, law).evenness_p for one in counts])
    for level in (0.1, 0.01, 0.001):
        assert np.mean(even < level) <= level + 4 * math.sqrt(level / len(even))
    if rows == 100_000 and law.size > 8:
        assert fit(np.round(law * rows).astype(int), law).evenness_p < 1e-3


def test_what_is_asked_for_is_found_among_rare_sequences_too():
    """Where some are expected fewer than ten times, more rows than the cells alone would need."""
    law = TABLES["markov"].law()
    result = joint_law_test(drawing(law), law, tv=0.2)
    assert result.detectable_tv <= 0.2
    assert result.plan.rows > rows_needed(0.2, cells=int(np.count_nonzero(law)))
    uniform, halved = np.full((3,) * 4, 1 / 81), np.zeros(81)
    halved[:41] = 1 / 41
    missing = joint_law_test(drawing(halved.reshape(uniform.shape)), uniform, tv=0.25)
    assert not missing.passed


RANGES = {
    "rows 0": ({"rows": 0}, "rows is 0"),
    "rows True": ({"rows": True}, "rows is True: it must be an integer"),
    "few rows": ({"rows": 60}, "60 rows find no bias of any size"),
    "rows and tv": ({"rows": ROWS, "tv": 0.1}, "give one of them"),
    "tv 1": ({"tv": 1.0}, "between 0 and 1"),
    "tv small": ({"tv": 1e-9}, "two billion rows"),
    "alpha 0": ({"alpha": 0.0}, "alpha is 0"),
    "alpha -1": ({"alpha": -1.0}, "alpha is -1"),
    "checks": ({"checks": 0}, "checks is 0"),
    "rows a call": ({"rows_a_call": 0}, "rows_a_call is 0"),
    "seed": ({"seed": -1}, "seed is -1"),
}


@pytest.mark.parametrize("options, sentence", RANGES.values(), ids=list(RANGES))
def test_a_test_that_could_not_fail_is_refused(options, sentence):
    def never(seed, rows):
        raise AssertionError("drew before it was refused")

    with pytest.raises(ValueError, match=sentence):
        joint_law_test(never if "seed" not in options else drawing(RIGHT), TABLE, **options)


def test_what_a_law_does_not_list_can_hide_a_bias():
    listed = {(0, 0): float(RIGHT[0, 0])}
    others = 1 - listed[0, 0]
    with pytest.raises(ValueError, match="could hide: list more of them, or ask for a larger tv"):
        joint_law_test(drawing(RIGHT), listed)
    assert joint_law_test(drawing(RIGHT), listed, rows=ROWS).detectable_tv > others


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


WRONG_LAWS = {
    "no law": (np.full((3, 3), 0.2), "sums to 1.8"),
    "nothing listed": ({}, "lists no sequences"),
    "ids as keys": ({0: 1.0}, "map tuples of token ids"),
    "no ids": ({(0.5,): 1.0}, "ids are integers"),
    "nothing possible": ({(0, 0): 0.0}, "have no probability"),
    "negative": (np.array([1.5, -0.5]), "no probability"),
    "axes": (np.full((2, 3), 1 / 6), "an axis a token"),
    "lengths": ({(0,): 0.5, (0, 1): 0.5}, "different lengths"),
    "too much": ({(0,): 0.9, (1,): 0.9}, "more than 1"),
}


@pytest.mark.parametrize("law, sentence", WRONG_LAWS.values(), ids=list(WRONG_LAWS))
def test_a_law_that_is_none_is_refused(law, sentence):
    with pytest.raises(ValueError, match=sentence):
        joint_law_test(drawing(RIGHT), law, rows=ROWS)


WRONG_TOKENS = {
    "one axis": (lambda rows: np.zeros(rows, int), "rows of at least 2"),
    "too few rows": (lambda rows: np.zeros((rows - 1, 2), int), "asked for 10000 rows"),
    "too short": (lambda rows: np.zeros((rows, 1), int), "rows of at least 2"),
    "no integers": (lambda rows: np.zeros((rows, 2)), "integers"),
    "outside": (lambda rows: np.full((rows, 2), 3), "over 0 to 2"),
    "ragged": (lambda rows: [[0]] * (rows - 1) + [[0, 1]], "rows of different lengths"),
}


@pytest.mark.parametrize("tokens, sentence", WRONG_TOKENS.values(), ids=list(WRONG_TOKENS))
def test_tokens_that_are_none_are_refused(tokens, sentence):
    with pytest.raises(ValueError, match=sentence):
        joint_law_test(lambda _, rows: tokens(rows), RIGHT, rows=ROWS)

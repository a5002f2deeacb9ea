"""Every sampling parameter through the whole loop, against the law that the reference computes."""

import numpy as np
import pytest

from specjax.draft import ModelDrafter, NoDraft
from specjax.testing import loop_sampler
from specjax.testing.checks import IDLE, PARAMETERS
from specjax.testing.joint import joint_law_test
from specjax.testing.loop_sampler import LoopSampler, settings_law
from specjax.testing.tables import DEPTH, TABLES
from specjax.types import Drafter

pytestmark = pytest.mark.slow

TABLE = TABLES["trigram"]
DRAFTER = ModelDrafter(TABLE.target, 3, TABLE.vocabulary, 64, 8)


def whole(name):
    return tuple(IDLE | one for one in PARAMETERS[name])


def outcome(settings, law, rows, drafter: Drafter = DRAFTER):
    rule = "rejection" if drafter is DRAFTER else "matching"
    sampler = LoopSampler(TABLE, DEPTH, rule, drafter, TABLE.draft_params, settings)
    return joint_law_test(sampler, law, rows=rows, rows_a_call=rows)


@pytest.mark.parametrize("name", PARAMETERS)
def test_each_parameter_keeps_its_law(scale, name):
    """All in one program: what is not asked for is there and idle."""
    result = outcome(whole(name), settings_law(TABLE, DEPTH, whole(name)), scale(30_000, 400_000))
    assert result.passed, str(result)


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_parameter_that_is_ignored_is_found(scale, name):
    """The same rows against the law without it; of the processor, without that."""
    ends = {"stop_token_ids": whole(name)[0]["stop_token_ids"]}
    bare = (
        IDLE if name != "logits_processor" else {k: v for k, v in IDLE.items() if "proc" not in k}
    )
    law = settings_law(TABLE, DEPTH, (bare | ends,) * len(PARAMETERS[name]))
    assert distance(law, settings_law(TABLE, DEPTH, whole(name))) > 0.05
    assert not outcome(whole(name), law, scale(30_000, 400_000)).passed


def distance(law, other) -> float:
    """The total variation of two laws."""
    if not isinstance(law, dict):
        return float(np.abs(law - other).sum() / 2)
    return sum(abs(law.get(key, 0.0) - other.get(key, 0.0)) for key in {*law, *other}) / 2


def test_rows_that_get_their_neighbours_parameters_are_found(scale, monkeypatch):
    """The average over all rows stays the same."""
    right = loop_sampler._sampling
    monkeypatch.setattr(
        loop_sampler,
        "_sampling",
        lambda settings, of_row, *rest: right(settings, np.roll(of_row, 1), *rest),
    )
    settings = whole("rows side by side")
    law = settings_law(TABLE, DEPTH, settings)
    assert not outcome(settings, law, scale(30_000, 400_000)).passed


def test_parameters_that_are_absent_are_absent(scale):
    law = TABLE.law(temperature=0.7)
    settings = ({"temperature": 0.7},)
    assert outcome(settings, law, scale(30_000, 400_000)).passed
    assert outcome(settings, law, scale(30_000, 400_000), NoDraft()).passed


def test_a_parameter_that_nobody_knows_is_refused_by_name():
    with pytest.raises(ValueError, match="unknown parameter 'topk'; known: temperature, top_k"):
        LoopSampler(TABLE, DEPTH, "block", settings=({"temperature": 1.0}, {"topk": 2}))


OUT_OF_RANGE = {
    "top_p": ({"top_p": 0.0}, "top_p is 0.0: it must lie in"),
    "temperature": ({"temperature": -1.0}, "temperature is -1.0: it must be 0"),
    "top_k": ({"top_k": -2}, "top_k is -2: 0 or -1 is off"),
    "penalty": ({"presence_penalty": 3.0}, "presence_penalty is 3.0: it must lie in"),
    "bias": ({"logit_bias": {-1: 1.0}}, "logit_bias has the token id -1: the vocabulary has 3"),
    "banned": ({"banned_token_ids": (3,)}, "banned_token_ids has the token id 3"),
    "drafted": ({"num_speculative_tokens": -1}, "num_speculative_tokens is -1: it must be at"),
}


@pytest.mark.parametrize("setting, sentence", OUT_OF_RANGE.values(), ids=list(OUT_OF_RANGE))
def test_a_parameter_out_of_range_is_refused(setting, sentence):
    with pytest.raises(ValueError, match=sentence):
        LoopSampler(TABLE, DEPTH, "block", settings=({}, setting))


def test_no_settings_are_refused():
    with pytest.raises(ValueError, match="settings is empty: give one at least"):
        LoopSampler(TABLE, DEPTH, "block", settings=())

"""What `SamplingParams` may ask beyond drawing: bans, penalties, structure, log-probabilities."""

import math
import re

import jax.numpy as jnp
import numpy as np
import pytest
from fixtures import NGRAM, lagged, letter_model, table_oracle
from llm.engines import PROMPTS, first_outputs, tiny_llm

from specjax import LLM, SamplingParams

BANNED = -math.inf
NO_HASH = type("NoHash", (), {"__hash__": None, "__call__": lambda self, logits, past: logits})()
SETTINGS = {
    "repetition_penalty": 1.3,
    "frequency_penalty": 0.5,
    "logit_bias": {40: 2.0},
    "bad_words": ["o", "qu"],
    "min_tokens": 8,
}


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(letter_model(lagged(), eos_ids=[0]), speculative_config=NGRAM | {"rule": "coupled"})


def one(llm, prompt, **params):
    params = {"max_tokens": 24, "seed": 1} | params
    return llm.generate([prompt], SamplingParams(**params), use_tqdm=False)[0].outputs[0]


def test_rows_that_ask_for_different_things_share_a_call():
    """All, nothing, greedy with penalties, and undrafted: as they come out without speculation."""
    params = [
        SamplingParams(seed=1, max_tokens=20, logprobs=2, **SETTINGS),
        SamplingParams(seed=2, max_tokens=20),
        SamplingParams(temperature=0.0, max_tokens=20, repetition_penalty=1.5),
        SamplingParams(seed=3, max_tokens=20, num_speculative_tokens=0),
    ]
    plain = first_outputs(tiny_llm("none"), PROMPTS, params)
    given = first_outputs(tiny_llm("ngram"), PROMPTS, params)
    assert [o.token_ids for o in given] == [o.token_ids for o in plain]
    assert given[3].metrics.counts.drafted.sum() == 0
    assert given[0].logprobs is not None and given[1].logprobs is None
    raw = [[entry.logprob for entry in o.logprobs] for o in (given[0], plain[0])]
    np.testing.assert_allclose(raw[0], raw[1], atol=1e-4)


def test_allowed_banned_and_favoured_ids(llm):
    assert set(one(llm, "abc", allowed_token_ids=[3, 4, 5]).token_ids) <= {3, 4, 5}
    assert set(one(llm, "abc", allowed_token_ids=[3, 4], banned_token_ids=[4]).token_ids) == {3}
    assert set(one(llm, "abc", logit_bias={9: 1000.0}).token_ids) == {9}
    assert 1 not in one(llm, "abc", logit_bias={1: BANNED}, max_tokens=60).token_ids


def test_no_end_before_the_minimum(llm):
    """EOS and stop ids wait; without the minimum they come at once."""
    likely = {"logit_bias": {0: 1000.0}}
    assert one(llm, "abc", **likely).token_ids == [0]
    held = one(llm, "abc", min_tokens=5, **likely)
    assert len(held.token_ids) == 6 and held.token_ids[-1] == 0 and 0 not in held.token_ids[:5]
    stop = {"logit_bias": {7: 1000.0}, "stop_token_ids": [7], "ignore_eos": True}
    assert len(one(llm, "abc", min_tokens=3, **stop).token_ids) == 4


def test_ends_that_are_no_ends_keep_a_minimum(llm):
    """EOS that is ignored counts as another token."""
    only = {"allowed_token_ids": [0, 5], "stop_token_ids": [5], "ignore_eos": True}
    assert one(llm, "abc", min_tokens=3, **only).token_ids[:3] == [0, 0, 0]


def test_bad_words_never_come(llm):
    assert "ab" in one(llm, "ab" * 9, logit_bias={0: 4.0, 1: 4.0}, ignore_eos=True).text
    spoken = one(llm, "ab" * 9, logit_bias={0: 4.0, 1: 4.0}, ignore_eos=True, bad_words=["ab"])
    assert "ab" not in spoken.text and "a" in spoken.text and "b" in spoken.text


def test_a_pattern_is_followed_to_its_end(llm):
    spoken = one(llm, "abc", structured_outputs={"regex": "(bc|d){3}e?"})
    assert re.fullmatch("(bc|d){3}e?", spoken.text.removesuffix("a"))
    assert spoken.finish_reason == "stop"
    assert one(llm, "abc", structured_outputs={"choice": ["bed", "dog"]}).text[:3] in ("bed", "dog")


def test_a_pattern_goes_around_banned_ids(llm):
    """And is refused where they leave no way to a match."""
    pattern = {"structured_outputs": {"regex": "(bc|d){3}"}}
    assert one(llm, "abc", banned_token_ids=[3], **pattern).text == "bcbcbca"
    assert one(llm, "abc", logit_bias={3: BANNED}, **pattern).text == "bcbcbca"
    assert one(llm, "abc", allowed_token_ids=[0, 3], **pattern).text == "ddda"
    with pytest.raises(ValueError, match="no sequence of this vocabulary's tokens"):
        one(llm, "abc", allowed_token_ids=[0, 1], **pattern)


def test_a_users_function_is_part_of_the_law(llm):
    def no_letter_twice(logits, past):
        last = past.tokens[past.length - 1]
        return jnp.where(jnp.arange(logits.shape[0]) == last, -jnp.inf, logits)

    ids = one(llm, "aab", logits_processor=no_letter_twice, max_tokens=60, ignore_eos=True)
    assert all(a != b for a, b in zip([1, *ids.token_ids], ids.token_ids, strict=False))
    two = [SamplingParams(logits_processor=f) for f in (no_letter_twice, lambda x, past: x)]
    with pytest.raises(ValueError, match="different logits_processor"):
        llm.generate(["a", "b"], two)


def test_a_users_function_leaves_a_law_whatever_it_returns(llm):
    """Infinity is certain at any temperature, NaN never comes, no token at all changes nothing."""
    forced = [5] * 24
    certain = {"logits_processor": lambda logits, past: logits.at[5].set(jnp.inf)}
    assert one(llm, "abc", **certain).token_ids == forced
    assert one(llm, "abc", temperature=2e-5, **certain).token_ids == forced
    some = {"logits_processor": lambda logits, past: logits.at[jnp.arange(14)].set(jnp.nan)}
    assert set(one(llm, "abc", **some).token_ids) <= {14, 15}
    for nothing in (-jnp.inf, jnp.nan):
        banned = {"logits_processor": lambda logits, past, nothing=nothing: logits + nothing}
        assert one(llm, "abc", **banned).token_ids == one(llm, "abc").token_ids


def test_a_schema_of_the_same_name_is_not_taken_for_an_earlier_one():
    """As of a class that is defined again, in a notebook."""

    class Schema(dict):
        def __repr__(self):
            return "<class 'Answer'>"

    llm = tiny_llm("none")
    texts = [
        one(llm, "the", structured_outputs={"json": Schema(const=const)}).text for const in (1, 2)
    ]
    assert texts == ["1", "2"]


def test_a_newline_can_be_a_bad_word():
    llm = tiny_llm("none")
    newline, space = (llm.tokenizer.encode(text)[0] for text in ("\n", " "))
    likely = {"logit_bias": {newline: 1000.0, space: 900.0}}
    assert one(llm, "the", **likely, max_tokens=3).token_ids == [newline] * 3
    assert one(llm, "the", **likely, bad_words=["\n"], max_tokens=3).token_ids == [space] * 3


def test_log_probabilities_are_the_tables(llm):
    """Each token's own and the three most likely, raw, and processed by temperature and top-k."""
    spoken = one(
        llm, "abcabcabc", logprobs=3, temperature=0.7, top_k=5, max_tokens=40, ignore_eos=True
    )
    ids = [0, 1, 2] * 3 + spoken.token_ids
    assert len(spoken.logprobs) == len(spoken.token_ids) == 40
    logits = table_oracle(lagged(), np.array([ids]))[0, 8:-1]
    law = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    for entry, token, row in zip(spoken.logprobs, spoken.token_ids, law, strict=True):
        assert entry.token_id == token
        assert entry.logprob == pytest.approx(row[token], abs=1e-4)
        assert list(entry.top) == np.argsort(-row, kind="stable")[:3].tolist()
        head = np.sort(row)[-5:] / 0.7
        processed = row[token] / 0.7 - np.log(np.exp(head).sum())
        assert entry.processed_logprob == pytest.approx(processed, abs=1e-4)
    drafted = [entry.acceptance_probability for entry in spoken.logprobs]
    assert {0.0, 1.0} >= {value for value in drafted if value is not None} != set()


def test_a_draft_stands_as_likely_as_told():
    """By `matching`, a copied token stands with the probability that the target gives it."""
    llm = LLM(letter_model(lagged(), eos_ids=[0]), speculative_config=NGRAM | {"rule": "matching"})
    params = [
        SamplingParams(seed=seed, max_tokens=40, ignore_eos=True, logprobs=0) for seed in range(24)
    ]
    outputs = llm.generate(["abcabc"] * 24, params, use_tqdm=False)
    likely = [
        entry.acceptance_probability
        for one in outputs
        for entry in one.outputs[0].logprobs
        if entry.acceptance_probability is not None
    ]
    accepted = sum(one.outputs[0].metrics.counts.accepted.sum() for one in outputs)
    assert 0 < min(likely) and max(likely) < 1
    spread = math.sqrt(sum(p * (1 - p) for p in likely))
    assert abs(accepted - sum(likely)) < 4 * spread


def test_a_stop_string_cuts_the_log_probabilities_too(llm):
    spoken = one(llm, "abc", logit_bias={3: 9.0, 4: 9.0}, logprobs=1, stop=["de"], max_tokens=40)
    assert spoken.finish_reason == "stop"
    assert len(spoken.logprobs) == len(spoken.token_ids)


@pytest.mark.parametrize(
    ("params", "fault"),
    [
        ({"repetition_penalty": 0.0}, "repetition_penalty is 0.0"),
        ({"presence_penalty": 3.0}, "presence_penalty is 3.0"),
        ({"frequency_penalty": float("nan")}, "frequency_penalty is nan"),
        ({"logit_bias": {1: float("inf")}}, "logit_bias of token 1"),
        ({"logit_bias": {1: 1e300}}, "logit_bias of token 1"),
        ({"logit_bias": {1: -1e300}}, "logit_bias of token 1"),
        ({"repetition_penalty": 1e300}, "repetition_penalty is 1e"),
        ({"temperature": 1e300}, "temperature is 1e"),
        ({"structured_outputs": {"regex": 5}}, "structured_outputs regex is 5"),
        ({"logits_processor": NO_HASH}, "which has no hash"),
        ({"allowed_token_ids": []}, "allowed_token_ids is empty"),
        ({"bad_words": "ab"}, "bad_words is 'ab'"),
        ({"bad_words": [""]}, "a bad word is empty"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens is 9"),
        ({"structured_outputs": {"regexp": "a"}}, "structured_outputs is"),
        ({"logprobs": -1}, "logprobs is -1"),
        ({"num_speculative_tokens": -1}, "num_speculative_tokens is -1"),
    ],
)
def test_values_out_of_range_are_refused(params, fault):
    with pytest.raises(ValueError, match=fault):
        SamplingParams(**params)


@pytest.mark.parametrize(
    ("params", "fault"),
    [
        ({"logit_bias": {16: 1.0}}, "logit_bias id 16"),
        ({"allowed_token_ids": [-1]}, "allowed token id -1"),
        ({"banned_token_ids": list(range(16))}, "every allowed token is banned"),
        ({"logprobs": 17}, "asks for 17 logprobs: the vocabulary has 16"),
        ({"bad_words": [" "]}, "the bad word ' ' has no tokens"),
        ({"logits_processor": lambda x, past: x[:1]}, "must return 16 logits"),
        ({"logits_processor": lambda x, past: x if x[0] > 0 else -x}, "choose with jnp.where"),
        ({"logits_processor": lambda x, past: x if past.length > 3 else -x}, "with jnp.where"),
        ({"logits_processor": lambda x, past: jnp.array(np.sort(x))}, "logits_processor asks for"),
        ({"logits_processor": lambda x, past: x.at[x > 0].set(x[x > 0])}, "logits_processor asks"),
        (
            {"logits_processor": lambda x, past: x * [1.0, 2.0][past.length]},
            "logits_processor asks",
        ),
        ({"logits_processor": lambda x, past: None}, "returns None: it must return 16 logits"),
        (
            {"allowed_token_ids": [5], "stop_token_ids": [5], "min_tokens": 3},
            "has min_tokens 3, and",
        ),
        ({"allowed_token_ids": [0], "min_tokens": 1}, "every allowed token is EOS or a stop id"),
        ({"structured_outputs": {"regex": "b"}, "banned_token_ids": [0]}, "needs an EOS id"),
        ({"structured_outputs": {"regex": "z"}}, "no sequence of this vocabulary's tokens"),
    ],
)
def test_ids_that_the_model_lacks_are_refused(llm, params, fault):
    with pytest.raises(ValueError, match=fault):
        one(llm, "abc", **params)

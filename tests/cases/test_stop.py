"""Cases P1, P3, P5, P7: an end inside a block, and an end that only the drafter wants."""

import numpy as np
import pytest
from fixtures import (
    METHODS,
    ROWS,
    Prompts,
    Session,
    alphabet_llm,
    counting,
    decode,
    method,
    oracle_decode,
    outputs,
    row_keys,
    rules_tried,
    scripted,
    trimmed,
)

from specjax import SamplingParams
from specjax.sampling import Sampling
from specjax.types import LENGTH as OUT_OF_ROOM
from specjax.types import STOPPED

PROMPT = [3, 4, 5]
GREEDY = Sampling.create(ROWS, temperature=0.0)
# After the prompt COUNT says 6, drawn by prefill, and then blocks 7-11 and 12-0.
ENDS = {
    "offsets 0 to 3": ([7], [8], [9], [10]),
    "offset 4, the next block, the first token": ([11], [12], [6], [15]),
    "the first of two ids": ([9, 8], [8, 9], [11, 2], [2, 6]),
}


def _expected(ends):
    counted = list(range(6, 16)) + list(range(16)) * 3
    return [PROMPT + counted[: min(counted.index(end) for end in row) + 1] for row in ends]


@pytest.mark.parametrize("rounds", [1, 100])
@pytest.mark.parametrize("rule", rules_tried())
@pytest.mark.parametrize("ends", ENDS.values(), ids=ENDS)
def test_P1_nothing_follows_an_end_inside_a_block(ends, rule, rounds):
    prompts = Prompts.of(*[PROMPT] * ROWS)
    session = Session.begin(
        scripted(counting(), prompts, right=4),
        rule,
        prompts,
        row_keys(0, ROWS),
        sampling=GREEDY,
        eos_ids=ends,
    )
    while session.running:
        session = session.advance(rounds)
    state, expected = session.snapshot(), _expected(ends)
    assert outputs(state) == expected
    assert (state.finish == STOPPED).all()
    for row, tokens in enumerate(expected):
        in_rounds = len(tokens) - len(PROMPT) - 1
        assert state.stats.emitted[row] == in_rounds
        assert state.stats.truncated[row] == -in_rounds % 5
        assert state.stats.accepted[row].sum() == in_rounds - in_rounds // 5
    # Beyond the end the buffer holds what the caller put there.
    for row, tokens in enumerate(expected):
        assert (state.context.tokens[row, len(tokens) :] == 0).all()


@pytest.mark.parametrize("name", METHODS)
def test_P1_every_method_ends_where_plain_decoding_does(name):
    subject = method(name)
    prompts = Prompts.random((5, 9, 2, 7), subject.vocabulary, seed=5)
    plain = oracle_decode(subject.logits, prompts, 40)
    ends = [
        [int(plain[row, length + offset])]
        for row, (length, offset) in enumerate(zip(prompts.length, (0, 6, 13, 22), strict=True))
    ]
    result = decode(
        subject,
        subject.default_rule,
        prompts,
        row_keys(1, ROWS),
        sampling=GREEDY,
        eos_ids=ends,
        budget=40,
    )
    length = [
        start + plain[row, start:].tolist().index(ends[row][0]) + 1
        for row, start in enumerate(prompts.length)
    ]
    assert outputs(result) == trimmed(plain, length)
    assert (np.asarray(result.finish) == STOPPED).all()


@pytest.mark.parametrize("rule", rules_tried())
def test_P5_an_end_that_the_target_refuses_ends_nothing(rule):
    """The drafter proposes EOS at every offset in turn; the target never says it."""
    end, subject = 15, counting(unused=1)
    prompts = Prompts.of([3], [0, 1], [9, 10, 11], [14])
    proposer = scripted(subject, prompts, right=[0, 1, 2, 3], wrong=end)
    result = decode(
        proposer, rule, prompts, row_keys(2, ROWS), sampling=GREEDY, eos_ids=(end,), budget=30
    )
    expected = oracle_decode(subject.logits, prompts, 30)
    assert outputs(result) == trimmed(expected, prompts.length + 30)
    assert (np.asarray(result.finish) == OUT_OF_ROOM).all()


# The prompt holds the alphabet once, so that every round copies four right letters from it.
ALPHABET = "abcdefghijklmnopab"


def _one(llm, params):
    return llm.generate([ALPHABET], params)[0].outputs[0]


def _joined(llm, params):
    deltas = list(llm.stream([ALPHABET], params))
    assert [delta.output is not None for delta in deltas] == [False] * (len(deltas) - 1) + [True]
    ids = [token for delta in deltas for token in delta.token_ids]
    return "".join(delta.text for delta in deltas), ids, deltas[-1].output


@pytest.mark.parametrize("end", "cdefgh")
def test_P1_text_ids_and_usage_end_at_eos(end):
    """Streaming and not; EOS at each offset of the block, and as the first token."""
    last = ord(end) - ord("a")
    # An engine a model: EOS is the model's own, one id or two.
    llm = alphabet_llm(eos_ids=(last,) if last % 2 else (last, 15))
    params = SamplingParams(temperature=0.0, max_tokens=30)
    answer = _one(llm, params)
    expected = list(range(2, last + 1))
    assert answer.token_ids == expected
    assert answer.text == "".join(chr(ord("a") + token) for token in expected)
    assert (answer.finish_reason, answer.stop_reason) == ("stop", None)
    assert answer.metrics.output_tokens == len(expected)
    text, ids, output = _joined(llm, params)
    assert (text, ids, output.token_ids) == (answer.text, expected, expected)
    unending = _one(llm, SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True))
    assert len(unending.token_ids) == 30


def test_P1_a_stop_token_id_is_the_stop_reason():
    params = SamplingParams(temperature=0.0, max_tokens=30, stop_token_ids=[9, 6])
    answer = _one(alphabet_llm(), params)
    assert answer.token_ids == [2, 3, 4, 5, 6]
    assert (answer.finish_reason, answer.stop_reason) == ("stop", 6)


@pytest.mark.parametrize("include", [False, True])
def test_P3_ids_and_usage_end_with_the_token_that_completes_the_stop(include):
    """The stop string ends inside a block of five; what was decoded beyond is told as cut."""
    llm = alphabet_llm()
    params = SamplingParams(
        temperature=0.0, max_tokens=30, stop="ef", include_stop_str_in_output=include
    )
    answer = _one(llm, params)
    assert answer.token_ids == [2, 3, 4, 5]
    assert answer.text == ("cdef" if include else "cd")
    assert (answer.finish_reason, answer.stop_reason) == ("stop", "ef")
    assert answer.metrics.output_tokens == 4
    assert answer.metrics.counts.emitted == 3
    assert answer.metrics.counts.accepted.sum() == 3
    assert answer.metrics.counts.truncated >= 2
    text, ids, _ = _joined(llm, params)
    assert (text, ids) == (answer.text, answer.token_ids)
    following = [ALPHABET + answer.text + "op"]
    plainly = SamplingParams(temperature=0.0, max_tokens=9)
    warm, cold = llm.generate(following, plainly), alphabet_llm().generate(following, plainly)
    assert warm[0].outputs[0].token_ids == cold[0].outputs[0].token_ids


@pytest.mark.parametrize("rounds", [1, 2, 3])
def test_P7_the_stream_joins_to_the_text_for_every_grouping(rounds):
    """A stop over three tokens, one that only begins, and none; nothing leaks, nothing is lost."""
    llm = alphabet_llm(rounds_per_chunk=rounds)
    for stop, expected in (
        ("ghi", "cdef"),
        (("ghx", "kl"), "cdefghij"),
        ((), "cdefghijklmnopabcdef"),
    ):
        params = SamplingParams(temperature=0.0, max_tokens=20, stop=stop)
        answer = _one(llm, params)
        assert answer.text == expected
        text, ids, output = _joined(llm, params)
        assert (text, ids) == (expected, answer.token_ids)
        assert output.text == expected

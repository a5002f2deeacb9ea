"""Stop strings and ids, streams, and that no result tells in which chunks it was decoded."""

import numpy as np
import pytest
from fixtures import (
    BUFFER,
    LETTERS,
    NGRAM,
    Prompts,
    alphabet_llm,
    counting,
    lagged,
    letter_model,
    oracle_decode,
    table_oracle,
)
from llm.engines import first_outputs, told

from specjax import LLM, SamplingParams

PROMPTS = ["abcabcab", "ponm", "hhh", "deadbeef"]
# With the letters of `lagged` these end inside blocks, at their edges, on the first token, over
# several tokens, never, or where the budget ends; half of the rows sample.
STOPS = [(), ("ab", "ba"), "k", ("m", "lm", "n"), ("zzz",), "pp", "c", ("ha", "oa", "fo")]
BUDGET = 40


def _requests() -> tuple[list[str], list[SamplingParams]]:
    rows = [(prompt, stop) for stop in STOPS for prompt in PROMPTS]
    params = [
        SamplingParams(
            temperature=float(number % 2),
            seed=number,
            max_tokens=BUDGET - number % 7,
            stop=stop,
            include_stop_str_in_output=number % 3 == 0,
        )
        for number, (_, stop) in enumerate(rows)
    ]
    return [prompt for prompt, _ in rows], params


def _speculating(rounds: int, **options) -> LLM:
    config = NGRAM | {"rule": "coupled"}
    model = letter_model(lagged(scale=2.0))
    return LLM(model, **{"speculative_config": config, "rounds_per_chunk": rounds} | options)


@pytest.fixture(scope="module")
def plainly():
    """What plain decoding says without any stop string, a token a chunk."""
    prompts, params = _requests()
    unstopped = [
        SamplingParams(temperature=one.temperature, seed=one.seed, max_tokens=one.max_tokens)
        for one in params
    ]
    llm = LLM(letter_model(lagged(scale=2.0)), rounds_per_chunk=1)
    return first_outputs(llm, prompts, unstopped)


@pytest.fixture(scope="module")
def in_chunks():
    """The same requests from engines that look at the rows each 1, 3 and 16 rounds."""
    prompts, params = _requests()
    return {rounds: first_outputs(_speculating(rounds), prompts, params) for rounds in (1, 3, 16)}


def _cut(text: str, stops, include: bool) -> tuple[int, str, str | None]:
    """Tokens kept, text and stop string: a letter is a token, and the first stop complete wins."""
    stops = (stops,) if isinstance(stops, str) else stops
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return end, text[: end if include else end - len(stop)], stop
    return len(text), text, None


def test_the_first_stop_that_is_complete_ends_text_and_ids(plainly, in_chunks):
    for params, whole, output in zip(_requests()[1], plainly, in_chunks[16], strict=True):
        kept, text, stop = _cut(whole.text, params.stop, params.include_stop_str_in_output)
        assert output.text == text
        assert output.token_ids == whole.token_ids[:kept]
        assert output.stop_reason == stop
        assert output.finish_reason == ("length" if stop is None else "stop")
        assert output.metrics.output_tokens == kept
    ended = [output for output in in_chunks[16] if output.stop_reason is not None]
    assert 8 <= len(ended) < len(in_chunks[16])


@pytest.mark.parametrize("rounds", [1, 3])
def test_nothing_depends_on_the_chunk(in_chunks, rounds):
    """Not the text, the ids or the reasons, and none of the counts either."""
    assert told(in_chunks[rounds]) == told(in_chunks[16])
    assert any(output.metrics.counts.truncated for output in in_chunks[16])


@pytest.mark.parametrize("rounds", [1, 16])
def test_streams_join_to_what_generate_says(in_chunks, rounds):
    """More rows than run together, so that some only begin when others have ended."""
    prompts, params = _requests()
    texts, ids, last = {}, {}, {}
    for delta in _speculating(rounds).stream(prompts, params):
        assert delta.request not in last, "nothing comes after the end"
        texts[delta.request] = texts.get(delta.request, "") + delta.text
        ids[delta.request] = ids.get(delta.request, []) + delta.token_ids
        if delta.output is not None:
            last[delta.request] = delta.output
            assert delta.finish_reason == delta.output.finish_reason
    for number, output in enumerate(in_chunks[16]):
        assert texts[number] == output.text == last[number].text
        assert ids[number] == output.token_ids
    assert told([last[number] for number in range(len(prompts))]) == told(in_chunks[16])


@pytest.mark.parametrize("place", range(1, 12))
@pytest.mark.parametrize("cut_by_budget", [False, True])
def test_a_stop_string_counts_as_an_end_token_does(place, cut_by_budget):
    """COUNT drafts four and accepts four: its counts are known, wherever the end falls.

    The end is the stop string, EOS, or the stop string at the very token where the budget ends.
    """
    letter = LETTERS[place]
    budget = place + 1 if cut_by_budget else 30
    by_string = SamplingParams(temperature=0.0, max_tokens=budget, stop=letter)
    by_id = SamplingParams(temperature=0.0, max_tokens=30, stop_token_ids=[place])
    stopped, ended = first_outputs(alphabet_llm(), [LETTERS] * 2, [by_string, by_id])
    assert (stopped.stop_reason, ended.stop_reason) == (letter, place)
    assert stopped.token_ids == ended.token_ids == list(range(place + 1))
    for output in (stopped, ended):
        counts = output.metrics.counts
        assert counts.emitted == place
        assert counts.rounds == -(-place // 5)
        assert counts.drafted.tolist() == [counts.rounds] * 4
        assert counts.accepted.sum() == place - place // 5
        assert counts.truncated == -place % 5


def test_a_stop_id_is_kept_and_its_text_too():
    params = SamplingParams(temperature=0.0, max_tokens=9, stop_token_ids=[4])
    (output,) = first_outputs(alphabet_llm(), ["ab"], params)
    assert (output.text, output.token_ids) == ("cde", [2, 3, 4])


def test_a_stop_string_that_the_prompt_began_is_none():
    params = SamplingParams(temperature=0.0, max_tokens=5, stop="bc")
    (output,) = first_outputs(alphabet_llm(), ["ab"], params)
    assert (output.text, output.finish_reason) == ("cdefg", "length")


def test_eos_as_the_first_token_and_a_budget_of_one():
    llm = alphabet_llm(eos_ids=(2,))
    greedy = {"temperature": 0.0, "max_tokens": 9}
    first, one, on = first_outputs(
        llm,
        ["ab", "abc", "ab"],
        [
            SamplingParams(**greedy),
            SamplingParams(temperature=0.0, max_tokens=1),
            SamplingParams(**greedy, ignore_eos=True),
        ],
    )
    assert (first.token_ids, first.finish_reason, first.stop_reason) == ([2], "stop", None)
    assert (one.token_ids, one.finish_reason) == ([3], "length")
    assert on.token_ids == list(range(2, 11))
    for output in (first, one):
        assert output.metrics.counts.rounds == 0
        assert output.metrics.ttft > 0
        assert output.metrics.decode_seconds == output.metrics.tokens_per_second == 0


def test_a_prompt_that_leaves_room_for_one_token():
    llm, tokens = alphabet_llm(), np.arange(BUFFER - 1) % 16
    prompts = Prompts.of(tokens)
    expected = oracle_decode(lambda ids: table_oracle(counting().params, ids), prompts, 1)
    (output,) = first_outputs(llm, [tokens.tolist()], SamplingParams(temperature=0.0))
    assert output.token_ids == [expected[0, BUFFER - 1]]
    assert output.finish_reason == "length"

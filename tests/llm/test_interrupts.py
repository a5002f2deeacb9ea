"""Ctrl-C in the middle, a consumer that walks away, and the progress bar."""

import pytest
from fixtures import alphabet_llm
from llm.engines import first_outputs, told

from specjax import SamplingParams
from specjax.bench.compare import complete

PARAMS = SamplingParams(temperature=0.0, max_tokens=40)
PROMPTS = ["ab", "bc", "cd", "de", "ef"]


@pytest.fixture
def llm():
    return alphabet_llm(rounds_per_chunk=1, max_num_seqs=2)


def interrupt_after(monkeypatch, llm, chunks: int) -> None:
    advance, calls = llm._advance, []

    def interrupted(*args):
        calls.append(args)
        if len(calls) > chunks:
            raise KeyboardInterrupt
        return advance(*args)

    monkeypatch.setattr(llm, "_advance", interrupted)


def test_an_interrupt_hands_out_what_is_there(llm, monkeypatch):
    """Two of five prompts are under way, three wait; then the engine goes on as before."""
    whole = first_outputs(llm, PROMPTS, PARAMS)
    with monkeypatch.context() as patched:
        interrupt_after(patched, llm, chunks=2)
        results = llm.generate(PROMPTS, PARAMS)
    assert [result.prompt for result in results] == PROMPTS
    outputs = [result.outputs[0] for result in results]
    assert [output.finish_reason for output in outputs] == ["abort"] * 5
    for begun, full in zip(outputs[:2], whole[:2], strict=True):
        assert 0 < len(begun.token_ids) < len(full.token_ids)
        assert full.text.startswith(begun.text)
        assert begun.token_ids == full.token_ids[: len(begun.token_ids)]
        assert begun.metrics.counts.rounds == 2
        assert begun.metrics.output_tokens == len(begun.token_ids)
    for waiting in outputs[2:]:
        assert (waiting.text, waiting.token_ids) == ("", [])
        assert waiting.metrics.as_dict()["rounds"] == 0
    assert told(first_outputs(llm, PROMPTS, PARAMS)) == told(whole)


def test_rows_that_had_ended_keep_their_reason(llm, monkeypatch):
    interrupt_after(monkeypatch, llm, chunks=1)
    short = SamplingParams(temperature=0.0, max_tokens=2)
    ended, begun = first_outputs(llm, ["ab", "bc"], [short, PARAMS])
    assert (ended.text, ended.finish_reason) == ("cd", "length")
    assert begun.finish_reason == "abort"


def test_an_interrupt_during_the_prefill(llm, monkeypatch):
    def interrupted(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(llm, "_start", interrupted)
        outputs = first_outputs(llm, PROMPTS, PARAMS)
    assert [(o.token_ids, o.finish_reason) for o in outputs] == [([], "abort")] * 5
    assert first_outputs(llm, "ab", PARAMS)[0].text.startswith("cdefgh")


def test_an_interrupt_ends_a_stream(llm, monkeypatch):
    interrupt_after(monkeypatch, llm, chunks=1)
    with pytest.raises(KeyboardInterrupt):
        list(llm.stream("ab", PARAMS))


def test_a_measurement_is_whole_or_interrupted(llm, monkeypatch):
    """What is compared must not be compared half."""
    interrupt_after(monkeypatch, llm, chunks=1)
    with pytest.raises(KeyboardInterrupt):
        complete(llm, [[0, 1]], PARAMS)


def test_a_stream_may_be_left(llm):
    whole = first_outputs(llm, "ab", PARAMS)
    stream = llm.stream("ab", PARAMS)
    next(stream)
    stream.close()
    assert told(first_outputs(llm, "ab", PARAMS)) == told(whole)


def test_the_bar_appears_only_after_a_while(llm, monkeypatch, capsys):
    first_outputs(llm, "ab", SamplingParams(temperature=0.0, max_tokens=3))
    capsys.readouterr()
    first_outputs(llm, "ab", SamplingParams(temperature=0.0, max_tokens=3))
    assert capsys.readouterr().err == ""
    monkeypatch.setattr("specjax.llm.QUIET_SECONDS", 0.0)
    llm.generate(["ab"] * 4, PARAMS)
    assert "generating: 100%" in capsys.readouterr().err
    llm.generate(["ab"] * 4, PARAMS, use_tqdm=False)
    assert capsys.readouterr().err == ""

"""Many requests at once: samples of a prompt, groups, seeds, and what a row owes its neighbours."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fixtures import NGRAM, alphabet_llm, lagged, letter_model, markov, uniform_llm
from llm.engines import (
    MAX_MODEL_LEN,
    OPTIONS,
    PROMPTS,
    TARGET,
    first_outputs,
    tiny_llm,
    tiny_model,
    told,
)

from specjax import LLM, SamplingParams
from specjax.draft import DRAFTERS
from specjax.generation import generate
from specjax.requests import seed_key
from specjax.sampling import Sampling

# One engine decodes all of them, two rows at a time, though no two are alike.
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=20),
    SamplingParams(temperature=1.0, seed=1, max_tokens=20, top_k=5),
    SamplingParams(temperature=0.7, seed=2, max_tokens=7, top_p=0.9, stop_token_ids=[5, 6, 7]),
    SamplingParams(temperature=1.5, seed=3, max_tokens=20, min_p=0.05, ignore_eos=True, stop="e"),
]


@pytest.fixture(scope="module")
def plain() -> LLM:
    return tiny_llm("none")


@pytest.fixture(scope="module")
def plainly(plain):
    return first_outputs(plain, PROMPTS, PARAMS)


def test_every_method_has_its_options_here():
    assert set(OPTIONS) == set(DRAFTERS)


@pytest.mark.parametrize("method", [name for name in DRAFTERS if name != "none"])
def test_no_method_changes_what_is_said(plainly, method):
    """Greedy and sampled rows of one batch, by the coupled rule."""
    outputs = first_outputs(tiny_llm(method), PROMPTS, PARAMS)
    assert [o.token_ids for o in outputs] == [o.token_ids for o in plainly]
    assert [o.text for o in outputs] == [o.text for o in plainly]
    assert [o.finish_reason for o in outputs] == [o.finish_reason for o in plainly]
    assert sum(output.metrics.counts.drafted.sum() for output in outputs) > 0


def test_a_draft_model_that_is_the_target_is_always_right(plainly):
    config = OPTIONS["draft_model"] | {"method": "draft_model", "model": tiny_model()}
    llm = tiny_llm(speculative_config=config | {"rule": "coupled"})
    outputs = first_outputs(llm, PROMPTS, PARAMS)
    assert [o.token_ids for o in outputs] == [o.token_ids for o in plainly]
    greedy = outputs[0].metrics
    kept = greedy.counts.emitted
    assert greedy.counts.accepted.sum() == kept - kept // 4
    assert greedy.acceptance_rate == 1.0 if kept % 4 == 0 else greedy.acceptance_rate > 0.8


def test_a_prompt_with_params_of_its_own_is_as_if_alone(plain, plainly):
    for prompt, params, together in zip(PROMPTS, PARAMS, plainly, strict=True):
        (alone,) = first_outputs(plain, prompt, params)
        assert told([alone]) == told([together])


def test_more_prompts_than_rows_are_served_in_their_order(plainly):
    llm = tiny_llm("none", max_num_seqs=2)
    results = llm.generate(PROMPTS, PARAMS)
    assert [result.prompt for result in results] == PROMPTS
    assert told([result.outputs[0] for result in results]) == told(plainly)


def test_text_and_its_ids_are_one_prompt(plain, plainly):
    ids = [plain.tokenizer.encode(prompt) for prompt in PROMPTS]
    results = plain.generate(ids, PARAMS)
    assert [result.prompt for result in results] == [None] * len(PROMPTS)
    assert [result.prompt_token_ids for result in results] == ids
    assert told([result.outputs[0] for result in results]) == told(plainly)


def test_a_chat_is_what_its_template_writes(plain):
    one = [{"role": "user", "content": "fox"}]
    other = [*one, {"role": "assistant", "content": "dog"}, {"role": "user", "content": "déjà"}]
    params = SamplingParams(temperature=0.0, max_tokens=8)
    texts = [
        "<s>user: fox\nassistant:",
        "<s>user: fox\n<s>assistant: dog\n<s>user: déjà\nassistant:",
    ]
    written = [plain.tokenizer.encode(text) for text in texts]
    expected = told(first_outputs(plain, written, params))
    results = plain.chat([one, other], params)
    assert [result.prompt_token_ids for result in results] == written
    assert told([result.outputs[0] for result in results]) == expected
    assert told(plain.chat(one, params)[0].outputs) == expected[:1]
    streamed = "".join(delta.text for delta in plain.stream_chat(one, params))
    assert streamed == expected[0][0]


@pytest.fixture(scope="module")
def samples(plain):
    params = SamplingParams(n=5, temperature=1.0, seed=11, max_tokens=12, ignore_eos=True)
    (result,) = plain.generate(PROMPTS[0], params)
    assert [output.index for output in result.outputs] == list(range(5))
    return params, result.outputs


def test_samples_are_rows_whose_keys_are_folded_from_the_seed(plain, samples):
    params, outputs = samples
    ids = plain.tokenizer.encode(PROMPTS[0])
    rows = generate(
        TARGET,
        plain.model.params,
        jnp.asarray([ids] * 5),
        jnp.stack([jax.random.fold_in(seed_key(11), index) for index in range(5)]),
        rule="coupled",
        sampling=Sampling.create(5),
        max_new_tokens=params.max_tokens,
        buffer=MAX_MODEL_LEN,
    )
    written = rows.tokens[:, len(ids) : len(ids) + params.max_tokens].tolist()
    assert [output.token_ids for output in outputs] == written
    assert len({tuple(row) for row in written}) == 5


def test_samples_that_do_not_fit_together_are_the_same(samples):
    params, outputs = samples
    llm = tiny_llm("none", max_num_seqs=2)
    between, result, after = llm.generate(
        [PROMPTS[1], PROMPTS[0], PROMPTS[1]],
        [SamplingParams(seed=1, max_tokens=5), params, SamplingParams(seed=1, max_tokens=5)],
    )
    assert told(result.outputs) == told(outputs)
    assert told(between.outputs) == told(after.outputs)


def test_no_more_rows_are_decoded_together_than_asked_for(monkeypatch):
    llm, sizes = alphabet_llm(max_num_seqs=3), []
    serve = llm._serve_group
    monkeypatch.setattr(llm, "_serve_group", lambda group: sizes.append(len(group)) or serve(group))
    params = SamplingParams(temperature=0.0, max_tokens=3)
    assert [o.text for o in first_outputs(llm, ["a"] * 7, params)] == ["bcd"] * 7
    assert sizes == [3, 3, 1]


def test_seeded_and_unseeded_requests_keep_apart():
    """Eight letters drawn evenly from sixteen: 32 bits of luck to coincide."""
    params = SamplingParams(max_tokens=8)
    llm = uniform_llm()
    unseeded = [o.token_ids for o in first_outputs(llm, ["ab"] * 3, params)]
    unseeded += [o.token_ids for _ in range(3) for o in first_outputs(llm, "ab", params)]
    assert len({tuple(ids) for ids in unseeded}) == 6
    again = uniform_llm()
    repeated = [o.token_ids for o in first_outputs(again, ["ab"] * 3, params)]
    repeated += [o.token_ids for _ in range(3) for o in first_outputs(again, "ab", params)]
    assert repeated == unseeded
    other = uniform_llm(seed=1)
    assert first_outputs(other, "ab", params)[0].token_ids not in unseeded


def test_what_is_refused_uses_up_no_number():
    params = SamplingParams(max_tokens=8)
    llm, other = uniform_llm(), uniform_llm()
    with pytest.raises(ValueError):
        llm.generate(["ab", ""], params)
    assert told(first_outputs(llm, "ab", params)) == told(first_outputs(other, "ab", params))


def test_speculation_is_switched_and_the_output_is_not():
    llm = LLM(letter_model(lagged(scale=2.0)))
    params = SamplingParams(temperature=0.0, max_tokens=30)
    plain = first_outputs(llm, "abcabcab", params)
    assert plain[0].metrics.counts.drafted.size == 0
    llm.set_speculation(NGRAM)
    speculative = first_outputs(llm, "abcabcab", params)
    assert speculative[0].token_ids == plain[0].token_ids
    assert speculative[0].metrics.counts.drafted.sum() > 0
    llm.set_speculation(None)
    assert told(first_outputs(llm, "abcabcab", params)) == told(plain)


def test_two_streams_of_one_engine_take_turns():
    llm, params = alphabet_llm(rounds_per_chunk=1), SamplingParams(temperature=0.0, max_tokens=20)
    streams = [llm.stream("ab", params), llm.stream("hi", params)]
    texts = ["", ""]
    while streams[0] is not None or streams[1] is not None:
        for number, stream in enumerate(streams):
            delta = next(stream, None) if stream is not None else None
            if delta is None:
                streams[number] = None
            else:
                texts[number] += delta.text
    assert texts == [o.text for o in first_outputs(llm, ["ab", "hi"], params)]


def test_eos_of_the_model_ends_a_row_unless_it_is_ignored():
    """Sixteen letters drawn evenly, one of them EOS: some of four samples end by it."""
    llm = LLM(letter_model(markov(np.zeros((16, 16))), eos_ids=(3,)), speculative_config=NGRAM)
    params = SamplingParams(n=4, seed=0, max_tokens=40)
    outputs = llm.generate("ab", params)[0].outputs
    ended = [output for output in outputs if output.finish_reason == "stop"]
    assert ended
    for output in outputs:
        assert (3 in output.token_ids) == (output in ended)
    for output in ended:
        assert output.token_ids.index(3) == len(output.token_ids) - 1
        assert output.stop_reason is None
    ignored = llm.generate("ab", replace(params, ignore_eos=True))[0].outputs
    assert [len(output.token_ids) for output in ignored] == [40] * 4
    for output, longer in zip(outputs, ignored, strict=True):
        assert output.token_ids == longer.token_ids[: len(output.token_ids)]

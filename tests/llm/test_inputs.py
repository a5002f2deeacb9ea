"""What is refused, by which sentence, and that nothing is compiled before.

Values of another type than the signatures name are in `test_wrong_types`.
"""

from dataclasses import replace

import numpy as np
import pytest
from fixtures import BUFFER, NGRAM, alphabet_llm, compilations, letter_model, uniform_llm
from llm.engines import byte_level, tiny_llm, tiny_model

from specjax import LLM, SamplingParams
from specjax.checkpoint import Model, load
from specjax.sharding import make_mesh
from specjax.speculative_config import SpeculativeConfig

pytestmark = pytest.mark.fast

GREEDY = SamplingParams(temperature=0.0, max_tokens=4)


@pytest.mark.parametrize(
    ("prompt", "sentence"),
    [
        (np.array([]), "the list of prompts is empty"),
        ((), "the list of prompts is empty"),
        ({}, "prompt 0 is empty"),
        ({"prompt_token_ids": []}, "prompt 0 is empty"),
        ({"text": "ab"}, "prompt 0 has the unknown key 'text'; known: prompt, prompt_token_ids"),
        ([0, 16], "prompt 0 has the token id 16: the vocabulary has 16, 0 to 15"),
        ([[3], [-1]], "prompt 1 has the token id -1"),
        ([True, False], "prompt 0 has True where a token id, an integer, belongs"),
        ([[2**40]], "prompt 0 has the token id 1099511627776"),
        ("a\ud800", "no valid Unicode at character 1 of 2"),
        ([True, False], "prompt 0 has True where a token id, an integer, belongs"),
        (np.array(5), "prompt 0 is array\\(5\\): give text, or a list of token ids"),
        (bytearray(b"ab"), "prompt 0 is bytearray"),
        ([3] * BUFFER, "prompt 0 has 64 tokens and max_model_len is 64: at most 63"),
    ],
)
def test_a_prompt_that_is_none(prompt, sentence):
    llm = alphabet_llm()
    for serve in (llm.generate, llm.stream):
        with compilations() as names, pytest.raises(ValueError, match=sentence) as fault:
            serve(prompt, GREEDY)
        assert "\n" not in str(fault.value)
        assert not [name for name in names if "program" in name]


@pytest.mark.parametrize(
    ("messages", "sentence"),
    [
        ("hello", "a conversation is a list of .* not str"),
        ([[]], "messages is empty"),
        ([{"content": "a"}], "needs a 'role'"),
        ([{"role": "user", "content": "\udcff"}], "no valid Unicode"),
        ([{"role": "user", "content": object()}], "more than text"),
        ([{"role": "user"}], "has no 'content'"),
    ],
)
def test_a_conversation_that_is_none(messages, sentence):
    for serve in (alphabet_llm().chat, alphabet_llm().stream_chat):
        with pytest.raises(ValueError, match=sentence):
            serve(messages, GREEDY)


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        ({"n": 0}, "n is 0: it must be at least 1"),
        ({"n": True}, "n is True: it must be an integer"),
        ({"max_tokens": 0}, "max_tokens is 0: it must be at least 1"),
        ({"temperature": -0.1}, "temperature is -0.1: it must be 0"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"temperature": float("inf")}, "temperature is inf"),
        ({"top_p": 0.0}, r"top_p is 0.0: it must lie in \(0, 1\]"),
        ({"top_p": 1.01}, r"top_p is 1.01: it must lie in \(0, 1\]"),
        ({"top_p": float("nan")}, "top_p is nan"),
        ({"top_k": -2}, "top_k is -2"),
        ({"min_p": -0.1}, "min_p is -0.1"),
        ({"min_p": 1.1}, "min_p is 1.1"),
        ({"seed": -1}, "seed is -1: it must be at least 0"),
        ({"seed": 1 << 64}, r"seed is 18446744073709551616: it must be less than 2\*\*64"),
        ({"top_k": True}, "top_k is True: it must be an integer"),
        ({"stop_token_ids": [True]}, r"stop_token_ids is \[True\]"),
        ({"allowed_token_ids": [True]}, r"allowed_token_ids is \[True\]"),
        ({"stop": ""}, "a stop string is empty"),
        ({"stop": ["a", ""]}, "a stop string is empty"),
    ],
)
def test_sampling_params_that_are_none(value, sentence):
    with pytest.raises(ValueError, match=sentence):
        SamplingParams(**value)


@pytest.mark.parametrize(
    ("params", "sentence"),
    [
        ([], "0 SamplingParams for 2 prompts: give one or 2"),
        ([GREEDY] * 3, "3 SamplingParams for 2 prompts"),
        (SamplingParams(stop_token_ids=[16]), "prompt 0 has the stop token id 16"),
        (SamplingParams(stop_token_ids=[-1]), "prompt 0 has the stop token id -1"),
    ],
)
def test_params_that_fit_no_prompt(params, sentence):
    with pytest.raises(ValueError, match=sentence):
        alphabet_llm().generate(["ab", "bc"], params)


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ({"metod": "ngram"}, "has no 'method': choose one of none, ngram, draft_model"),
        ({"method": "n-gram"}, "unknown method 'n-gram': did you mean 'ngram'?"),
        ({"method": ["ngram"]}, "unknown method"),
        ({"method": "ngram", "rule": "couple"}, "unknown rule 'couple': did you mean 'coupled'?"),
        (
            {"method": "ngram", "num_speculativ_tokens": 5},
            "unknown key 'num_speculativ_tokens' .*did you mean 'num_speculative_tokens'?",
        ),
        ({"method": "ngram", "exit_layer": 1}, "'exit_layer' belongs to method 'early_exit'"),
        ({"method": "ngram", "num_speculative_tokens": 0}, "num_speculative_tokens is 0"),
        ({"method": "ngram", "num_speculative_tokens": "5"}, "is '5': it must be an integer"),
        ({"method": "ngram", "num_speculative_tokens": 2.5}, "is 2.5: it must be an integer"),
        (
            {"method": "ngram", "num_speculative_tokens": BUFFER},
            "num_speculative_tokens is 64, more than the 64 tokens of max_model_len can hold",
        ),
        (
            {"method": "ngram", "prompt_lookup_min": 5, "prompt_lookup_max": 4},
            "prompt_lookup_min=5 and prompt_lookup_max=4",
        ),
        ({"method": "early_exit"}, "method 'early_exit' needs 'exit_layer'"),
        ({"method": "draft_model"}, "method 'draft_model' needs 'model'"),
        ({"prompt_lookup_num_tokens": 3, "num_speculative_tokens": 3}, "both set"),
        ({"method": "ngram", "prompt_lookup_max": 65}, "prompt_lookup_max is 65: .*at most 64"),
    ],
)
def test_a_speculative_config_that_is_none(config, sentence):
    with pytest.raises(ValueError, match=sentence):
        alphabet_llm(speculative_config=config)


@pytest.mark.parametrize(("layer", "named"), [(0, "0"), (2, "2"), (-1, "-1"), (99, "99")])
def test_an_exit_layer_that_the_model_lacks(layer, named):
    config = {"method": "early_exit", "exit_layer": layer}
    sentence = f"early exit after {named} layers: the model has 2, choose 1 to 1"
    with pytest.raises(ValueError, match=sentence):
        LLM(tiny_model(), speculative_config=config)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"max_model_len": 1}, "max_model_len is 1: this model takes 2 to 64"),
        ({"max_model_len": 65}, "max_model_len is 65: this model takes 2 to 64"),
        ({"max_num_seqs": 0}, "max_num_seqs is 0: it must be at least 1"),
        ({"rounds_per_chunk": 0}, "rounds_per_chunk is 0: it must be at least 1"),
        ({"seed": -1}, "seed is -1"),
    ],
)
def test_an_engine_that_cannot_be(options, sentence):
    with pytest.raises(ValueError, match=sentence):
        alphabet_llm(**options)


def test_a_model_or_a_dtype_that_is_none(tmp_path):
    with pytest.raises(ValueError, match="dtype 'float64' is not known; choose auto, float32"):
        load(tmp_path, dtype="float64")
    with pytest.raises(ValueError, match="'gpt-9' is neither a path nor a known model"):
        LLM("gpt-9")


def test_a_loaded_model_keeps_its_dtype():
    model = tiny_model()
    for dtype in ("bfloat16", "nonsense"):
        with pytest.raises(ValueError, match="of float32: load it with|is not known"):
            LLM(model, dtype=dtype)
    assert LLM(model, dtype="float32").model.dtype == "float32"


@pytest.mark.parametrize(
    ("data", "model", "sentence"),
    [(0, 4, "data is 0"), (1, -4, "model is -4"), (True, 1, "data is True: it must be an integer")],
)
def test_a_mesh_that_cannot_be(data, model, sentence):
    with pytest.raises(ValueError, match=sentence):
        make_mesh(data, model)


def test_what_callers_of_vllm_leave_out_may_be_none():
    given = SamplingParams(stop=None, stop_token_ids=None, bad_words=None, temperature=0.0)
    assert given == SamplingParams(temperature=0.0)
    (result,) = uniform_llm().generate("ab", SamplingParams(max_tokens=None, seed=1))
    assert len(result.outputs[0].token_ids) == BUFFER - 2


def test_a_stream_goes_on_as_it_began_when_speculation_changes():
    llm, long = tiny_llm("none"), replace(GREEDY, max_tokens=40)
    expected = llm.generate("ab", long)[0].outputs[0].token_ids
    exits = {"method": "early_exit", "exit_layer": 1}
    for config in (NGRAM, exits, NGRAM | {"num_speculative_tokens": 5}):
        stream = llm.stream("ab", long)
        ids = list(next(stream).token_ids)
        llm.set_speculation(config)
        assert ids + [id for delta in stream for id in delta.token_ids] == expected
        assert llm.generate("ab", long)[0].outputs[0].token_ids == expected


def test_warmup_takes_rows_and_tokens():
    with pytest.raises(ValueError, match="rows is 0: it must be at least 1"):
        alphabet_llm().warmup(rows=0)
    with pytest.raises(ValueError, match="max_tokens is 0: it must be at least 2"):
        alphabet_llm().warmup(max_tokens=0)


def test_the_greedy_rule_refuses_a_temperature():
    llm = alphabet_llm(speculative_config=NGRAM | {"rule": "greedy"})
    with pytest.raises(ValueError, match="rule 'greedy' would ignore temperature 1.0: set it to 0"):
        llm.generate("ab")


def test_a_draft_model_of_another_tokenizer_is_named_by_its_first_id():
    mine = tiny_model()
    draft = Model(
        mine.target, mine.params, byte_level(("a", "b")), mine.eos_ids, mine.vocab_size, 256
    )
    config = {"method": "draft_model", "model": draft}
    first = mine.tokenizer.backend.token_to_id("a")
    sentence = f"tokenizer differs at id {first}: the target has 'a', the draft 'b'"
    with pytest.raises(ValueError, match=sentence):
        LLM(mine, speculative_config=config)


def test_a_configuration_that_is_refused_leaves_the_engine_as_it_was(monkeypatch):
    llm = tiny_llm("none")
    before = (llm.speculative_config, llm._running)
    for config in ({"method": "early_exit", "exit_layer": 9}, {"method": "ngrm"}):
        with pytest.raises(ValueError):
            llm.set_speculation(config)

    def incompatible(**parts):
        raise ValueError("this rule verifies chains only")

    monkeypatch.setattr("specjax.llm.Programs", incompatible)
    with pytest.raises(ValueError, match="chains only"):
        llm.set_speculation({"method": "early_exit", "exit_layer": 1})
    assert (llm.speculative_config, llm._running) == before


def test_the_names_of_transformers_mean_the_same():
    assert SpeculativeConfig.parse(
        {"prompt_lookup_num_tokens": 7, "max_matching_ngram_size": 3}
    ) == SpeculativeConfig.parse(
        {"method": "ngram", "num_speculative_tokens": 7, "prompt_lookup_max": 3}
    )
    assert SpeculativeConfig.parse({"assistant_model": "m"}).method == "draft_model"
    assert SpeculativeConfig.parse({"assistant_early_exit": 4}).options == {"exit_layer": 4}
    assert SpeculativeConfig.parse({}) == SpeculativeConfig.parse(None) == SpeculativeConfig()


def test_seeds_that_differ_in_the_upper_half_differ():
    llm, params = (
        uniform_llm(),
        [SamplingParams(seed=seed, max_tokens=16) for seed in (7, 7 + (1 << 32), (1 << 64) - 1)],
    )
    said = [result.outputs[0].token_ids for result in llm.generate(["ab"] * 3, params)]
    assert len({tuple(ids) for ids in said}) == 3


def test_values_beyond_32_bits_mean_no_limit():
    """On a model whose vocabulary and context are smaller than any of them."""
    llm = uniform_llm()
    wide = SamplingParams(seed=3, max_tokens=1 << 50, top_k=1 << 50)
    plain = SamplingParams(seed=3, max_tokens=BUFFER)
    one, other = (result.outputs[0] for result in llm.generate(["ab", "ab"], [wide, plain]))
    assert one.token_ids == other.token_ids
    assert (len(one.token_ids), one.finish_reason) == (BUFFER - 2, "length")


@pytest.mark.parametrize(
    "prompt",
    [
        "cd",
        [2, 3],
        (2, 3),
        np.array([2, 3]),
        {"prompt": "cd"},
        {"prompt_token_ids": np.array([2, 3])},
        {"prompt_token_ids": [2, 3], "prompt": None},
        [[2, 3]],
        np.array([[2, 3]]),
        [np.array([2, 3], np.int32)],
        ("cd",),
    ],
)
def test_every_form_of_a_prompt(prompt):
    (result,) = alphabet_llm().generate(prompt, GREEDY)
    assert result.prompt_token_ids == [2, 3]
    assert result.outputs[0].text == "efgh"


def test_an_array_of_one_library_or_another():
    import jax.numpy as jnp

    for prompt in (jnp.array([2, 3]), jnp.array([[2, 3]])):
        assert alphabet_llm().generate(prompt, GREEDY)[0].prompt_token_ids == [2, 3]


def test_an_engine_of_loaded_parts_needs_no_name():
    assert alphabet_llm().model.target == letter_model(None).target

"""`specjax.load`: a checkpoint as target, parameters and tokenizer, on one device or on a mesh."""

import dataclasses
import json

import jax
import ml_dtypes
import numpy as np
import pytest
from convert.test_inspection import write_tokenizer
from convert.tiny_checkpoints import expected_params, hf_config, hf_tensors, write_hf
from llm.engines import tiny_model

import specjax
from ckpt_convert import convert, load_config
from specjax import LLM, SamplingParams
from specjax.models.decoder import DecoderTarget, parameter_axes, unstack
from specjax.sharding import make_mesh, parameter_shardings
from specjax.tokenizer import Tokenizer, TokenizerError

pytestmark = pytest.mark.fast

TENSORS = hf_tensors("qwen2", dtype=ml_dtypes.bfloat16)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("load")
    source = write_hf(folder / "source", hf_config("qwen2", eos_token_id=[5, 2]), TENSORS)
    write_tokenizer(source, 61, eos_token="t7")
    generation = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95}
    generation |= {"max_new_tokens": 2048, "eos_token_id": [5, 2, 64]}
    (source / "generation_config.json").write_text(json.dumps(generation))
    return convert(source, folder / "converted").destination


def test_three_things_as_they_are_stored(folder):
    target, params, tokenizer = specjax.load(folder)
    assert isinstance(target, DecoderTarget) and isinstance(tokenizer, Tokenizer)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(params)} == {"bfloat16"}
    jax.tree.map(np.testing.assert_array_equal, params, unstack(expected_params(TENSORS)))


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_the_dtype_is_cast_as_it_is_read(folder, dtype):
    model = specjax.load(folder, dtype=dtype)
    expected = jax.tree.map(lambda leaf: leaf.astype(dtype), unstack(expected_params(TENSORS)))
    assert model.dtype == dtype
    jax.tree.map(np.testing.assert_array_equal, model.params, expected)


@pytest.mark.parametrize("dtype", [None, "float32"])
def test_onto_a_mesh(folder, dtype):
    mesh = make_mesh(2, 2)
    target, params, _ = specjax.load(folder, mesh=mesh, dtype=dtype)
    expected = jax.tree.map(lambda leaf: leaf.astype(dtype or "bfloat16"), expected_params(TENSORS))
    jax.tree.map(np.testing.assert_array_equal, params, expected)
    axes = parameter_axes(load_config(folder), stacked=True)
    assert jax.tree.map(lambda leaf: leaf.sharding, params) == parameter_shardings(
        mesh, axes, expected
    )
    assert params["embed"].addressable_shards[0].data.shape == (32, 32)
    assert target.dtype == (dtype or "bfloat16")


def test_every_id_that_ends_a_text_counts(folder):
    """Two in the configuration, and one that only the tokenizer names; 64 is beyond the rows."""
    assert specjax.load(folder).eos_ids == (5, 2, 7)


def test_the_makers_sampling_is_the_default(folder):
    model = specjax.load(folder)
    expected = SamplingParams(temperature=0.6, top_k=20, top_p=0.95, max_tokens=2048)
    assert model.sampling_params == expected
    greedy = dataclasses.replace(model, generation={"do_sample": False, "top_k": None})
    assert greedy.sampling_params == SamplingParams(temperature=0.0)


@pytest.mark.parametrize(
    "generation", [{"temperature": -1.0}, {"top_p": 0.0}, {"max_new_tokens": 0}]
)
def test_sampling_that_cannot_be_is_left_aside_with_a_warning(generation, caplog):
    model = dataclasses.replace(tiny_model(), generation=generation)
    assert model.sampling_params == SamplingParams()
    assert "generation_config.json is left aside" in caplog.text
    greedy = dataclasses.replace(model, generation={"do_sample": False, "top_p": 0.0})
    assert greedy.sampling_params == SamplingParams(temperature=0.0)


def test_a_request_that_asks_for_nothing_gets_the_makers_sampling():
    llm = LLM(dataclasses.replace(tiny_model(), generation={"temperature": 0.25}))
    for given, expected in [(None, 0.25), (SamplingParams(temperature=0.5), 0.5)]:
        (asked,) = llm._intake.take(["abc"], given, llm._running.programs.rule)
        assert asked.params.temperature == expected
    assert llm.get_default_sampling_params() == SamplingParams(temperature=0.25)
    assert LLM(tiny_model()).get_default_sampling_params() == SamplingParams()


def test_without_a_tokenizer_it_is_said_before_the_arrays_are_read(tmp_path, monkeypatch):
    write_hf(tmp_path / "source", hf_config("qwen2"), TENSORS)
    convert(tmp_path / "source", tmp_path / "converted")
    monkeypatch.setattr("ckpt_convert.store.load", None)
    with pytest.raises(TokenizerError, match=r"no tokenizer\.json"):
        specjax.load(tmp_path / "converted")

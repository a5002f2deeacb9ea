"""Hugging Face folders, converted and loaded again, tensor by tensor."""

import json
import shutil

import jax
import ml_dtypes
import numpy as np
import pytest
from convert.tiny_checkpoints import (
    expected_params,
    hf_config,
    hf_tensors,
    write_hf,
    write_safetensors,
)

from ckpt_convert import ConversionError, convert, load, read_manifest
from ckpt_convert.safetensors_source import read_header

pytestmark = pytest.mark.fast


def assert_same_tree(found, expected):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.asarray(a), b), found, expected)


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_every_family_lands_in_the_decoders_layout(tmp_path, family, shards):
    tensors = hf_tensors(family)
    source = write_hf(tmp_path / "source", hf_config(family), tensors, shards)
    convert(source, tmp_path / "converted")
    checkpoint = load(tmp_path / "converted")
    assert checkpoint.family == family
    assert checkpoint.eos_ids == (2,)
    assert_same_tree(checkpoint.params, expected_params(tensors))


def test_a_tied_head_is_not_stored_and_its_copy_is_left_out(tmp_path):
    config = hf_config("llama", tie_word_embeddings=True)
    tensors = hf_tensors("llama", tied=True)
    copy = {"lm_head.weight": tensors["model.embed_tokens.weight"]}
    copy["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(4, np.float32)
    write_hf(tmp_path / "source", config, tensors | copy)
    conversion = convert(tmp_path / "source", tmp_path / "converted")
    assert set(conversion.ignored) == set(copy)
    assert_same_tree(load(tmp_path / "converted").params, expected_params(tensors))


Y1_VALUES = [1.5, -2.0, 3.38e38, 1e-30]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_y1_values_and_dtype_are_exact(tmp_path, dtype):
    values = np.array(Y1_VALUES, np.float32)
    if dtype == "float16":
        values[2:] = 65504.0, 6e-8
    values = values.astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    file = tmp_path / "values.safetensors"
    write_safetensors(file, {"some": values, "none": np.empty((0, 4), values.dtype)})
    header = read_header(file)
    some, none = header["some"].read(), header["none"].read()
    assert some.dtype == values.dtype
    assert some.tobytes() == values.tobytes()
    assert (none.shape, none.dtype) == ((0, 4), values.dtype)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_y1_a_model_keeps_its_own_dtype(tmp_path, dtype):
    tensors = hf_tensors("llama", dtype=ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    write_hf(tmp_path / "source", hf_config("llama"), tensors)
    convert(tmp_path / "source", tmp_path / "converted")
    params = load(tmp_path / "converted").params
    assert {leaf.dtype.name for leaf in jax.tree.leaves(params)} == {dtype}
    assert_same_tree(params, expected_params(tensors))


def test_dtype_can_be_chosen_at_conversion_and_at_load(tmp_path):
    tensors = hf_tensors("llama")
    write_hf(tmp_path / "source", hf_config("llama"), tensors)
    convert(tmp_path / "source", tmp_path / "converted", dtype="bfloat16")
    expected = jax.tree.map(lambda leaf: leaf.astype(ml_dtypes.bfloat16), expected_params(tensors))
    assert_same_tree(load(tmp_path / "converted").params, expected)
    wide = load(tmp_path / "converted", dtype="float32").params
    assert_same_tree(wide, jax.tree.map(lambda leaf: leaf.astype(np.float32), expected))
    with pytest.raises(ConversionError, match="'int8'"):
        convert(tmp_path / "source", tmp_path / "other", dtype="int8")


def test_a_value_that_float16_cannot_hold_is_an_error(tmp_path):
    tensors = hf_tensors("llama")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 4] = 1e6
    write_hf(tmp_path / "source", hf_config("llama"), tensors)
    with pytest.raises(ConversionError, match=r"layers\.1\.mlp\.up_proj.*float16.*--dtype"):
        convert(tmp_path / "source", tmp_path / "converted", dtype="float16")
    assert not (tmp_path / "converted").exists()


def test_all_faulty_keys_are_reported_at_once(tmp_path):
    tensors = hf_tensors("llama")
    del tensors["model.norm.weight"], tensors["model.layers.2.mlp.up_proj.weight"]
    tensors["model.layers.0.self_attn.q_proj.bias"] = np.ones(32, np.float32)
    tensors["model.layers.1.mlp.down_proj.weight"] = np.ones((32, 63), np.float32)
    write_hf(tmp_path / "source", hf_config("llama"), tensors)
    with pytest.raises(ConversionError) as error:
        convert(tmp_path / "source", tmp_path / "converted")
    message = str(error.value)
    assert "missing model.norm.weight" in message
    assert "missing model.layers.2.mlp.up_proj.weight" in message
    assert "unmapped model.layers.0.self_attn.q_proj.bias" in message
    assert "misshapen model.layers.1.mlp.down_proj.weight: [32, 63], expected [32, 64]" in message
    assert "\n" not in message


@pytest.fixture
def two_shards(tmp_path):
    return write_hf(tmp_path / "source", hf_config("llama"), hf_tensors("llama"), shards=2)


SECOND = "model-00002-of-00002.safetensors"


def refused(source, destination) -> str:
    with pytest.raises(ConversionError) as error:
        convert(source, destination)
    assert not destination.exists()
    assert not list(destination.parent.glob(".*partial*"))
    return str(error.value)


def test_y5_a_missing_shard_is_named(two_shards, tmp_path):
    (two_shards / SECOND).unlink()
    assert SECOND in refused(two_shards, tmp_path / "converted")


@pytest.mark.parametrize("cut", [10, 10_000])
def test_y5_a_truncated_shard_is_named(two_shards, tmp_path, cut):
    content = (two_shards / SECOND).read_bytes()
    (two_shards / SECOND).write_bytes(content[:-cut])
    message = refused(two_shards, tmp_path / "converted")
    assert SECOND in message and "truncated" in message


def test_y5_a_stray_file_is_ignored(two_shards, tmp_path):
    stray = {"model.norm.weight": np.full(32, 7.0, np.float32)}
    write_safetensors(two_shards / "stray.safetensors", stray)
    convert(two_shards, tmp_path / "converted")
    assert_same_tree(load(tmp_path / "converted").params, expected_params(hf_tensors("llama")))


def test_y5_one_whole_file_goes_before_an_old_index(two_shards, tmp_path):
    tensors = hf_tensors("llama") | {"model.norm.weight": np.full(32, 7.0, np.float32)}
    write_safetensors(two_shards / "model.safetensors", tensors)
    (two_shards / SECOND).unlink()
    convert(two_shards, tmp_path / "converted")
    assert (np.asarray(load(tmp_path / "converted").params["norm"]) == 7.0).all()


@pytest.mark.parametrize("shards", [["a"], {"a": 1}])
def test_y5_an_index_that_maps_nothing(two_shards, tmp_path, shards):
    index = two_shards / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": shards}))
    assert "maps no tensors to files" in refused(two_shards, tmp_path / "converted")


def test_y5_an_index_that_names_an_absent_tensor(two_shards, tmp_path):
    index = two_shards / "model.safetensors.index.json"
    entries = json.loads(index.read_text())
    entries["weight_map"]["model.layers.9.mlp.up_proj.weight"] = SECOND
    index.write_text(json.dumps(entries))
    message = refused(two_shards, tmp_path / "converted")
    assert "model.layers.9.mlp.up_proj.weight" in message and SECOND in message


def test_y5_a_file_of_another_kind(two_shards, tmp_path):
    (two_shards / SECOND).write_bytes(b"<html>not found</html>" * 100)
    assert SECOND in refused(two_shards, tmp_path / "converted")


def test_an_integer_tensor_is_refused_by_name(tmp_path):
    tensors = hf_tensors("llama")
    tensors["model.layers.0.mlp.up_proj.weight"] = np.ones((64, 32), np.int8)
    write_hf(tmp_path / "source", hf_config("llama"), tensors)
    message = refused(tmp_path / "source", tmp_path / "converted")
    assert "model.layers.0.mlp.up_proj.weight" in message and "I8" in message


def test_generation_settings_and_the_tokenizers_files_come_along(tmp_path):
    source = write_hf(tmp_path / "source", hf_config("llama"), hf_tensors("llama"))
    generation = {"eos_token_id": [5, 2], "bos_token_id": 1, "temperature": 0.6, "top_k": None}
    (source / "generation_config.json").write_text(json.dumps(generation))
    (source / "tokenizer_config.json").write_text('{"chat_template": "x"}')
    (source / "chat_template.jinja").write_text("y")
    convert(source, tmp_path / "converted")
    shutil.rmtree(source)
    manifest = read_manifest(tmp_path / "converted")
    assert (manifest.eos_ids, manifest.bos_id) == ((5, 2), 1)
    assert dict(manifest.generation) == {"temperature": 0.6}
    files = load(tmp_path / "converted").tokenizer_files
    assert files["tokenizer_config.json"].read_text() == '{"chat_template": "x"}'
    assert files["chat_template.jinja"].read_text() == "y"

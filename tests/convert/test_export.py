"""A checkpoint written back as a Hugging Face folder is the source, bit for bit."""

import json
import os
import shutil
from collections import namedtuple

import jax
import ml_dtypes
import numpy as np
import pytest
from convert.family_checkpoints import write_family_gguf
from convert.test_families import GGUF, model
from convert.tiny_checkpoints import hf_config, hf_tensors, write_gguf, write_hf
from models.hugging_face import (
    MODELS,
    read_golden,
    tokens,
    transformers_logits,
    transformers_model,
    weights,
)
from safetensors.numpy import load_file

from ckpt_convert import ConversionError, convert, export, load, safetensors_writer
from ckpt_convert.__main__ import main
from specjax.models.decoder import DecoderTarget

pytestmark = pytest.mark.fast

DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
INDEX = "model.safetensors.index.json"


def assert_same_tensors(found, expected):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        assert found[name].tobytes() == tensor.tobytes(), name


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_round_trip_is_bit_exact(tmp_path, dtype):
    tensors = hf_tensors("qwen2", tied=True, dtype=DTYPES[dtype])
    config = hf_config("qwen2", tie_word_embeddings=True, torch_dtype=dtype, note="kept")
    write_hf(tmp_path / "source", config, tensors, shards=2)
    convert(tmp_path / "source", tmp_path / "converted")
    done = export(tmp_path / "converted", tmp_path / "exported")
    assert (done.tensors, done.files) == (len(tensors), 1)
    assert_same_tensors(load_file(tmp_path / "exported" / "model.safetensors"), tensors)
    assert json.loads((tmp_path / "exported" / "config.json").read_text()) == config


@pytest.mark.parametrize("name", MODELS)
def test_every_family_comes_back_bit_for_bit(tmp_path, name):
    config, shapes, _ = read_golden(name)
    tensors = weights(shapes)
    write_hf(tmp_path / "source", config, tensors)
    convert(tmp_path / "source", tmp_path / "converted")
    export(tmp_path / "converted", tmp_path / "exported")
    assert_same_tensors(load_file(tmp_path / "exported" / "model.safetensors"), tensors)
    found = json.loads((tmp_path / "exported" / "config.json").read_text())
    assert found == config | {"dtype": "float32"}


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_the_text_model_of_one_with_vision_is_exported_alone(tmp_path, prefix):
    config, shapes, _ = read_golden("gemma3")
    tensors = weights(shapes)
    deeper = {prefix + name.removeprefix("model."): value for name, value in tensors.items()}
    deeper["vision_tower.patch.weight"] = np.ones((2, 2), np.float32)
    outer = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": config}
    write_hf(tmp_path / "source", outer, deeper)
    convert(tmp_path / "source", tmp_path / "converted")
    export(tmp_path / "converted", tmp_path / "exported")
    assert_same_tensors(load_file(tmp_path / "exported" / "model.safetensors"), tensors)
    found = json.loads((tmp_path / "exported" / "config.json").read_text())
    assert found["architectures"] == ["Gemma3ForCausalLM"]


def test_shards_with_their_index(tmp_path, monkeypatch):
    monkeypatch.setattr(safetensors_writer, "SHARD", 20_000)
    tensors = hf_tensors("llama", dtype=np.float16)
    write_hf(tmp_path / "source", hf_config("llama"), tensors)
    convert(tmp_path / "source", tmp_path / "converted")
    done = export(tmp_path / "converted", tmp_path / "exported")
    index = json.loads((tmp_path / "exported" / INDEX).read_text())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors.values())
    files = sorted(set(index["weight_map"].values()))
    assert len(files) == done.files > 2
    assert files[0] == f"model-00001-of-{done.files:05d}.safetensors"
    found = {}
    for file in files:
        inside = load_file(tmp_path / "exported" / file)
        assert sum(tensor.nbytes for tensor in inside.values()) <= 20_000
        assert all(index["weight_map"][name] == file for name in inside)
        found |= inside
    assert_same_tensors(found, tensors)
    convert(tmp_path / "exported", tmp_path / "again")
    expected, again = load(tmp_path / "converted"), load(tmp_path / "again")
    jax.tree.map(np.testing.assert_array_equal, again.params, expected.params)


def test_another_dtype_is_said_in_config_json(tmp_path):
    config = hf_config("llama", torch_dtype="float32")
    write_hf(tmp_path / "source", config, hf_tensors("llama"))
    convert(tmp_path / "source", tmp_path / "converted", dtype="bfloat16")
    export(tmp_path / "converted", tmp_path / "exported")
    found = json.loads((tmp_path / "exported" / "config.json").read_text())
    assert found == config | {"torch_dtype": "bfloat16"}
    tensors = load_file(tmp_path / "exported" / "model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {np.dtype(ml_dtypes.bfloat16)}


def test_the_tokenizer_and_generation_settings_go_along(tmp_path):
    source = write_hf(tmp_path / "source", hf_config("llama"), hf_tensors("llama"))
    (source / "generation_config.json").write_text('{"eos_token_id": [5, 2], "top_k": null}')
    (source / "tokenizer_config.json").write_text('{"chat_template": "x"}')
    convert(source, tmp_path / "converted")
    export(tmp_path / "converted", tmp_path / "exported")
    for name in ("generation_config.json", "tokenizer_config.json"):
        assert (tmp_path / "exported" / name).read_text() == (source / name).read_text()


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("metadata", [{}, {"rope.scale_linear": 2.0}])
def test_a_gguf_gets_a_config_json_of_its_own(tmp_path, architecture, metadata):
    tensors = hf_tensors(architecture)
    write_gguf(tmp_path / "model.gguf", architecture, tensors, metadata=metadata)
    conversion = convert(tmp_path / "model.gguf", tmp_path / "converted")
    export(tmp_path / "converted", tmp_path / "exported")
    assert_same_tensors(load_file(tmp_path / "exported" / "model.safetensors"), tensors)
    assert convert(tmp_path / "exported", tmp_path / "again").config == conversion.config


@pytest.mark.parametrize("name", sorted(set(GGUF) - {"mixtral"}))
def test_so_do_ggufs_of_the_other_families(tmp_path, name):
    architecture, changes = GGUF[name]
    config, tensors = model(name, **changes)
    write_family_gguf(tmp_path / "model.gguf", architecture, config, tensors)
    conversion = convert(tmp_path / "model.gguf", tmp_path / "converted")
    export(tmp_path / "converted", tmp_path / "exported")
    found = load_file(tmp_path / "exported" / "model.safetensors")
    assert found.keys() == tensors.keys()
    for tensor, values in tensors.items():  # but for the sign of a zero, where one is added
        np.testing.assert_array_equal(found[tensor], values)
    assert convert(tmp_path / "exported", tmp_path / "again").config == conversion.config


@pytest.mark.torch
@pytest.mark.parametrize("name", sorted(set(GGUF) - {"mixtral"}))
def test_transformers_reads_such_a_config_json(tmp_path, name):
    import transformers

    architecture, changes = GGUF[name]
    config, tensors = model(name, **changes)
    write_family_gguf(tmp_path / "model.gguf", architecture, config, tensors)
    convert(tmp_path / "model.gguf", tmp_path / "converted")
    export(tmp_path / "converted", tmp_path / "exported")
    there = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "exported", attn_implementation="eager"
    ).eval()
    checkpoint = load(tmp_path / "converted")
    target = DecoderTarget(checkpoint.config)
    ids = tokens(6)
    cache = target.init_cache(*ids.shape)
    logits = jax.jit(target)(checkpoint.params, ids, None, cache).logits
    np.testing.assert_allclose(transformers_logits(there, ids), logits, atol=1e-4, rtol=1e-3)


def test_a_gguf_without_a_config_json_to_make_is_refused_by_name(tmp_path):
    """Windows on every layer of a "llama" file: Hugging Face's Llama has none."""
    metadata = {"attention.sliding_window": 8}
    write_gguf(tmp_path / "model.gguf", "llama", hf_tensors("llama"), metadata=metadata)
    convert(tmp_path / "model.gguf", tmp_path / "converted")
    with pytest.raises(ConversionError, match=r"family llama .*convert it from the safetensors"):
        export(tmp_path / "converted", tmp_path / "exported")
    assert sorted(os.listdir(tmp_path)) == ["converted", "model.gguf"]


def test_bad_exports_are_one_line(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    source = write_hf(tmp_path / "source", hf_config("llama"), hf_tensors("llama"))
    convert(source, tmp_path / "converted")
    (tmp_path / "there").mkdir()
    for named, arguments in {
        "exists": (tmp_path / "converted", tmp_path / "there"),
        "no specjax checkpoint": (source, tmp_path / "exported"),
        "no folder": (tmp_path / "absent", tmp_path / "exported"),
    }.items():
        assert main(["export", *map(str, arguments)]) == 1
        said = capsys.readouterr()
        assert said.err.startswith("error: ") and said.err.count("\n") == 1
        assert named in said.err and said.out == ""
    assert not (tmp_path / "exported").exists()
    assert main(["export", str(tmp_path / "converted"), str(tmp_path / "exported")]) == 0
    assert "LlamaForCausalLM, 30 tensors in 1 files" in capsys.readouterr().out


def test_a_full_disk_is_known_before_writing(tmp_path, monkeypatch):
    write_hf(tmp_path / "source", hf_config("llama"), hf_tensors("llama"))
    convert(tmp_path / "source", tmp_path / "converted")
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**9, 10**9 - 10, 10))
    with pytest.raises(ConversionError, match=r"disk is too full.*free some space"):
        export(tmp_path / "converted", tmp_path / "exported")
    assert sorted(os.listdir(tmp_path)) == ["converted", "source"]


def test_quantised_weights_are_refused_by_name(tmp_path):
    write_hf(tmp_path / "source", hf_config("llama"), hf_tensors("llama"))
    convert(tmp_path / "source", tmp_path / "converted", quantize="int8")
    with pytest.raises(ConversionError, match="holds int8 weights.*without --quantize"):
        export(tmp_path / "converted", tmp_path / "exported")


def test_damaged_arrays_leave_nothing(tmp_path):
    write_hf(tmp_path / "source", hf_config("llama"), hf_tensors("llama"))
    convert(tmp_path / "source", tmp_path / "converted")
    for file in (tmp_path / "converted" / "params").rglob("manifest.ocdbt"):
        file.write_bytes(b"\0" * file.stat().st_size)
    with pytest.raises(ConversionError, match="incomplete or damaged"):
        export(tmp_path / "converted", tmp_path / "exported")
    assert sorted(os.listdir(tmp_path)) == ["converted", "source"]


@pytest.mark.torch
@pytest.mark.parametrize("name", MODELS)
def test_transformers_reads_the_export(tmp_path, name):
    import transformers

    original, _ = transformers_model(name, seed=5)
    original.save_pretrained(tmp_path / "source")
    convert(tmp_path / "source", tmp_path / "converted")
    export(tmp_path / "converted", tmp_path / "exported")
    again = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "exported", attn_implementation="eager"
    ).eval()
    assert type(again) is type(original)
    np.testing.assert_array_equal(
        transformers_logits(again, tokens(6)), transformers_logits(original, tokens(6))
    )

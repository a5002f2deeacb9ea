"""GGUF files, converted and loaded again, tensor by tensor."""

import sys

import jax
import ml_dtypes
import numpy as np
import pytest
from convert.tiny_checkpoints import HEAD_DIM, expected_params, hf_tensors, write_gguf

from ckpt_convert import ConversionError, convert, load
from ckpt_convert.families.gguf_config import llama3_rope
from ckpt_convert.gguf_source import GGUFSource
from specjax.models.rope import Rope

pytestmark = pytest.mark.fast


def converted(tmp_path, *, dtype="auto"):
    convert(tmp_path / "model.gguf", tmp_path / "converted", dtype=dtype)
    return load(tmp_path / "converted")


def assert_same_tree(found, expected):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.asarray(a), b), found, expected)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_every_architecture_lands_in_the_decoders_layout(tmp_path, architecture, tied):
    """Only "llama" files have their query and key rows interleaved."""
    tensors = hf_tensors(architecture, tied=tied)
    write_gguf(tmp_path / "model.gguf", architecture, tensors)
    checkpoint = converted(tmp_path)
    assert checkpoint.config.tie_embeddings == tied
    assert checkpoint.config.rms_norm_eps == 1e-5
    assert_same_tree(checkpoint.params, expected_params(tensors))


def test_rows_taken_as_they_lie_would_be_noticed(tmp_path):
    """The negative control of the row order: written as qwen2, the same rows stay interleaved."""
    tensors = hf_tensors("llama")
    write_gguf(tmp_path / "model.gguf", "llama", tensors)
    source = GGUFSource(tmp_path / "model.gguf")
    name = "model.layers.0.self_attn.q_proj.weight"
    assert not np.array_equal(source.read("blk.0.attn_q.weight"), tensors[name])


@pytest.mark.parametrize("quantisation", ["Q8_0", "Q4_0", "Q4_1"])
@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_quantised_matrices_become_the_formulas_float32(tmp_path, architecture, quantisation):
    tensors = hf_tensors(architecture)
    held = write_gguf(tmp_path / "model.gguf", architecture, tensors, quantisation=quantisation)
    params = converted(tmp_path).params
    assert {leaf.dtype.name for leaf in jax.tree.leaves(params)} == {"float32"}
    assert_same_tree(params, expected_params(held))
    up = "model.layers.0.mlp.up_proj.weight"
    assert not np.array_equal(held[up], tensors[up])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_y1_half_precision_files_keep_values_and_dtype(tmp_path, dtype):
    tensors = hf_tensors("llama", dtype=ml_dtypes.bfloat16 if dtype == "bfloat16" else np.float16)
    write_gguf(tmp_path / "model.gguf", "llama", tensors)
    params = converted(tmp_path).params
    assert {leaf.dtype.name for leaf in jax.tree.leaves(params)} == {dtype}
    assert_same_tree(params, expected_params(tensors))


def llama3_factors(rope: Rope, width: int) -> np.ndarray:
    """The divisors of the frequencies, as llama.cpp's converter writes them."""
    factors = []
    for pair in range(width // 2):
        wave_length = 2 * np.pi * rope.theta ** (2 * pair / width)
        low = rope.original_max_position / rope.low_freq_factor
        high = rope.original_max_position / rope.high_freq_factor
        if wave_length < high:
            factors.append(1.0)
        elif wave_length > low:
            factors.append(rope.factor)
        else:
            smooth = (rope.original_max_position / wave_length - rope.low_freq_factor) / (
                rope.high_freq_factor - rope.low_freq_factor
            )
            factors.append(1 / ((1 - smooth) / rope.factor + smooth))
    return np.array(factors, np.float32)


@pytest.mark.parametrize(
    "rope",
    [
        Rope(500_000.0, "llama3", 8.0, 1.0, 4.0, 8192),
        Rope(500_000.0, "llama3", 32.0, 1.0, 4.0, 8192),
        Rope(10_000.0, "llama3", 4.0, 2.0, 7.0, 2048),
    ],
)
@pytest.mark.parametrize("width", [64, 128])
def test_rope_factors_become_llama3_scaling(rope, width):
    found = llama3_rope(llama3_factors(rope, width), rope.theta, width)
    np.testing.assert_allclose(
        found.inverse_frequencies(width), rope.inverse_frequencies(width), rtol=2e-3
    )
    if rope.low_freq_factor == 1.0:
        assert found == rope


def test_rope_factors_in_a_file(tmp_path):
    rope = Rope(500_000.0, "llama3", 8.0, 1.0, 4.0, 8192)
    factors = llama3_factors(rope, HEAD_DIM)
    write_gguf(
        tmp_path / "model.gguf",
        "llama",
        hf_tensors("llama"),
        metadata={"rope.freq_base": rope.theta},
        extra={"rope_freqs.weight": factors},
    )
    conversion = convert(tmp_path / "model.gguf", tmp_path / "converted")
    assert list(conversion.ignored) == ["rope_freqs.weight"]
    assert 1.0 < factors[2] < factors[3] == 8.0
    assert conversion.config.rope == rope


def test_rope_factors_that_no_scaling_explains_are_refused():
    factors = np.array([1.0, 3.0, 2.0, 8.0, 1.0, 5.0, 8.0, 2.0])
    with pytest.raises(ConversionError, match="rope_freqs"):
        llama3_rope(factors, 10_000.0, 16)


def test_a_very_old_table_of_frequencies_is_left_out(tmp_path):
    extra = {"rope_freqs.weight": Rope().inverse_frequencies(HEAD_DIM).astype(np.float32)}
    write_gguf(tmp_path / "model.gguf", "llama", hf_tensors("llama"), extra=extra)
    conversion = convert(tmp_path / "model.gguf", tmp_path / "converted")
    assert conversion.config.rope == Rope()
    assert list(conversion.ignored) == ["rope_freqs.weight"]


@pytest.mark.parametrize(
    ("metadata", "rope"),
    [
        ({"rope.scaling.type": "none"}, Rope()),
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}, Rope(1e4, "linear", 4.0)),
        ({"rope.scale_linear": 2.0}, Rope(1e4, "linear", 2.0)),
    ],
)
def test_y3_rope_scaling_in_metadata(tmp_path, metadata, rope):
    write_gguf(tmp_path / "model.gguf", "qwen2", hf_tensors("qwen2"), metadata=metadata)
    assert GGUFSource(tmp_path / "model.gguf").config.rope == rope


@pytest.mark.parametrize("kind", ["yarn", "longrope", "no-such-type"])
def test_y3_other_rope_scalings_are_refused_by_name(tmp_path, kind):
    metadata = {"rope.scaling.type": kind, "rope.scaling.factor": 4.0}
    write_gguf(tmp_path / "model.gguf", "qwen2", hf_tensors("qwen2"), metadata=metadata)
    with pytest.raises(ConversionError, match=f"'{kind}'"):
        GGUFSource(tmp_path / "model.gguf")


def test_an_unknown_architecture_is_refused_by_name_with_the_known_ones(tmp_path):
    write_gguf(tmp_path / "model.gguf", "mamba", hf_tensors("llama"))
    with pytest.raises(ConversionError, match=r"'mamba'.*llama, olmo2, .*qwen3"):
        convert(tmp_path / "model.gguf", tmp_path / "converted")


@pytest.mark.parametrize("kept", [0.999, 0.9, 0.5, 0.05, 0.001])
def test_a_truncated_file_is_named(tmp_path, kept):
    file = tmp_path / "model.gguf"
    write_gguf(file, "llama", hf_tensors("llama"))
    content = file.read_bytes()
    file.write_bytes(content[: int(len(content) * kept)])
    with pytest.raises(ConversionError, match=r"model\.gguf is truncated"):
        convert(file, tmp_path / "converted")
    assert not (tmp_path / "converted").exists()


def test_a_file_of_another_kind_is_named(tmp_path):
    (tmp_path / "model.gguf").write_bytes(b"<html>not found</html>")
    with pytest.raises(ConversionError, match=r"model\.gguf is no GGUF"):
        convert(tmp_path / "model.gguf", tmp_path / "converted")


def test_without_the_gguf_package_the_error_names_the_extra(tmp_path, monkeypatch):
    write_gguf(tmp_path / "model.gguf", "llama", hf_tensors("llama"))
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ConversionError, match=r"pip install 'specjax\[convert\]'"):
        convert(tmp_path / "model.gguf", tmp_path / "converted")

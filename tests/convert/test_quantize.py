"""Checkpoints with quantised matrices: what is written, what is read back, what is refused."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from convert.tiny_checkpoints import SIZES, expected_params, hf_config, hf_tensors, write_hf
from tokenizers import Tokenizer, models

import specjax.checkpoint
from ckpt_convert import ConversionError, convert, load, read_manifest, store
from ckpt_convert.__main__ import main
from specjax import LLM
from specjax.checkpoint import Model, check_loaded
from specjax.models import DecoderTarget
from specjax.models.decoder import parameter_axes
from specjax.models.quantised import SCHEMES, Quantised, quantise

LAYERS = SIZES["num_hidden_layers"]


def write_source(folder, tensors):
    write_hf(folder, hf_config("llama"), tensors)
    words = {f"word{index}": index for index in range(SIZES["vocab_size"])}
    Tokenizer(models.WordLevel(words, unk_token="word0")).save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return write_source(tmp_path_factory.mktemp("source") / "llama", hf_tensors("llama"))


@pytest.fixture(scope="module")
def converted(source, tmp_path_factory):
    """`converted(scheme)`: the checkpoint folder, written once."""
    folder = tmp_path_factory.mktemp("converted")
    for scheme in (None, *SCHEMES):
        convert(source, folder / str(scheme), quantize=scheme)
    return lambda scheme: folder / str(scheme)


def plain():
    return expected_params(hf_tensors("llama"))


def array_bytes(folder) -> int:
    """What the arrays take on disk, as the manifest lists it."""
    return sum(size for name, size in read_manifest(folder).files.items() if "/d/" in name)


def test_the_command_line_quantises_and_says_so(source, tmp_path, capsys):
    assert main([str(source), str(tmp_path / "out"), "--quantize", "int4"]) == 0
    assert "float32, matrices in int4" in capsys.readouterr().out
    assert json.loads((tmp_path / "out" / "config.json").read_text())["quantization"] == "int4"


@pytest.mark.parametrize("scheme", SCHEMES)
def test_what_is_read_is_what_quantising_the_source_gives(scheme, converted):
    manifest = read_manifest(converted(scheme))
    assert manifest.quantization == scheme
    found = load(converted(scheme)).params
    axes = parameter_axes(manifest.config, stacked=True)
    expected = quantise(plain(), axes, scheme)
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.asarray(a), b), found, expected)
    types = {leaf.dtype for leaf in jax.tree.leaves(found)}
    assert types == {np.dtype(np.int8), np.dtype(np.float32)} | (
        {jnp.dtype(jnp.bfloat16)} if scheme == "int4" else set()
    )


def test_two_int4_share_a_byte_on_the_disk(converted):
    """Of an odd number of layers the last one's have a byte each."""
    sizes = {scheme: array_bytes(converted(scheme)) for scheme in (None, *SCHEMES)}
    weights = sum(leaf.size for leaf in jax.tree.leaves(plain()["layers"]) if leaf.ndim > 2)
    assert sizes[None] / 4.0 < sizes["int8"] < sizes[None] / 2.5
    saved = weights * (1 - (LAYERS + 1) / (2 * LAYERS))
    scales = sizes["int8"] - sizes["int4"] - saved
    assert abs(scales) < 0.25 * weights


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_plain_checkpoint_quantised_while_loading_is_the_same_model(scheme, converted):
    at_rest = specjax.checkpoint.load(converted(scheme))
    in_use = specjax.checkpoint.load(converted(None), quantization=scheme)
    assert at_rest.target == in_use.target
    assert in_use.target.quantization == scheme
    jax.tree.map(np.testing.assert_array_equal, at_rest.params, in_use.params)
    axes, params = at_rest.target.parameter_axes(), at_rest.params
    assert jax.tree.structure(axes, is_leaf=lambda node: type(node) is tuple) == jax.tree.structure(
        params
    )


@pytest.mark.parametrize("scheme", SCHEMES)
def test_read_onto_a_mesh(scheme, converted):
    from specjax.sharding import make_mesh

    mesh = make_mesh(model=2)
    split = specjax.checkpoint.load(converted(scheme), mesh=mesh)
    whole = specjax.checkpoint.load(converted(scheme))
    jax.tree.map(np.testing.assert_array_equal, split.params, whole.params)
    for name in ("qkv", "gate_up", "down", "out"):
        values = split.params["layers"][name].values
        assert len(values.sharding.device_set) == 2
        if scheme == "int8" or name != "down":  # 64 inputs are one group, which is not split
            assert values.addressable_shards[0].data.size * 2 == values.size


def test_a_contradiction_is_refused(converted):
    with pytest.raises(ValueError, match="holds int8 weights, which cannot be made int4.*--quant"):
        specjax.checkpoint.load(converted("int8"), quantization="int4")
    assert specjax.checkpoint.load(converted("int8"), quantization="int8").target.quantization


def test_a_model_in_memory_is_not_quantised(converted):
    loaded = specjax.checkpoint.load(converted(None))
    with pytest.raises(ValueError, match="loaded with plain weights: load it with quantization='i"):
        check_loaded(loaded, "int8", "auto")
    with pytest.raises(ValueError, match="'int5' is not known"):
        check_loaded(loaded, "int5", "auto")
    other = dataclasses.replace(
        loaded, target=DecoderTarget(loaded.target.config, quantization="int4")
    )
    assert isinstance(other, Model)
    check_loaded(other, "int4", "auto")
    check_loaded(other, None, "auto")
    with pytest.raises(ValueError, match="the loaded model holds int4 weights"):
        check_loaded(other, "int8", "auto")


def test_the_engine_quantises_what_it_loads_and_nothing_else(converted):
    engine = LLM(converted(None), quantization="int8", max_model_len=64)
    assert engine.model.target.quantization == "int8"
    assert LLM(engine.model, max_model_len=64).model is engine.model
    with pytest.raises(ValueError, match="the loaded model holds int8 weights"):
        LLM(engine.model, quantization="int4")
    with pytest.raises(ValueError, match="holds int4 weights, which cannot be made int8"):
        LLM(converted("int4"), quantization="int8")


def test_unknown_schemes_are_refused(source, tmp_path, converted):
    with pytest.raises(ConversionError, match="'int2' is not known .known: int8, int4"):
        convert(source, tmp_path / "out", quantize="int2")
    with pytest.raises(ValueError, match="'int2' is not known"):
        specjax.checkpoint.load(converted(None), quantization="int2")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("fault", [np.nan, np.inf])
def test_faulty_weights_are_refused_by_name(fault, tmp_path):
    tensors = hf_tensors("llama")
    tensors["model.layers.1.mlp.down_proj.weight"][3, 4] = fault
    source = write_source(tmp_path / "source", tensors)
    with pytest.raises(ConversionError, match="layers.down has NaN or infinite values"):
        convert(source, tmp_path / "out", quantize="int8")
    convert(source, tmp_path / "plain")
    with pytest.raises(ValueError, match="layers.down has NaN or infinite values"):
        specjax.checkpoint.load(tmp_path / "plain", quantization="int4")
    assert not (tmp_path / "out").exists()


def test_checkpoints_from_before_have_plain_weights(converted):
    file = converted(None) / store.MANIFEST
    entries = json.loads(file.read_text())
    del entries["quantization"]
    file.write_text(json.dumps(entries))
    assert read_manifest(converted(None)).quantization is None
    assert not any(
        isinstance(leaf, Quantised)
        for leaf in jax.tree.leaves(
            load(converted(None)).params, is_leaf=lambda node: isinstance(node, Quantised)
        )
    )

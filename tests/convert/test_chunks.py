"""A checkpoint cut for a mesh: every device reads its own bytes, counted by TensorStore itself."""

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
import tensorstore
from convert.tiny_checkpoints import SIZES, expected_params, hf_config, hf_tensors, write_hf

from ckpt_convert import ConversionError, arrays, chunks, convert, load, load_config
from specjax.models.decoder import DecoderTarget, parameter_axes
from specjax.sharding import make_mesh, parameter_shardings

pytestmark = pytest.mark.fast

READ = "/tensorstore/kvstore/file/bytes_read"


@pytest.fixture
def wide(monkeypatch):
    """Matrices large enough that indices and small files don't count."""
    for name, size in {"vocab_size": 512, "hidden_size": 128, "intermediate_size": 256}.items():
        monkeypatch.setitem(SIZES, name, size)


def bytes_read() -> int:
    found = tensorstore.experimental_collect_matching_metrics(READ)
    return sum(value["value"] for metric in found for value in metric["values"])


def restored(folder, mesh):
    """The parameters on the mesh, and the bytes that reading them took."""
    axes = parameter_axes(load_config(folder), stacked=True)
    before = bytes_read()
    params = load(folder, shardings=lambda shapes: parameter_shardings(mesh, axes, shapes)).params
    return params, bytes_read() - before


def stored_chunks(folder):
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        found = checkpointer.metadata(folder / "params").item_metadata.tree
    return jax.tree.map(lambda leaf: tuple(leaf.storage.chunk_shape), found)


def own_bytes(params) -> int:
    """What the devices hold together, copies on other devices counted once."""
    return sum(
        sum({str(shard.index): shard.data.nbytes for shard in leaf.addressable_shards}.values())
        for leaf in jax.tree.leaves(params)
    )


@pytest.mark.parametrize(("name", "mesh"), [("2x2", (2, 2)), ("model=2", (1, 2))])
def test_each_device_reads_its_own_bytes(tmp_path, wide, name, mesh):
    tensors = hf_tensors("qwen2")
    source = write_hf(tmp_path / "source", hf_config("qwen2"), tensors)
    convert(source, tmp_path / "cut", shard_for=name)
    mesh = make_mesh(*mesh)
    params, read = restored(tmp_path / "cut", mesh)
    jax.tree.map(np.testing.assert_array_equal, params, expected_params(tensors))
    parts = jax.tree.map(lambda leaf: leaf.sharding.shard_shape(leaf.shape), params)
    assert stored_chunks(tmp_path / "cut") == parts
    assert parts["layers"]["qkv"] == (3, 128, 1, 4, 8)
    assert own_bytes(params) < read < 1.1 * own_bytes(params)


def test_a_part_above_the_largest_chunk_is_cut_further(tmp_path, wide, monkeypatch):
    monkeypatch.setattr(arrays, "CHUNK", 60_000)
    tensors = hf_tensors("llama")
    convert(
        write_hf(tmp_path / "source", hf_config("llama"), tensors),
        tmp_path / "cut",
        shard_for="data=2,model=2",
    )
    params, read = restored(tmp_path / "cut", make_mesh(2, 2))
    jax.tree.map(np.testing.assert_array_equal, params, expected_params(tensors))
    assert read < 1.2 * own_bytes(params)
    other, _ = restored(tmp_path / "cut", make_mesh(4, 1))
    jax.tree.map(np.testing.assert_array_equal, other, params)


@pytest.mark.parametrize("scheme", ["int8", "int4"])
def test_quantised_parameters_are_cut_as_well(tmp_path, wide, scheme):
    source = write_hf(tmp_path / "source", hf_config("llama"), hf_tensors("llama"))
    convert(source, tmp_path / "plain", quantize=scheme)
    convert(source, tmp_path / "cut", quantize=scheme, shard_for="1x2")
    assert stored_chunks(tmp_path / "cut")["embed"] == {"values": (256, 128), "scales": (256,)}
    mesh = make_mesh(1, 2)
    target = DecoderTarget(load_config(tmp_path / "cut"), quantization=scheme)
    shardings = parameter_shardings(mesh, target.parameter_axes(), target.abstract_params())
    cut, plain = load(tmp_path / "cut", shardings=shardings), load(tmp_path / "plain")
    jax.tree.map(np.testing.assert_array_equal, cut.params, plain.params)


@pytest.mark.parametrize(
    ("shape", "largest", "expected"),
    [
        ((6, 4, 10), 4 * 240, (6, 4, 10)),
        ((6, 4, 10), 4 * 239, (3, 4, 10)),
        ((6, 4, 10), 4 * 40, (1, 4, 10)),
        ((7, 4, 10), 4 * 20, (1, 2, 10)),
        ((2, 2, 10), 4, (1, 1, 1)),
    ],
)
def test_cuts_are_even(shape, largest, expected):
    assert chunks._cut(shape, 4, largest) == expected


@pytest.mark.parametrize(
    ("text", "sizes"),
    [("2x4", (2, 4)), ("data=2,model=4", (2, 4)), ("model=8", (1, 8)), ("data=3", (3, 1))],
)
def test_meshes_are_read(text, sizes):
    assert tuple(chunks.parse_mesh(text).shape.values()) == sizes


@pytest.mark.parametrize("text", ["", "8", "2x0", "2x4x8", "rows=2", "model=2,data=2", "data=,"])
def test_other_meshes_are_refused(tmp_path, text):
    with pytest.raises(ConversionError, match="2x4, or data=2,model=4"):
        convert(tmp_path / "absent", tmp_path / "converted", shard_for=text)

"""The checkpoint folder: written in one step or not at all, read onto any devices, never half."""

import json
import os
import shutil
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import jax
import numpy as np
import pytest
from convert.tiny_checkpoints import (
    SIZES,
    expected_params,
    hf_config,
    hf_tensors,
    write_gguf,
    write_hf,
)
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from ckpt_convert import (
    ConversionError,
    arrays,
    atomic_folder,
    convert,
    load,
    load_config,
    read_manifest,
)
from ckpt_convert.__main__ import main


@pytest.fixture
def source(tmp_path) -> Path:
    return write_hf(tmp_path / "source", hf_config("llama"), hf_tensors("llama"))


@pytest.fixture
def converted(source, tmp_path) -> Path:
    convert(source, tmp_path / "converted")
    return tmp_path / "converted"


def leftovers(folder: Path) -> list[str]:
    return [file.name for file in folder.iterdir() if file.name.startswith(".")]


def assert_same_tree(found, expected):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.asarray(a), b), found, expected)


# The command line.


def test_the_command_prints_what_it_found(run_converter, source, tmp_path):
    run = run_converter(source, tmp_path / "converted", "--dtype", "bfloat16")
    assert (run.returncode, run.stderr) == (0, "")
    for fact in ("llama", "bfloat16", "64", "128", "30", str(tmp_path / "converted")):
        assert fact in run.stdout
    assert read_manifest(tmp_path / "converted").dtype == "bfloat16"
    assert leftovers(tmp_path) == []


def broken_sources(folder: Path) -> dict[str, Path]:
    write_gguf(folder / "cut.gguf", "llama", hf_tensors("llama"))
    content = (folder / "cut.gguf").read_bytes()
    (folder / "cut.gguf").write_bytes(content[: len(content) // 2])
    (folder / "empty").mkdir()
    (folder / "notes.txt").write_text("no model")
    write_hf(folder / "mamba", hf_config("llama", architectures=["MambaForCausalLM"]), {})
    write_hf(folder / "cut", hf_config("llama"), hf_tensors("llama"))
    with open(folder / "cut" / "model.safetensors", "r+b") as file:
        file.truncate(5000)
    return {
        "absent": folder / "absent",
        "config.json": folder / "empty",
        "notes.txt": folder / "notes.txt",
        "MambaForCausalLM": folder / "mamba",
        "cut.gguf is truncated": folder / "cut.gguf",
        "model.safetensors is truncated": folder / "cut",
    }


def test_bad_input_is_one_line_with_status_1(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")  # the command sets it, for its own process
    (tmp_path / "sources").mkdir()
    for named, path in broken_sources(tmp_path / "sources").items():
        assert main([str(path), str(tmp_path / "converted")]) == 1, named
        said = capsys.readouterr()
        assert said.err.startswith("error: ") and said.err.count("\n") == 1
        assert named in said.err
        assert said.out == ""
        assert os.listdir(tmp_path) == ["sources"]


def test_a_failing_command_prints_no_traceback(run_converter, tmp_path):
    run = run_converter(tmp_path / "absent.gguf", tmp_path / "converted")
    assert run.returncode == 1
    assert run.stderr == f"error: {tmp_path / 'absent.gguf'} does not exist\n"


def test_an_existing_destination_is_refused_unless_forced(source, converted):
    before = read_manifest(converted)
    with pytest.raises(ConversionError, match="exists; .*--force"):
        convert(source, converted)
    assert read_manifest(converted) == before
    convert(source, converted, dtype="float16", overwrite=True)
    assert read_manifest(converted).dtype == "float16"
    assert leftovers(converted.parent) == []


def test_force_never_replaces_what_is_no_checkpoint(source, tmp_path):
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.tex").write_text("years of work")
    with pytest.raises(ConversionError, match="left alone"):
        convert(source, tmp_path / "thesis", overwrite=True)
    assert (tmp_path / "thesis" / "chapter.tex").read_text() == "years of work"


def test_force_never_replaces_the_source(source, tmp_path):
    """Which may lie inside a checkpoint, where an export put it."""
    convert(source, tmp_path / "outer")
    inner = tmp_path / "outer" / "hf"
    shutil.copytree(source, inner)
    with pytest.raises(ConversionError, match="which would be replaced"):
        convert(inner, tmp_path / "outer", overwrite=True)
    assert (inner / "config.json").exists()


def test_what_appeared_meanwhile_is_left_alone(tmp_path):
    path = tmp_path / "converted"
    with pytest.raises(ConversionError, match="it appeared meanwhile and is left alone"):  # noqa: SIM117
        with atomic_folder.written_whole(path, 0) as partial:
            (partial / "ours").touch()
            path.mkdir()
            (path / "theirs").touch()
    assert [file.name for file in path.iterdir()] == ["theirs"]
    assert leftovers(tmp_path) == []


def test_two_conversions_to_one_place_do_not_meet(tmp_path):
    path = tmp_path / "m[v2]"
    with (
        atomic_folder.partial_sibling(path) as first,
        atomic_folder.partial_sibling(path) as second,
    ):
        assert first != second and first.exists()
    assert leftovers(tmp_path) == []


def test_where_a_link_leads_is_replaced_and_not_the_link(source, tmp_path):
    convert(source, tmp_path / "large-disk")
    (tmp_path / "link").symlink_to(tmp_path / "large-disk")
    convert(source, tmp_path / "link", dtype="float16", overwrite=True)
    assert (tmp_path / "link").is_symlink()
    assert read_manifest(tmp_path / "large-disk").dtype == "float16"
    assert leftovers(tmp_path) == []


# A conversion that does not end well; see test_killed.py too.


def test_a_running_conversion_is_not_swept_away(source, tmp_path):
    destination = tmp_path / "converted"
    with atomic_folder.partial_sibling(destination) as running:
        (running / "half").write_text("written")
        atomic_folder.sweep(destination)
        assert (running / "half").exists()
    assert leftovers(tmp_path) == []


def test_a_full_disk_is_known_before_writing(source, tmp_path, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**9, 10**9 - 10, 10))
    with pytest.raises(ConversionError, match="disk is too full.*free some space"):
        convert(source, tmp_path / "converted")
    assert os.listdir(tmp_path) == ["source"]


SMALL_FILES_ONLY = """
import resource, signal, sys
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
from ckpt_convert.__main__ import main
sys.exit(main(sys.argv[1:]))
"""


def test_a_disk_that_fills_up_meanwhile(source, tmp_path, converter_environment):
    """A limit on the size of files stands in for the disk: the arrays' writers fail midway."""
    run = subprocess.run(
        [sys.executable, "-c", SMALL_FILES_ONLY, str(source), str(tmp_path / "converted")],
        capture_output=True,
        text=True,
        env=converter_environment,
    )
    assert run.returncode == 1
    assert run.stderr.startswith("error: the disk is full"), run.stderr
    assert run.stderr.count("\n") == 1
    assert os.listdir(tmp_path) == ["source"]


# A folder that was damaged.


def test_every_missing_or_cut_file_is_named_with_the_remedy(converted):
    files = [path for path in converted.rglob("*") if path.is_file() and path.name != "config.json"]
    assert len(files) > 3
    for file in files:
        content = file.read_bytes()
        file.unlink()
        with pytest.raises(ConversionError, match=f"{file.name}.*missing.*python -m ckpt_convert"):
            load(converted)
        file.write_bytes(content[:-1])
        with pytest.raises(ConversionError, match=f"{file.name}.*bytes.*python -m ckpt_convert"):
            load(converted)
        file.write_bytes(content)
    load(converted)


def test_overwritten_index_of_the_arrays_is_one_line(converted):
    for file in (converted / "params").rglob("manifest.ocdbt"):
        file.write_bytes(b"\0" * file.stat().st_size)
    with pytest.raises(ConversionError, match="incomplete or damaged") as error:
        load(converted)
    assert "\n" not in str(error.value) and len(str(error.value)) < 600


def test_a_damaged_manifest(converted):
    manifest = converted / "config.json"
    entries = json.loads(manifest.read_text())
    manifest.write_text(json.dumps(entries | {"version": 99}))
    with pytest.raises(ConversionError, match="version 99"):
        load_config(converted)
    manifest.write_text(json.dumps(entries | {"config": entries["config"] | {"invented": 1}}))
    with pytest.raises(ConversionError, match="'invented' is not known.*newer specjax"):
        load_config(converted)
    manifest.write_text(json.dumps(entries | {"files": None}))
    with pytest.raises(ConversionError, match="it lists no files"):
        load_config(converted)
    del entries["config"]["hidden_size"]
    manifest.write_text(json.dumps(entries))
    with pytest.raises(ConversionError, match=r"config\.json is damaged"):
        load_config(converted)
    manifest.write_text("{")
    with pytest.raises(ConversionError, match="no specjax checkpoint"):
        load_config(converted)
    with pytest.raises(ConversionError, match="no folder"):
        load_config(converted / "absent")


# Where the arrays go.


def test_arrays_arrive_on_their_shards(converted):
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    across = NamedSharding(mesh, PartitionSpec())
    by_width = NamedSharding(mesh, PartitionSpec(None, "model"))
    expected = expected_params(hf_tensors("llama"))

    everywhere = load(converted, shardings=across).params
    assert {leaf.sharding for leaf in jax.tree.leaves(everywhere)} == {across}
    assert_same_tree(everywhere, expected)

    def split_embeddings(abstract):
        return jax.tree.map(lambda leaf: across, abstract) | {"embed": by_width}

    by_function = load(converted, shardings=split_embeddings).params
    assert by_function["embed"].sharding == by_width
    assert by_function["embed"].addressable_shards[0].data.shape == (64, 16)
    assert_same_tree(by_function, expected)

    tree = split_embeddings(expected)
    by_tree = load(converted, shardings=tree).params
    assert jax.tree.map(lambda leaf: leaf.sharding, by_tree) == tree


def test_arrays_of_several_chunks_are_read_right(source, tmp_path, monkeypatch):
    """Real models have parameters of more than one chunk; small ones get there by small chunks."""
    monkeypatch.setattr(arrays, "CHUNK", 4096)
    monkeypatch.setattr(arrays, "ALONE", 4096)
    convert(source, tmp_path / "converted")
    assert_same_tree(load(tmp_path / "converted").params, expected_params(hf_tensors("llama")))


# Memory.

PEAKS = """
import sys
from pathlib import Path
import jax
from ckpt_convert import convert, load
from specjax.sharding import make_mesh, sharding

jax.config.update("jax_num_cpu_devices", 4)

def split(shapes):
    mesh = make_mesh(1, 4)  # every parameter's last axis
    return jax.tree.map(
        lambda leaf: sharding(mesh, ("",) * (leaf.ndim - 1) + ("mlp",), leaf.shape), shapes
    )

def peak():
    # Not getrusage: a process inherits the peak of the one that started it.
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024

tiny, large, folder = sys.argv[1:]
shardings = split if folder.endswith("sharded") else None
convert(tiny, folder + "/tiny")
load(folder + "/tiny", shardings=shardings)
imported = peak()
if folder.endswith("written"):
    convert(large, folder + "/large", shard_for="1x4")
elif folder.endswith("int4"):
    convert(large, folder + "/large", quantize="int4")
else:
    load(large, shardings=shardings)
print(peak() - imported)
"""


@pytest.fixture
def large_source(tmp_path, monkeypatch) -> Path:
    """A model of 135 MB, of which the largest parameter is 67 MB."""
    larger = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 8}
    larger |= {"num_attention_heads": 64, "num_key_value_heads": 64}
    for name, size in larger.items():
        monkeypatch.setitem(SIZES, name, size)
    return write_hf(tmp_path / "large", hf_config("llama"), hf_tensors("llama"))


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux's own count")
@pytest.mark.parametrize(
    ("task", "least", "most"),
    [("written", 0.8, 1.5), ("int4", 0.1, 0.7), ("read", 0.8, 2.2), ("sharded", 0.8, 2.0)],
)
def test_memory_stays_near_one_copy(
    source, large_source, tmp_path, converter_environment, task, least, most
):
    """A copy of what is written: int4 is an eighth."""
    model = (large_source / "model.safetensors").stat().st_size
    large = large_source
    if task in ("read", "sharded"):
        large = tmp_path / "converted"
        convert(large_source, large)
    (tmp_path / task).mkdir()
    run = subprocess.run(
        [sys.executable, "-c", PEAKS, str(source), str(large), str(tmp_path / task)],
        capture_output=True,
        text=True,
        env=converter_environment,
    )
    assert run.returncode == 0, run.stderr
    assert least * model < int(run.stdout) < most * model

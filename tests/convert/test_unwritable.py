"""A destination that cannot be written: one sentence, nothing half-written, no source touched."""

import errno
import os
import shutil
from collections import namedtuple
from pathlib import Path

import pytest
from convert.drafters.tiny_drafters import eagle_config, eagle_tensors, write
from convert.tiny_checkpoints import hf_config, hf_tensors, write_hf

from ckpt_convert import ConversionError, arrays, convert, fetch, read_manifest, resolve
from ckpt_convert.__main__ import main
from ckpt_convert.drafters import read_drafter_manifest
from ckpt_convert.hf_export import export

ANOTHER = "choose another destination"
READ_ONLY = (errno.EROFS, "Read-only file system"), (errno.EACCES, "Permission denied")


@pytest.fixture
def sources(tmp_path) -> Path:
    write_hf(tmp_path / "sources" / "model", hf_config("llama"), hf_tensors("llama"))
    write(tmp_path / "sources" / "drafter", eagle_config(), eagle_tensors())
    convert(tmp_path / "sources" / "model", tmp_path / "sources" / "checkpoint")
    (tmp_path / "disk").mkdir()
    return tmp_path / "sources"


TASKS = {"model": convert, "drafter": convert, "checkpoint": export}


def contents(folder: Path) -> dict:
    files = [file for file in folder.rglob("*") if file.is_file()]
    return {file: (file.read_bytes(), file.stat().st_mtime_ns) for file in files}


def refused(task: str, sources: Path, destination: Path) -> str:
    before, there = contents(sources), sorted(sources.parent.rglob("*"))
    with pytest.raises(ConversionError) as raised:
        TASKS[task](sources / task, destination)
    assert contents(sources) == before
    assert sorted(sources.parent.rglob("*")) == there
    assert "\n" not in str(raised.value)
    return str(raised.value)


def make_read_only(monkeypatch, folder: Path, number: int) -> None:
    """Whatever would make a file or a folder below ``folder`` fails, as it would there."""

    def refusing(call, makes):
        def guarded(path, *arguments, **options):
            if Path(path).is_relative_to(folder) and makes(path, *arguments):
                raise OSError(number, os.strerror(number), str(path))
            return call(path, *arguments, **options)

        return guarded

    is_new = lambda path, *mode: not os.path.lexists(path)  # noqa: E731
    writes = lambda path, flags, *mode: flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)  # noqa: E731
    monkeypatch.setattr(os, "mkdir", refusing(os.mkdir, is_new))
    monkeypatch.setattr(os, "open", refusing(os.open, writes))


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("place", ["there", "new/there"])
@pytest.mark.parametrize(("number", "reason"), READ_ONLY)
def test_a_read_only_disk_or_folder(sources, tmp_path, monkeypatch, task, place, number, reason):
    make_read_only(monkeypatch, tmp_path / "disk", number)
    said = refused(task, sources, tmp_path / "disk" / place)
    named = tmp_path / "disk" / place.removesuffix("/there")
    assert said == f"{named} cannot be written ({reason}); choose another destination"


def test_a_disk_that_becomes_read_only_meanwhile(sources, tmp_path, monkeypatch):
    """The arrays' writer says so in words only."""

    def save(path, params, chunks):
        path.mkdir()
        (path / "half").touch()
        raise ValueError(f'Error writing "{path}":\n[OS error 30: EROFS Read-only file system]')

    monkeypatch.setattr(arrays, "save", save)
    for task in ("model", "drafter"):
        said = refused(task, sources, tmp_path / "disk" / "there")
        assert said.startswith(f"{tmp_path / 'disk' / 'there'} cannot be written (Error writing")
        assert said.endswith("Read-only file system]); choose another destination")


def test_what_was_to_be_replaced_is_put_back(sources, tmp_path, monkeypatch):
    destination = tmp_path / "disk" / "there"
    convert(sources / "model", destination)
    before, rename = contents(destination), os.rename

    def refusing(old, new, **options):
        if Path(new) == destination and not str(old).endswith("-old"):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(old))
        rename(old, new, **options)

    monkeypatch.setattr(os, "rename", refusing)
    with pytest.raises(ConversionError, match=r"cannot be written \(Read-only file system\)"):
        convert(sources / "model", destination, dtype="bfloat16", overwrite=True)
    assert contents(destination) == before
    assert read_manifest(destination).dtype == "float32"
    assert os.listdir(tmp_path / "disk") == ["there"]


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("length", [240, 256, 5000])
def test_a_name_that_is_too_long(sources, tmp_path, monkeypatch, capsys, task, length):
    """240 letters would do, but not for what stands beside it meanwhile."""
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")  # the command sets it, for its own process
    destination = tmp_path / "disk" / ("n" * length)
    said = refused(task, sources, destination)
    assert (
        said == f"{destination} cannot be written (File name too long); choose another destination"
    )
    command = ["export"] if task == "checkpoint" else []
    assert main([*command, str(sources / task), str(destination)]) == 1
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err == f"error: {said}\n"


@pytest.mark.parametrize("task", TASKS)
def test_folders_made_on_the_way_are_gone_again(sources, tmp_path, monkeypatch, task):
    long = tmp_path / "disk" / "new" / ("n" * 256) / "there"
    assert "cannot be written (File name too long)" in refused(task, sources, long)
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**9, 10**9 - 10, 10))
    said = refused(task, sources, tmp_path / "disk" / "new" / "new" / "there")
    assert said.startswith("the disk is too full")


def test_names_that_are_no_text(sources, tmp_path):
    odd = os.fsdecode(b"mod\xe9l")
    for task in ("model", "drafter"):
        said = refused(task, sources, tmp_path / "disk" / odd)
        assert said.endswith("cannot be written (arrays need a name in UTF-8); " + ANOTHER)
    export(sources / "checkpoint", tmp_path / "disk" / odd)
    said = refused("checkpoint", sources, tmp_path / "disk" / "a\0b")
    assert said.endswith("cannot be written (embedded null byte); " + ANOTHER)
    (sources / "drafter").rename(sources / odd)
    convert(sources / odd, tmp_path / "disk" / "there")
    assert read_drafter_manifest(tmp_path / "disk" / "there").source == odd


def test_a_source_that_is_a_link_to_itself(sources):
    (sources / "circle").symlink_to(sources / "circle")
    with pytest.raises(ConversionError, match="circle does not exist"):
        convert(sources / "circle", sources / "there")


def test_a_name_that_just_fits(sources, tmp_path):
    destination = tmp_path / "disk" / ("n" * 229)
    convert(sources / "model", destination)
    assert read_manifest(destination).family == "llama"


@pytest.mark.parametrize(("number", "reason"), READ_ONLY)
def test_a_read_only_cache(sources, tmp_path, monkeypatch, number, reason):
    monkeypatch.setenv("SPECJAX_CACHE", str(tmp_path / "disk"))
    make_read_only(monkeypatch, tmp_path / "disk", number)
    with pytest.raises(
        ConversionError, match=rf"cannot be written \({reason}\); set SPECJAX_CACHE"
    ):
        resolve(sources / "model")
    assert os.listdir(tmp_path / "disk") == []


def test_long_names_and_the_cache(sources, tmp_path, monkeypatch):
    """A source's name may be as long as the disk allows; a text longer than that is no path."""
    monkeypatch.setenv("SPECJAX_CACHE", str(tmp_path / "disk"))
    monkeypatch.setattr(fetch, "convert_apart", convert)
    long = (sources / "model").rename(sources / ("ü" * 127))
    assert read_manifest(resolve(long)).family == "llama"
    with pytest.raises(ConversionError, match="neither a path nor a known model"):
        resolve("n" * 5000)

"""specjax's own checkpoint folder: Orbax arrays, ``config.json`` and the tokenizer's files."""

import dataclasses
import json
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ckpt_convert import atomic_folder
from ckpt_convert.errors import ConversionError

if TYPE_CHECKING:
    from specjax.models.decoder import DecoderConfig


FORMAT = "specjax-checkpoint"
# Raised when a conversion would come out otherwise too: what lies in the cache is then made anew.
VERSION = 1
MANIFEST = "config.json"
# The kind that a drafter's manifest says it is; a model's says nothing.
DRAFTER = "drafter"
ARRAYS = "params"
# The source's own config.json and generation_config.json, as they were.
SOURCE = "source"


@dataclass(frozen=True)
class Manifest:
    """What ``config.json`` says of a checkpoint, arrays aside.

    ``quantization`` is the scheme of its matrices (`specjax.models.quantised`), if any. ``files``
    maps every other file of the folder to its size, so that a folder with a lost or a cut file is
    known before an array is read.
    """

    family: str
    config: "DecoderConfig"
    dtype: str
    eos_ids: tuple[int, ...]
    bos_id: int | None
    source: str
    source_sha256: str
    tokenizer_files: tuple[str, ...] = ()
    generation: Mapping[str, Any] = field(default_factory=dict)
    files: Mapping[str, int] = field(default_factory=dict)
    quantization: str | None = None


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint in memory: parameters as JAX arrays, and what goes with them."""

    path: Path
    family: str
    config: "DecoderConfig"
    params: dict[str, Any]
    eos_ids: tuple[int, ...]
    bos_id: int | None
    tokenizer_files: dict[str, Path]
    generation: dict[str, Any]


def is_checkpoint(path: Path) -> bool:
    """True for a folder whose ``config.json`` is specjax's own, whole or not."""
    return _said(path).get("format") == FORMAT


def is_current(path: Path) -> bool:
    """True for a checkpoint folder of the version that this specjax writes, whole or not."""
    said = _said(path)
    return said.get("format") == FORMAT and said.get("version") == VERSION


def _said(path: Path) -> dict[str, Any]:
    """What ``config.json`` holds, nothing where it cannot be read."""
    try:
        entries = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, RecursionError, ValueError):
        return {}
    return entries if isinstance(entries, dict) else {}


# Writing.


def save(
    path: Path,
    params: Mapping[str, Any],
    manifest: Any,
    beside: Mapping[str, bytes],
    *,
    chunks: Mapping[str, Any] | None = None,
    overwrite: bool = False,
) -> Any:
    """Write a checkpoint folder in one step: into a sibling first, renamed when complete.

    ``manifest`` is a dataclass whose field ``files`` is filled in. ``beside`` holds what goes with
    the arrays: the contents of files by their path in the folder. ``chunks``: see ``arrays.save``.
    Returns the manifest as written. Raises ``ConversionError`` where ``path`` exists and
    ``overwrite`` is false, and where the disk is full or not writable; nothing is left behind then.
    """
    from ckpt_convert import arrays

    refuse_existing(path, overwrite)
    with atomic_folder.written_whole(path, arrays.nbytes(params), overwrite=overwrite) as partial:
        arrays.save(partial / ARRAYS, params, chunks)
        for name, content in beside.items():
            (partial / name).parent.mkdir(exist_ok=True)
            (partial / name).write_bytes(content)
        manifest = dataclasses.replace(manifest, files=_sizes(partial))
        text = json.dumps(_to_json(manifest), indent=2, ensure_ascii=False)
        # Of a source's name that is not UTF-8 this makes JSON's own escapes.
        (partial / MANIFEST).write_text(text, encoding="utf-8", errors="backslashreplace")
    return manifest


def refuse_existing(path: Path, overwrite: bool) -> None:
    """Raise for a destination that exists; with ``overwrite``, for one that is no checkpoint."""
    try:
        str(path.absolute()).encode()
    except UnicodeEncodeError:
        raise ConversionError(
            f"{path} cannot be written (arrays need a name in UTF-8); choose another destination"
        ) from None
    if not overwrite:
        atomic_folder.refuse_existing(path, remedy="choose another folder or give --force")
    if not atomic_folder.exists(path):
        return
    empty = path.is_dir() and not any(path.iterdir())
    if not empty and not is_checkpoint(path):
        raise ConversionError(f"{path} exists and is no specjax checkpoint; it is left alone")


def _sizes(folder: Path) -> dict[str, int]:
    return {
        file.relative_to(folder).as_posix(): file.stat().st_size
        for file in sorted(folder.rglob("*"))
        if file.is_file()
    }


def _to_json(manifest: Any) -> dict[str, Any]:
    return {"format": FORMAT, "version": VERSION} | dataclasses.asdict(manifest)


# Reading.


def read_manifest(path: str | Path) -> Manifest:
    """What a checkpoint folder says of itself; milliseconds, no array is read.

    Raises ``ConversionError`` for a folder that is no checkpoint, is of another version or is
    incomplete.
    """
    from specjax.models.decoder import DecoderConfig

    path = Path(path)
    entries = read_entries(path)
    if entries.get("kind") == DRAFTER:
        raise ConversionError(
            f"{path} is a drafter, no model; read it with ckpt_convert.load_drafter"
        )
    try:
        config = rebuilt(DecoderConfig, entries.pop("config"))
        for name in ("eos_ids", "tokenizer_files"):
            entries[name] = tuple(entries[name])
        manifest = Manifest(config=config, **entries)
    except (AttributeError, KeyError, TypeError, ValueError) as fault:
        raise damaged_manifest(path, fault) from None
    check_files(path, manifest.files)
    return manifest


def read_entries(path: Path) -> dict[str, Any]:
    """What ``config.json`` holds, of a model's checkpoint or of a drafter's."""
    if not path.is_dir():
        raise ConversionError(f"{path} is no folder; convert a model with: {_command('SRC', path)}")
    if not is_checkpoint(path):
        raise ConversionError(
            f"{path} is no specjax checkpoint; make one with: {_command(path, 'DST')}"
        )
    entries = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
    version = entries.pop("version", None)
    if version != VERSION:
        raise ConversionError(
            f"{path} is of version {version}, this specjax reads {VERSION}; convert the model again"
        )
    entries.pop("format")
    return entries


def check_files(path: Path, files: Mapping[str, int]) -> None:
    """Raise for a file that is lost or cut."""
    if not isinstance(files, Mapping):
        raise damaged_manifest(path, TypeError("it lists no files"))
    for name, size in files.items():
        file = path / name
        if not file.is_file():
            raise _corrupt(path, f"{name} is missing")
        if file.stat().st_size != size:
            raise _corrupt(path, f"{name} has {file.stat().st_size} bytes instead of {size}")


def damaged_manifest(path: Path, fault: Exception) -> ConversionError:
    return _corrupt(path, f"{MANIFEST} is damaged ({fault})")


def rebuilt(kind: Any, value: Any) -> Any:
    """What ``dataclasses.asdict`` and JSON made of a value of this type: tuples, nested classes."""
    if isinstance(value, list):
        return tuple(rebuilt(kind, item) for item in value)
    made = _dataclass_of(kind) if isinstance(value, Mapping) else None
    if made is None:
        return value
    kinds = typing.get_type_hints(made)
    unknown = sorted(set(value) - set(kinds))
    if unknown:
        raise ValueError(f"{unknown[0]!r} is not known: was it written by a newer specjax?")
    return made(**{name: rebuilt(kinds[name], item) for name, item in value.items()})


def _dataclass_of(kind: Any) -> Any:
    """The dataclass that a type is, or that stands in its union or tuple."""
    if dataclasses.is_dataclass(kind):
        return kind
    inner = (_dataclass_of(member) for member in typing.get_args(kind))
    return next((member for member in inner if member is not None), None)


def load_config(path: str | Path) -> "DecoderConfig":
    """The decoder's configuration alone; raises as ``read_manifest`` does."""
    return read_manifest(path).config


def load(
    path: str | Path,
    *,
    dtype: Any = None,
    shardings: Any = None,
) -> Checkpoint:
    """Read a checkpoint folder straight into JAX arrays.

    ``dtype``: of the parameters; None keeps the stored one. ``shardings``: one ``jax.sharding.
    Sharding`` for all, a pytree of them like the parameters, or a function from the parameters'
    ``jax.ShapeDtypeStruct`` tree to such a pytree; None puts everything on the default device.
    Raises ``ConversionError`` for a folder that is no checkpoint, is incomplete or is damaged.
    """
    from ckpt_convert.packing import in_use

    path = Path(path)
    manifest = read_manifest(path)
    abstract = _abstract(manifest, manifest.dtype if dtype is None else dtype)
    abstract = placed(abstract, shardings)
    return Checkpoint(
        path=path,
        family=manifest.family,
        config=manifest.config,
        params=in_use(restored(path, abstract), manifest.config.num_layers),
        eos_ids=manifest.eos_ids,
        bos_id=manifest.bos_id,
        tokenizer_files={name: path / name for name in manifest.tokenizer_files},
        generation=dict(manifest.generation),
    )


def restored(path: Path, abstract: Any) -> Any:
    from ckpt_convert import arrays

    try:
        return arrays.restore(path / ARRAYS, abstract)
    except Exception as fault:  # Orbax and TensorStore have no common type for damaged files
        raise _unreadable(path, fault) from fault


def _unreadable(path: Path, fault: Exception) -> ConversionError:
    return _corrupt(path, f"the arrays cannot be read ({_first_line(fault)})")


def _first_line(fault: BaseException) -> str:
    lines = str(fault).strip().splitlines() or [type(fault).__name__]
    return lines[0][:200]


def stream(path: Path, manifest: Manifest) -> Iterator[tuple[tuple[str, ...], np.ndarray]]:
    """Each parameter's path in the tree and its values on the host, as stored, one at a time.

    Raises ``ConversionError`` where they cannot be read.
    """
    from ckpt_convert import arrays

    try:
        yield from arrays.stream(path / ARRAYS, _abstract(manifest, manifest.dtype))
    except Exception as fault:
        raise _unreadable(path, fault) from fault


def _abstract(manifest: Manifest, dtype: Any) -> Any:
    """Shape and dtype of every parameter."""
    import jax
    import jax.numpy as jnp

    from ckpt_convert.packing import stored_shapes
    from ckpt_convert.tensors import parameter_shapes

    plain = jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)),
        parameter_shapes(manifest.config),
        is_leaf=lambda node: isinstance(node, tuple),
    )
    return stored_shapes(plain, manifest.config, manifest.quantization)


def placed(abstract: Any, shardings: Any) -> Any:
    """Shape, dtype and sharding of every parameter."""
    import jax

    from ckpt_convert.packing import as_dicts

    if callable(shardings):
        shardings = shardings(abstract)
    if shardings is None:
        shardings = jax.sharding.SingleDeviceSharding(_default_device())
    if isinstance(shardings, jax.sharding.Sharding):
        shardings = jax.tree.map(lambda _, everywhere=shardings: everywhere, abstract)
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        abstract,
        as_dicts(shardings),
    )


def _default_device() -> Any:
    import jax

    # An array made now, wherever the caller's settings put it.
    return jax.device_put(0.0).devices().pop()


def _corrupt(path: Path, what: str) -> ConversionError:
    return ConversionError(
        f"the checkpoint {path} is incomplete or damaged: {what}; delete the folder, and a known "
        f"model is fetched again; any other is converted with: {_command('SRC', path)}"
    )


def _command(source: str | Path, destination: str | Path) -> str:
    return f"python -m ckpt_convert {source} {destination}"

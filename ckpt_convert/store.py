"""specjax's own checkpoint folder: Orbax arrays, ``config.json`` and the tokenizer's files."""

import contextlib
import dataclasses
import errno
import gc
import json
import logging
import os
import shutil
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckpt_convert.errors import ConversionError

if TYPE_CHECKING:
    from specjax.models.decoder import DecoderConfig


FORMAT = "specjax-checkpoint"
VERSION = 1
MANIFEST = "config.json"
ARRAYS = "params"
PARTIAL = ".partial-"
LOCK = "lock"
# Bytes of a stored chunk: a parameter that is one chunk is written without a copy, and a larger one
# must not be read whole by every device that holds a part of it.
CHUNK = 256 << 20
# Parameters larger than this are read one at a time.
ALONE = 64 << 20


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
    try:
        return json.loads((path / MANIFEST).read_text(encoding="utf-8")).get("format") == FORMAT
    except (OSError, ValueError, AttributeError):
        return False


# Writing.


def save(
    path: Path,
    params: Mapping[str, Any],
    manifest: Manifest,
    write_tokenizer: Callable[[Path], list[str]],
    *,
    overwrite: bool = False,
) -> Manifest:
    """Write a checkpoint folder in one step: into a sibling first, renamed when complete.

    Returns the manifest as written. Raises ``ConversionError`` where ``path`` exists and
    ``overwrite`` is false, and where the disk is full or not writable; nothing is left behind then.
    """
    refuse_existing(path, overwrite)
    _refuse_full_disk(path.parent, params)
    with _partial_sibling(path) as partial:
        _save_arrays(partial / ARRAYS, params)
        names = tuple(write_tokenizer(partial))
        manifest = dataclasses.replace(manifest, tokenizer_files=names, files=_sizes(partial))
        text = json.dumps(_to_json(manifest), indent=2, ensure_ascii=False)
        (partial / MANIFEST).write_text(text, encoding="utf-8")
        _flush(partial)
        _move(partial, path)
    return manifest


def refuse_existing(path: Path, overwrite: bool) -> None:
    """Raise for a destination that exists; with ``overwrite``, for one that is no checkpoint."""
    if not path.exists() and not path.is_symlink():
        return
    if not overwrite:
        raise ConversionError(f"{path} exists; choose another folder or give --force")
    empty = path.is_dir() and not any(path.iterdir())
    if not empty and not is_checkpoint(path):
        raise ConversionError(f"{path} exists and is no specjax checkpoint; it is left alone")


def _refuse_full_disk(parent: Path, params: Mapping[str, Any]) -> None:
    import jax

    needed = sum(leaf.nbytes for leaf in jax.tree.leaves(params)) + (32 << 20)
    try:
        parent.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(parent).free
    except OSError as fault:
        raise ConversionError(f"{parent} cannot be written: {fault.strerror}") from None
    if free < needed:
        raise ConversionError(
            f"the disk is too full: {parent} has {free / 1e9:.2f} GB free and the checkpoint needs "
            f"{needed / 1e9:.2f} GB; free some space or choose another disk"
        )


@contextlib.contextmanager
def _partial_sibling(path: Path) -> Iterator[Path]:
    """A folder beside ``path`` that is gone afterwards, whatever happened; tidies dead ones too."""
    from filelock import FileLock

    sweep(path)
    partial = path.parent / f".{path.name}{PARTIAL}{os.getpid()}"
    try:
        partial.mkdir()
        # Held while this process lives: the next run knows by it which leftovers are dead.
        with FileLock(partial.with_name(partial.name + LOCK)):
            yield partial
    except OSError as fault:
        raise _unwritable(path, fault) from None
    except ConversionError:
        raise
    except Exception as fault:  # Orbax wraps what the file system said, in more than one type
        if not _names_storage(fault):
            raise
        raise _unwritable(path, fault) from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        partial.with_name(partial.name + LOCK).unlink(missing_ok=True)


def sweep(path: Path) -> None:
    """Remove what killed conversions to ``path`` left; those still running are not touched."""
    from filelock import FileLock, Timeout

    for leftover in path.parent.glob(f".{path.name}{PARTIAL}*"):
        if leftover.name.endswith(LOCK):
            continue
        lock = leftover.with_name(leftover.name + LOCK)
        with contextlib.suppress(Timeout, OSError), FileLock(lock, timeout=0):
            shutil.rmtree(leftover, ignore_errors=True)
            lock.unlink(missing_ok=True)


def _names_storage(fault: BaseException) -> bool:
    signs = ("No space left", "Disk quota", "File too large", "RESOURCE_EXHAUSTED", "Read-only")
    chain = [fault, fault.__cause__, fault.__context__]
    return any(sign in str(link) for link in chain for sign in signs)


def _unwritable(path: Path, fault: BaseException) -> ConversionError:
    full = getattr(fault, "errno", None) in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    if full or _names_storage(fault):
        return ConversionError(f"the disk is full: {path} was not written; free some space")
    return ConversionError(f"{path} cannot be written: {fault}")


def _save_arrays(path: Path, params: Mapping[str, Any]) -> None:
    import jax
    import numpy as np
    import orbax.checkpoint as ocp

    chunked = jax.tree.map(lambda _: ocp.SaveArgs(chunk_byte_size=CHUNK), params)
    # Orbax would copy every array first, against changes that nobody makes here.
    in_place = ocp.type_handlers.NumpyHandler(deepcopy_host_arrays=False)
    registry = ocp.type_handlers.create_type_handler_registry((np.ndarray, in_place))
    with _quiet():
        handler = ocp.PyTreeCheckpointHandler(
            use_ocdbt=True,
            use_zarr3=True,
            use_compression=False,  # weights do not compress, and reading is twice as fast
            type_handler_registry=registry,
        )
        with ocp.Checkpointer(handler) as checkpointer:
            checkpointer.save(path.absolute(), args=ocp.args.PyTreeSave(params, save_args=chunked))


def _sizes(folder: Path) -> dict[str, int]:
    return {
        file.relative_to(folder).as_posix(): file.stat().st_size
        for file in sorted(folder.rglob("*"))
        if file.is_file()
    }


def _flush(folder: Path) -> None:
    """Force the files to the disk, so that a crash of the machine cannot follow the rename."""
    for file in folder.rglob("*"):
        if file.is_file():
            with open(file, "rb") as stream:
                os.fsync(stream.fileno())


def _move(partial: Path, path: Path) -> None:
    """Put ``partial`` in the place of ``path``; an old checkpoint there goes last."""
    if not path.exists():
        partial.rename(path)
        return
    old = partial.with_name(partial.name + "-old")
    path.rename(old)
    partial.rename(path)
    shutil.rmtree(old, ignore_errors=True)


def _to_json(manifest: Manifest) -> dict[str, Any]:
    return {"format": FORMAT, "version": VERSION} | dataclasses.asdict(manifest)


# Reading.


def read_manifest(path: str | Path) -> Manifest:
    """What a checkpoint folder says of itself; milliseconds, no array is read.

    Raises ``ConversionError`` for a folder that is no checkpoint, is of another version or is
    incomplete.
    """
    from specjax.models.decoder import DecoderConfig
    from specjax.models.rope import Rope

    path = Path(path)
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
    try:
        config = entries.pop("config")
        config["rope"] = Rope(**config["rope"])
        config["windows"] = tuple(config["windows"])
        for name in ("eos_ids", "tokenizer_files"):
            entries[name] = tuple(entries[name])
        manifest = Manifest(config=DecoderConfig(**config), **entries)
    except (KeyError, TypeError, ValueError) as fault:
        raise _corrupt(path, f"{MANIFEST} is damaged ({fault})") from None
    for name, size in manifest.files.items():
        file = path / name
        if not file.is_file():
            raise _corrupt(path, f"{name} is missing")
        if file.stat().st_size != size:
            raise _corrupt(path, f"{name} has {file.stat().st_size} bytes instead of {size}")
    return manifest


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
    abstract = _abstract_params(manifest, dtype, shardings)
    return Checkpoint(
        path=path,
        family=manifest.family,
        config=manifest.config,
        params=in_use(_restore(path, abstract), manifest.config.num_layers),
        eos_ids=manifest.eos_ids,
        bos_id=manifest.bos_id,
        tokenizer_files={name: path / name for name in manifest.tokenizer_files},
        generation=dict(manifest.generation),
    )


def _abstract_params(manifest: Manifest, dtype: Any, shardings: Any) -> Any:
    """Shape, dtype and sharding of every parameter."""
    import jax
    import jax.numpy as jnp

    from ckpt_convert.packing import as_dicts, stored_shapes
    from ckpt_convert.tensors import parameter_shapes

    wanted = jnp.dtype(dtype if dtype is not None else manifest.dtype)
    abstract = jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct(shape, wanted),
        parameter_shapes(manifest.config),
        is_leaf=lambda node: isinstance(node, tuple),
    )
    abstract = stored_shapes(abstract, manifest.config, manifest.quantization)
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


def _restore(path: Path, abstract: Any) -> Any:
    """The arrays, read group by group so that the host never holds a second copy of the model."""
    import jax
    import orbax.checkpoint as ocp

    restored = {}
    try:
        with _quiet(), ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
            for group in _groups(abstract):
                tree = checkpointer.restore(
                    (path / ARRAYS).absolute(),
                    args=ocp.args.PyTreeRestore(
                        group,
                        restore_args=ocp.checkpoint_utils.construct_restore_args(group),
                        partial_restore=True,
                    ),
                )
                restored |= dict(jax.tree_util.tree_leaves_with_path(tree))
                del tree
                gc.collect(1)  # Orbax leaves the host's buffers in a reference cycle
    except Exception as fault:  # Orbax and TensorStore have no common type for damaged files
        raise _corrupt(path, f"the arrays cannot be read ({_first_line(fault)})") from fault
    return jax.tree_util.tree_map_with_path(lambda place, _: restored[place], abstract)


def _groups(abstract: Any) -> Iterator[dict[str, Any]]:
    """Subtrees of ``abstract``: each large parameter alone, largest first, then all small ones."""
    import jax

    leaves = sorted(
        jax.tree_util.tree_leaves_with_path(abstract), key=lambda entry: -_nbytes(entry[1])
    )
    for entry in leaves:
        if _nbytes(entry[1]) > ALONE:
            yield _subtree([entry])
    small = [entry for entry in leaves if _nbytes(entry[1]) <= ALONE]
    if small:
        yield _subtree(small)


def _nbytes(leaf: Any) -> int:
    return leaf.size * leaf.dtype.itemsize


def _subtree(leaves: list[tuple[Any, Any]]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for path, leaf in leaves:
        node = tree
        for step in path[:-1]:
            node = node.setdefault(step.key, {})
        node[path[-1].key] = leaf
    return tree


def _first_line(fault: BaseException) -> str:
    lines = str(fault).strip().splitlines() or [type(fault).__name__]
    return lines[0][:200]


def _corrupt(path: Path, what: str) -> ConversionError:
    return ConversionError(
        f"the checkpoint {path} is incomplete or damaged: {what}; delete the folder, and a known "
        f"model is fetched again; any other is converted with: {_command('SRC', path)}"
    )


def _command(source: str | Path, destination: str | Path) -> str:
    return f"python -m ckpt_convert {source} {destination}"


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep Orbax's reports off stderr: what is normal here, and faults that are raised as well.

    A writer that fails leaves other threads printing tracebacks of their own, some after it has
    returned; the caller gets the first fault as an exception all the same.
    """
    logger = logging.getLogger("absl")
    level, hooks = logger.level, (sys.excepthook, sys.unraisablehook, threading.excepthook)
    logger.setLevel(logging.CRITICAL + 1)
    sys.excepthook = sys.unraisablehook = threading.excepthook = lambda *fault: None
    try:
        yield
    except BaseException:
        hooks = _without_stragglers(hooks[0]), *hooks[1:]
        raise
    finally:
        logger.setLevel(level)
        sys.excepthook, sys.unraisablehook, threading.excepthook = hooks


def _without_stragglers(report: Callable[..., Any]) -> Callable[..., Any]:
    """``report`` but for threads that find the event loop of a failed writer gone."""

    def hook(kind, fault, trace):
        if str(fault) != "Event loop is closed":
            report(kind, fault, trace)

    return hook

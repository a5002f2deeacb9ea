"""A folder that is written whole or not at all: into a sibling first, renamed when complete."""

import contextlib
import errno
import glob
import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

from ckpt_convert.errors import ConversionError

PARTIAL = ".partial-"
LOCK = "lock"
OLD = "-old"
FULL = ("No space left", "Disk quota", "File too large", "RESOURCE_EXHAUSTED")
# What a folder needs beside its arrays: configuration, tokenizer, indices.
SMALL_FILES = 32 << 20


@contextlib.contextmanager
def written_whole(path: Path, nbytes: int, *, overwrite: bool = False) -> Iterator[Path]:
    """A folder to fill, which takes the place of ``path`` when the block ends well.

    ``nbytes``: size of the arrays to come. Without ``overwrite`` a path that has appeared meanwhile
    is left alone. Raises ``ConversionError`` where the disk is full or not writable; then, and
    after any other exception, nothing is left behind.
    """
    path = path.resolve()  # where a link leads, not the link, is what is replaced
    with _parents_made(path):
        _refuse_full_disk(path.parent, nbytes + SMALL_FILES)
        with partial_sibling(path) as partial:
            yield partial
            _flush(partial)
            if not overwrite:
                refuse_existing(path, remedy="it appeared meanwhile and is left alone")
            _move(partial, path)


@contextlib.contextmanager
def _parents_made(path: Path) -> Iterator[None]:
    """Folders above ``path`` that are made meanwhile go again where the block does not end well."""
    missing = [folder for folder in path.parents if not os.path.lexists(folder)]
    try:
        yield
    except BaseException:
        for folder in missing:
            with contextlib.suppress(OSError):  # some other program's files may be in it
                folder.rmdir()
        raise


def refuse_existing(path: Path, *, remedy: str = "choose another folder") -> None:
    """Raise for a path that exists, be it a link into nowhere, and for one that cannot exist."""
    if exists(path):
        raise ConversionError(f"{path} exists; {remedy}")
    # It has a longer name while it is written.
    _looked_up(_lock_of(_partial_of(path)), path)


def exists(path: Path) -> bool:
    """Whether anything lies at ``path``; raises ``ConversionError`` where nothing ever can."""
    return _looked_up(path, path)


def _looked_up(name: Path, path: Path) -> bool:
    try:
        name.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except (OSError, ValueError) as fault:
        raise _unwritable(path, fault) from None
    return True


def _refuse_full_disk(parent: Path, needed: int) -> None:
    try:
        parent.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(parent).free
    except OSError as fault:
        raise _unwritable(parent, fault) from None
    if free < needed:
        raise ConversionError(
            f"the disk is too full: {parent} has {free / 1e9:.2f} GB free and the checkpoint needs "
            f"{needed / 1e9:.2f} GB; free some space or choose another disk"
        )


@contextlib.contextmanager
def partial_sibling(path: Path) -> Iterator[Path]:
    """A folder beside ``path`` that is gone afterwards, whatever happened; tidies dead ones too."""
    from filelock import FileLock

    sweep(path)
    partial = _partial_of(path)
    try:
        # Held while this process lives: the next run knows by it which leftovers are dead.
        with FileLock(_lock_of(partial)):
            partial.mkdir()
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
        with contextlib.suppress(OSError):
            _lock_of(partial).unlink()


def sweep(path: Path) -> None:
    """Remove what killed conversions to ``path`` left; those still running are not touched.

    A checkpoint that one of them had moved aside, and not yet replaced, is put back.
    """
    from filelock import FileLock, Timeout

    for leftover in sorted(path.parent.glob(f".{glob.escape(path.name)}{PARTIAL}*")):
        lock = leftover if leftover.name.endswith(LOCK) else _lock_of(leftover)
        with contextlib.suppress(Timeout, OSError), FileLock(lock, timeout=0):
            if leftover.name.endswith(OLD) and not path.exists():
                leftover.rename(path)
            elif leftover != lock:
                shutil.rmtree(leftover, ignore_errors=True)
            lock.unlink(missing_ok=True)


def _partial_of(path: Path) -> Path:
    return path.parent / f".{path.name}{PARTIAL}{uuid.uuid4().hex[:12]}"


def _lock_of(partial: Path) -> Path:
    return partial.with_name(partial.name.removesuffix(OLD) + LOCK)


def _move(partial: Path, path: Path) -> None:
    """Put ``partial`` in the place of ``path``; an old checkpoint there goes last."""
    if not path.exists():
        partial.rename(path)
        return
    old = partial.with_name(partial.name + OLD)
    path.rename(old)
    try:
        partial.rename(path)
    except OSError:
        old.rename(path)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _flush(folder: Path) -> None:
    """Force the files to the disk, so that a crash of the machine cannot follow the rename."""
    for file in folder.rglob("*"):
        if file.is_file():
            with open(file, "rb") as stream:
                os.fsync(stream.fileno())


def _names_storage(fault: BaseException) -> bool:
    return _says(fault, (*FULL, "Read-only"))


def _says(fault: BaseException, signs: tuple[str, ...]) -> bool:
    chain = [fault, fault.__cause__, fault.__context__]
    return any(sign in str(link) for link in chain for sign in signs)


def _unwritable(path: Path, fault: BaseException) -> ConversionError:
    full = getattr(fault, "errno", None) in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    if full or _says(fault, FULL):
        return ConversionError(f"the disk is full: {path} was not written; free some space")
    reason = getattr(fault, "strerror", None) or " ".join(str(fault).split())[:200]
    return ConversionError(f"{path} cannot be written ({reason}); choose another destination")

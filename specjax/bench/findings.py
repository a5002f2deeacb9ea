"""Writing what was measured: whole or not at all, and refused before the measuring begins."""

import contextlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any


def writable(path: str | Path) -> Path:
    """``path``, if it can be written to; raises ValueError, naming the reason, if not."""
    target = Path(path)
    try:
        if target.is_dir() or not target.absolute().parent.is_dir():
            raise ValueError(f"cannot write {path}: its folder does not exist, or it is a folder")
        existed = target.exists()
        with open(target, "ab"):
            pass
        if not existed:
            target.resolve().unlink()  # of a link that led nowhere, what it leads to
        if is_replaced(target):
            handle, partial = _beside(target.resolve())
            os.close(handle)
            os.unlink(partial)
    except OSError as fault:
        raise _unwritable(target, fault) from None
    return target


def is_replaced(path: Path) -> bool:
    """Whether a new file takes the path's place; a device or a pipe (/dev/stdout) stays."""
    return path.is_file() or not path.exists()


def write_json(path: Path, found: Any) -> None:
    """Writes ``found`` as JSON. Raises ValueError where the disk does not take all of it."""
    write_text(path, json.dumps(found, indent=2) + "\n")


def write_text(path: Path, text: str) -> None:
    """Writes a whole file, or none. Raises ValueError where the disk does not take all of it."""
    try:
        if is_replaced(path):
            _replace(path.resolve(), text)
        else:
            path.write_text(text, encoding="utf-8")
    except OSError as fault:
        raise _unwritable(path, fault) from None


def _beside(path: Path) -> tuple[int, str]:
    """A new file in the same folder, whose name is short however long the path's is."""
    return tempfile.mkstemp(dir=path.parent, prefix=".specjax-")


def _replace(path: Path, text: str) -> None:
    handle, partial = _beside(path)
    try:
        with open(handle, "w", encoding="utf-8") as stream:
            stream.write(text)
        os.chmod(partial, path.stat().st_mode & 0o777 if path.exists() else 0o644)
        os.replace(partial, path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(partial)


def _unwritable(path: Path, fault: OSError) -> ValueError:
    return ValueError(f"cannot write {path}: {fault.strerror}; choose another place")

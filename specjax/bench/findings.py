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
    if target.is_dir() or not target.absolute().parent.is_dir():
        raise ValueError(f"cannot write {path}: its folder does not exist, or it is a folder")
    existed = target.exists()
    try:
        with open(target, "ab"):
            pass
    except OSError as fault:
        raise _unwritable(target, fault) from None
    if not existed:
        target.unlink()
    return target


def write_json(path: Path, found: Any) -> None:
    """Writes ``found`` as JSON. Raises ValueError where the disk does not take all of it."""
    write_text(path, json.dumps(found, indent=2) + "\n")


def write_text(path: Path, text: str) -> None:
    """Writes a whole file, or none. Raises ValueError where the disk does not take all of it."""
    try:
        # A device or a pipe (/dev/stdout) must not be replaced by a file.
        if path.exists() and not path.is_file():
            path.write_text(text, encoding="utf-8")
        else:
            _replace(path.resolve(), text)
    except OSError as fault:
        raise _unwritable(path, fault) from None


def _replace(path: Path, text: str) -> None:
    handle, partial = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
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

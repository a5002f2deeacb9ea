"""The conversion itself: a source, what was found in it, its parameters, a checkpoint folder."""

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ckpt_convert import arrays, chunks, drafters, inspection, store
from ckpt_convert.drafters import UNSAID, Choices, DrafterConversion, DrafterFinding
from ckpt_convert.errors import ConversionError
from ckpt_convert.gguf_source import GGUFSource
from ckpt_convert.inspection import Finding
from ckpt_convert.packing import by_parameter, place_quantised
from ckpt_convert.progress import progress
from ckpt_convert.safetensors_source import DTYPES, PICKLES, SafetensorsSource, sha256
from ckpt_convert.source import Source
from ckpt_convert.tensors import Placement, place
from specjax.models.decoder import DecoderConfig
from specjax.models.quantised import SCHEMES

AUTO = "auto"
STORED_DTYPES = {"float32": DTYPES["F32"], "bfloat16": DTYPES["BF16"], "float16": DTYPES["F16"]}


@dataclass(frozen=True)
class Conversion:
    """What a conversion found and wrote; ``nbytes`` of parameters, in ``seconds``."""

    destination: Path
    family: str
    config: DecoderConfig
    dtype: str
    parameters: int
    tensors: int
    ignored: dict[str, str]
    tokenizer_files: tuple[str, ...]
    nbytes: int
    seconds: float
    quantization: str | None = None

    def __str__(self) -> str:
        matrices = f", matrices in {self.quantization}" if self.quantization else ""
        size = f"{self.nbytes / 1e6:,.1f} MB of {self.dtype}{matrices}"
        return f"written     {self.destination}: {size} in {self.seconds:.1f} s"


def open_source(path: Path) -> Source:
    """The reader for ``path``; raises ``ConversionError`` where there is none."""
    try:
        return _reader(path)
    except OSError as fault:
        raise ConversionError(
            f"{fault.filename or path} cannot be read: {fault.strerror}; check the file and its "
            "permissions"
        ) from None


def _reader(path: Path) -> Source:
    if path.is_dir():
        if store.is_checkpoint(path):
            raise ConversionError(f"{path} is a specjax checkpoint already")
        return SafetensorsSource(path)
    if not path.exists():
        raise ConversionError(f"{path} does not exist")
    if path.suffix == ".gguf":
        return GGUFSource(path)
    if path.suffix in PICKLES:
        raise ConversionError(
            f"{path} is a PyTorch pickle, which is never executed; have Transformers save the "
            "model as safetensors"
        )
    if path.suffix == ".safetensors":
        raise ConversionError(f"{path} is a part of a model; give the folder with its config.json")
    raise ConversionError(
        f"{path} is no checkpoint that can be read: give a .gguf file, or the folder that holds "
        "config.json and the safetensors"
    )


def inspect(
    source: str | Path,
    *,
    dtype: str = AUTO,
    drafter: bool = False,
    choices: Choices = UNSAID,
) -> Finding | DrafterFinding:
    """What ``source`` holds and all faults that keep it from being converted; writes nothing.

    Raises ``ConversionError`` for a source that cannot be opened at all, and for a drafter that
    cannot be converted. ``drafter`` and ``choices`` are those of `convert`.
    """
    source, wanted = Path(source), _stored_dtype(dtype)
    if _is_drafter(source, drafter, choices):
        return drafters.inspect_drafter(source, choices, dtype=wanted)
    return inspection.look(open_source(source), source, wanted)


def _is_drafter(source: Path, drafter: bool, choices: Choices) -> bool:
    """A drafter's folder is known by its tensors; one inside a model is taken when asked for."""
    foreign = source.is_dir() and not store.is_checkpoint(source)
    if drafter or (foreign and drafters.is_drafter(source)):
        return True
    if choices != UNSAID:
        raise ConversionError(
            f"{source} holds no drafter, and {', '.join(choices.said())} is chosen for drafters "
            "only; leave it out"
        )
    return False


def convert(
    source: str | Path,
    destination: str | Path,
    *,
    dtype: str = AUTO,
    shard_for: str | None = None,
    quantize: str | None = None,
    overwrite: bool = False,
    drafter: bool = False,
    choices: Choices = UNSAID,
    found: Callable[[Any], None] = lambda finding: None,
) -> Conversion | DrafterConversion:
    """Convert a Hugging Face folder, a GGUF file or a drafter into a checkpoint folder.

    ``dtype``: auto (the source's own; float32 for a quantised GGUF), float32, bfloat16 or float16.
    ``shard_for``: a mesh, "2x4" or "data=2,model=4", each device of which shall read its own bytes
    only; any other mesh can read the checkpoint too. ``quantize``: int8 or int4, for matrices in
    these (`specjax.models.quantised`). ``drafter`` takes the drafter that lies in a model's
    checkpoint, beside it; ``choices`` says of a drafter what no flag does. ``found`` is told what
    the source holds before any tensor is read, by a `Finding` or `DrafterFinding`. Memory stays
    near one copy of the model. Raises ``ConversionError`` for any source that cannot be read or
    mapped in full and any destination that cannot be written; nothing is left then.
    """
    began = time.perf_counter()
    wanted, destination = _stored_dtype(dtype), Path(destination)
    mesh = None if shard_for is None else chunks.parse_mesh(shard_for)
    if quantize is not None and quantize not in SCHEMES:
        known = ", ".join(SCHEMES)
        raise ConversionError(f"quantization {quantize!r} is not known (known: {known})")
    store.refuse_existing(destination, overwrite)
    # Not `Path.resolve`, which knows an error of its own for links that lead in a circle.
    if Path(os.path.realpath(source)).is_relative_to(os.path.realpath(destination)):
        raise ConversionError(
            f"{source} lies in {destination}, which would be replaced; choose another destination"
        )
    if _is_drafter(Path(source), drafter, choices):
        if mesh is not None:
            raise ConversionError("a drafter is not cut for a mesh; leave --shard-for out")
        if quantize is not None:
            raise ConversionError("a drafter is not quantised; leave --quantize out")
        return drafters.convert_drafter(
            source, destination, choices, dtype=wanted, overwrite=overwrite, found=found
        )
    reader = open_source(Path(source))
    finding = inspection.look(reader, Path(source), wanted)
    finding.refuse_faults()
    found(finding)
    params = _params(reader, finding, quantize)
    manifest = replace(_manifest(reader, finding), quantization=quantize)
    cut = None
    if mesh is not None:
        cut = chunks.chunk_shapes(reader.config, quantize, params, mesh, arrays.CHUNK)
    store.save(
        destination, params, manifest, _beside(reader, finding), chunks=cut, overwrite=overwrite
    )
    return Conversion(
        destination=destination,
        family=manifest.family,
        config=manifest.config,
        dtype=manifest.dtype,
        parameters=finding.parameters,
        tensors=sum(finding.kinds.values()),
        ignored=finding.ignored,
        tokenizer_files=manifest.tokenizer_files,
        nbytes=arrays.nbytes(params),
        seconds=time.perf_counter() - began,
        quantization=manifest.quantization,
    )


def _params(reader: Source, finding: Finding, quantize: str | None) -> dict[str, Any]:
    if quantize is None:
        return place(_read(reader), _converting(finding.placements), reader.config, finding.dtype)
    ordered = _converting(by_parameter(finding.placements))
    return place_quantised(_read(reader), ordered, reader.config, finding.dtype, quantize)


def _converting(placements: list[Placement]) -> Iterator[Placement]:
    return progress(placements, len(placements), "converting", "tensor")


def _manifest(reader: Source, finding: Finding) -> store.Manifest:
    return store.Manifest(
        family=reader.family.name,
        config=reader.config,
        dtype=finding.dtype.name,
        eos_ids=reader.eos_ids,
        bos_id=reader.bos_id,
        source=finding.source.name,
        source_sha256=sha256(reader.files),
        tokenizer_files=tuple(finding.tokenizer),
        generation=reader.generation,
    )


def _beside(reader: Source, finding: Finding) -> dict[str, bytes]:
    """What goes into the folder with the arrays: the tokenizer, and the source's own settings."""
    originals = reader.original_files().items()
    return finding.tokenizer | {f"{store.SOURCE}/{name}": content for name, content in originals}


def _stored_dtype(dtype: str) -> np.dtype | None:
    if dtype != AUTO and dtype not in STORED_DTYPES:
        known = ", ".join([AUTO, *STORED_DTYPES])
        raise ConversionError(f"dtype {dtype!r} is not known (known: {known})")
    return STORED_DTYPES.get(dtype)


def _read(reader: Source) -> Callable[..., np.ndarray]:
    def read(name: str, rows: slice | None = None) -> np.ndarray:
        try:
            return reader.read(name, rows)
        except OSError as fault:
            raise ConversionError(
                f"{name} cannot be read: {fault.strerror}; check the disk that holds the source"
            ) from None

    return read

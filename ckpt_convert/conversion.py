"""The conversion itself: a source, its plan, its parameters, a checkpoint folder."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ckpt_convert import store
from ckpt_convert.errors import ConversionError
from ckpt_convert.gguf_source import GGUFSource
from ckpt_convert.packing import by_parameter, place_quantised
from ckpt_convert.safetensors_source import DTYPES, SafetensorsSource, sha256
from ckpt_convert.tensors import Placement, parameter_shapes, place, plan
from specjax.models.decoder import DecoderConfig
from specjax.models.quantised import SCHEMES

AUTO = "auto"
STORED_DTYPES = {"float32": DTYPES["F32"], "bfloat16": DTYPES["BF16"], "float16": DTYPES["F16"]}


@dataclass(frozen=True)
class Conversion:
    """What a conversion found and wrote."""

    destination: Path
    family: str
    config: DecoderConfig
    dtype: str
    parameters: int
    tensors: int
    ignored: dict[str, str]
    tokenizer_files: tuple[str, ...]
    quantization: str | None = None

    def __str__(self) -> str:
        windowed = sum(window is not None for window in self.config.windows)
        lines = [
            f"family      {self.family}",
            f"parameters  {self.parameters / 1e6:,.1f} million, {self.dtype}"
            + (f", matrices in {self.quantization}" if self.quantization else ""),
            f"vocabulary  {self.config.vocab_size:,}",
            f"context     {self.config.max_position:,}"
            + (f", {windowed} layers with a sliding window" if windowed else ""),
            f"tensors     {self.tensors}",
            *(f"ignored     {name}: {reason}" for name, reason in self.ignored.items()),
            "tokenizer   " + (", ".join(self.tokenizer_files) or "none: token ids only"),
            f"written     {self.destination}",
        ]
        return "\n".join(lines)


def open_source(path: Path) -> SafetensorsSource | GGUFSource:
    """The reader for ``path``; raises ``ConversionError`` where there is none."""
    if path.is_dir():
        if store.is_checkpoint(path):
            raise ConversionError(f"{path} is a specjax checkpoint already")
        return SafetensorsSource(path)
    if not path.exists():
        raise ConversionError(f"{path} does not exist")
    if path.suffix == ".gguf":
        return GGUFSource(path)
    raise ConversionError(
        f"{path} is no checkpoint that can be read: give a .gguf file, or the folder that holds "
        "config.json and the safetensors"
    )


def convert(
    source: str | Path,
    destination: str | Path,
    *,
    dtype: str = AUTO,
    quantize: str | None = None,
    overwrite: bool = False,
) -> Conversion:
    """Convert a Hugging Face folder or a GGUF file into a checkpoint folder.

    ``dtype``: auto (the source's own; float32 for a quantised GGUF), float32, bfloat16 or float16.
    ``quantize``: int8 or int4, for matrices in these (`specjax.models.quantised`).
    Memory stays near one copy of the model. Raises ``ConversionError`` for any source that cannot
    be read or mapped in full and any destination that cannot be written; nothing is left then.
    """
    if dtype != AUTO and dtype not in STORED_DTYPES:
        known = ", ".join([AUTO, *STORED_DTYPES])
        raise ConversionError(f"dtype {dtype!r} is not known (known: {known})")
    if quantize is not None and quantize not in SCHEMES:
        known = ", ".join(SCHEMES)
        raise ConversionError(f"quantization {quantize!r} is not known (known: {known})")
    destination = Path(destination)
    store.refuse_existing(destination, overwrite)
    reader = open_source(Path(source))
    placements, ignored = plan(reader.tensors, reader.rules, reader.ignored, reader.config)
    stored = reader.dtype if dtype == AUTO else STORED_DTYPES[dtype]
    if quantize is None:
        params = place(reader.read, progress(placements), reader.config, stored)
    else:
        ordered = progress(by_parameter(placements))
        params = place_quantised(reader.read, ordered, reader.config, stored, quantize)
    manifest = store.Manifest(
        family=reader.family.name,
        config=reader.config,
        dtype=stored.name,
        eos_ids=reader.eos_ids,
        bos_id=reader.bos_id,
        source=Path(source).name,
        source_sha256=sha256(reader.files),
        generation=reader.generation,
        quantization=quantize,
    )
    manifest = store.save(
        destination, params, manifest, reader.write_tokenizer, overwrite=overwrite
    )
    return Conversion(
        destination=destination,
        family=manifest.family,
        config=manifest.config,
        dtype=manifest.dtype,
        parameters=_count(parameter_shapes(reader.config)),
        tensors=len(placements),
        ignored=ignored,
        tokenizer_files=manifest.tokenizer_files,
        quantization=manifest.quantization,
    )


def _count(shapes) -> int:
    if isinstance(shapes, dict):
        return sum(_count(inner) for inner in shapes.values())
    return math.prod(shapes)


def progress(placements: list[Placement]) -> Iterator[Placement]:
    """``placements``, with a bar on a terminal's or a notebook's stderr after two seconds."""
    from tqdm.auto import tqdm

    bar: Iterable[Placement] = tqdm(
        placements, desc="converting", unit="tensor", delay=2.0, disable=None
    )
    yield from bar

"""A checkpoint back into Hugging Face's format: the rules of the conversion, read backwards."""

import json
import math
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ckpt_convert import atomic_folder, store
from ckpt_convert.errors import ConversionError
from ckpt_convert.families import FAMILIES
from ckpt_convert.families.family import Family
from ckpt_convert.hf_synthesis import synthesised
from ckpt_convert.progress import progress
from ckpt_convert.safetensors_source import DTYPES
from ckpt_convert.safetensors_writer import SafetensorsWriter
from ckpt_convert.store import Manifest
from ckpt_convert.tensors import Placement, bind
from specjax.models.decoder import DecoderConfig

TYPE_NAMES = {dtype.name: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Export:
    """What an export wrote: ``nbytes`` of ``tensors`` in ``files``, in ``seconds``."""

    destination: Path
    architecture: str
    dtype: str
    tensors: int
    files: int
    nbytes: int
    seconds: float

    def __str__(self) -> str:
        size = f"{self.nbytes / 1e6:,.1f} MB of {self.dtype}"
        return (
            f"written     {self.destination}: {self.architecture}, {self.tensors} tensors in "
            f"{self.files} files, {size} in {self.seconds:.1f} s"
        )


def export(
    source: str | Path,
    destination: str | Path,
) -> Export:
    """Write a checkpoint folder as a Hugging Face folder: safetensors, config.json, tokenizer.

    Values, names and dtype are those of the source if it was one itself and kept its dtype. The
    parameters are read one by one, so memory stays below one copy of the model. Raises
    ``ConversionError`` for a source that is no sound checkpoint, a destination that exists or
    cannot be written, and a model that Hugging Face's format has no configuration for.
    """
    began = time.perf_counter()
    source, destination = Path(source), Path(destination)
    atomic_folder.refuse_existing(destination)
    manifest = store.read_manifest(source)
    if manifest.quantization is not None:
        raise ConversionError(
            f"{source} holds {manifest.quantization} weights, which Hugging Face's format has not; "
            "export a checkpoint that was converted without --quantize"
        )
    family = _family(manifest)
    config = hf_config(source, manifest, family)
    wanted = _wanted(family, manifest.config)
    shapes = {name: parts[0].rule.shape(manifest.config) for name, parts in wanted.items()}
    kind = TYPE_NAMES[manifest.dtype]
    nbytes = sum(map(math.prod, shapes.values())) * DTYPES[kind].itemsize
    with atomic_folder.written_whole(destination, nbytes) as partial:
        with SafetensorsWriter(partial, shapes, kind) as writer:
            _write_tensors(writer, wanted, source, manifest)
        _copy_configuration(source, partial, manifest, config)
    return Export(
        destination=destination,
        architecture=config["architectures"][0],
        dtype=manifest.dtype,
        tensors=len(wanted),
        files=len(set(writer.files.values())),
        nbytes=nbytes,
        seconds=time.perf_counter() - began,
    )


def _copy_configuration(
    source: Path, destination: Path, manifest: Manifest, config: dict[str, Any]
) -> None:
    text = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
    (destination / "config.json").write_text(text, encoding="utf-8")
    for name in (*manifest.tokenizer_files, f"{store.SOURCE}/generation_config.json"):
        if (source / name).is_file():
            shutil.copyfile(source / name, destination / Path(name).name)


def _family(manifest: Manifest) -> Family:
    by_name = {family.name: family for family in FAMILIES}
    if manifest.family not in by_name:
        raise ConversionError(
            f"{manifest.family} has no Hugging Face form here (supported: {', '.join(by_name)})"
        )
    return by_name[manifest.family]


# The configuration.


def hf_config(source: Path, manifest: Manifest, family: Family) -> dict[str, Any]:
    """The source's own config.json, or one made from the decoder's configuration.

    Raises ``ConversionError`` where neither reads back as the model that it is.
    """
    kept = source / store.SOURCE / "config.json"
    made = _text_model(kept, family) if kept.is_file() else synthesised(manifest, family)
    for stale in ("quantization_config", "compression_config"):  # undone in the tensors
        made.pop(stale, None)
    made["torch_dtype" if "torch_dtype" in made else "dtype"] = manifest.dtype
    try:
        same = family.from_hf(made) == manifest.config
    except ConversionError:
        same = False
    if not same:
        raise ConversionError(
            f"{source} is of the family {family.name} and has no config.json of Hugging Face's "
            "that says all of it; convert it from the safetensors, whose config.json is kept"
        )
    return made


def _text_model(kept: Path, family: Family) -> dict[str, Any]:
    """The configuration as it was; of a model with vision, that of the text model, which is all."""
    config = json.loads(kept.read_bytes())
    inner = config.get("text_config")
    return inner | {"architectures": [family.architectures[0]]} if inner else config


# The tensors.


def _wanted(family: Family, config: DecoderConfig) -> dict[str, list[Placement]]:
    """Every tensor of the model, the ends first, and the parts of parameters that it is made of."""
    bound = bind(family.hf_rules, config)
    return dict(sorted(bound.items(), key=lambda entry: entry[1][0].index[:1]))


def _write_tensors(
    writer: SafetensorsWriter,
    wanted: dict[str, list[Placement]],
    source: Path,
    manifest: Manifest,
) -> None:
    """Each parameter is read once and taken apart into its tensors, wherever those lie."""
    by_path: dict[tuple[str, ...], list[list[Placement]]] = {}
    for parts in wanted.values():
        by_path.setdefault(parts[0].rule.path, []).append(parts)
    stored = store.stream(source, manifest)
    for path, values in progress(stored, len(by_path), "exporting", "parameter"):
        for parts in by_path[path]:
            writer.write(parts[0].name, _backwards(values, parts, manifest.config))
        del values


def _backwards(values: np.ndarray, parts: list[Placement], config: DecoderConfig) -> np.ndarray:
    """One tensor in the source's layout, out of the parameter that it went into."""
    blocks = [
        part.rule.undo(values[part.index][part.rule.part(config)], config)
        for part in sorted(parts, key=lambda part: part.rule.block)
    ]
    return blocks[0] if len(blocks) == 1 else np.concatenate(blocks)

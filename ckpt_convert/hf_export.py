"""A checkpoint back into Hugging Face's format: the rules of the conversion, read backwards."""

import json
import math
import shutil
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ckpt_convert import atomic_folder, store
from ckpt_convert.errors import ConversionError
from ckpt_convert.families import FAMILIES
from ckpt_convert.families.family import Family
from ckpt_convert.safetensors_source import DTYPES
from ckpt_convert.safetensors_writer import SafetensorsWriter
from ckpt_convert.store import Manifest
from ckpt_convert.tensors import TensorRule, leaf, letter_sizes, parameter_shapes, turn
from specjax.models.decoder import DecoderConfig
from specjax.models.rope import Rope

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
    family = _family(manifest)
    config = hf_config(source, manifest, family)
    wanted = _wanted(family, manifest.config)
    shapes = {tensor.name: tensor.rule.shape(manifest.config) for tensor in wanted}
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
    made = json.loads(kept.read_bytes()) if kept.is_file() else _synthesised(manifest, family)
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


def _synthesised(manifest: Manifest, family: Family) -> dict[str, Any]:
    config = manifest.config
    made = {
        "architectures": [family.architectures[0]],
        "model_type": family.name,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_position,
        "rms_norm_eps": config.rms_norm_eps,
        "hidden_act": "silu",
        "tie_word_embeddings": config.tie_embeddings,
        "eos_token_id": list(manifest.eos_ids),
        "bos_token_id": manifest.bos_id,
    }
    return made | _synthesised_rope(config.rope)


def _synthesised_rope(rope: Rope) -> dict[str, Any]:
    scaling = {
        "default": {},
        "linear": {"factor": rope.factor},
        "llama3": {
            "factor": rope.factor,
            "low_freq_factor": rope.low_freq_factor,
            "high_freq_factor": rope.high_freq_factor,
            "original_max_position_embeddings": rope.original_max_position,
        },
    }
    if rope.kind not in scaling:
        raise ConversionError(
            f"RoPE of type {rope.kind!r} can't be written without the source's config.json; "
            "convert it from the safetensors, whose config.json is kept"
        )
    if rope.kind == "default":
        return {"rope_theta": rope.theta, "rope_scaling": None}
    return {
        "rope_theta": rope.theta,
        "rope_scaling": {"rope_type": rope.kind} | scaling[rope.kind],
    }


# The tensors.


@dataclass(frozen=True)
class Wanted:
    """One tensor to write: the rule to read backwards, and the layer (0 where there is none)."""

    name: str
    rule: TensorRule
    layer: int


def _wanted(family: Family, config: DecoderConfig) -> list[Wanted]:
    """Every tensor of the model: the ends first, then layer by layer."""
    shapes = parameter_shapes(config)
    wanted = [
        Wanted(name, rule, layer)
        for rule in family.hf_rules
        if leaf(shapes, rule.path) is not None
        for layer, name in enumerate(rule.names(config))
    ]
    return sorted(wanted, key=lambda tensor: (tensor.rule.path[0] == "layers", tensor.layer))


def _write_tensors(
    writer: SafetensorsWriter, wanted: list[Wanted], source: Path, manifest: Manifest
) -> None:
    """Each parameter is read once and taken apart into its tensors, wherever those lie."""
    by_path: dict[tuple[str, ...], list[Wanted]] = {}
    for tensor in wanted:
        by_path.setdefault(tensor.rule.path, []).append(tensor)
    for path, values in progress(store.stream(source, manifest), len(by_path)):
        for tensor in by_path[path]:
            writer.write(tensor.name, backwards(values, tensor, manifest.config))
        del values


def backwards(values: np.ndarray, tensor: Wanted, config: DecoderConfig) -> np.ndarray:
    """One tensor in the source's layout, out of the parameter that it went into."""
    rule = tensor.rule
    if rule.path[0] == "layers":
        values = values[tensor.layer]
    left, right = rule.turn.split("->")
    return turn(values[rule.part(config)], f"{right} -> {left}", letter_sizes(config))


def progress(
    parameters: Iterable[tuple[tuple[str, ...], np.ndarray]], total: int
) -> Iterator[tuple[tuple[str, ...], np.ndarray]]:
    """``parameters``, with a bar on a terminal's or a notebook's stderr after two seconds."""
    from tqdm.auto import tqdm

    yield from tqdm(
        parameters, total=total, desc="exporting", unit="parameter", delay=2.0, disable=None
    )

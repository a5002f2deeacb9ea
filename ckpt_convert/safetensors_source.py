"""A Hugging Face folder: ``config.json``, safetensors in one file or in shards, a tokenizer."""

import hashlib
import json
import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import ml_dtypes
import numpy as np

from ckpt_convert import mxfp4, quantised_source
from ckpt_convert.errors import ConversionError
from ckpt_convert.families import IGNORED, hf_family
from ckpt_convert.tensors import Ignored, TensorInfo, TensorRule

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
DTYPES = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
# Everything that a file may hold; parameters are made of the types above and of FP8.
STORED = DTYPES | {
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "BOOL": np.dtype(np.bool_),
    **{
        f"{kind.upper()}{bits}": np.dtype(f"{name}{bits}")
        for kind, name in (("i", "int"), ("u", "uint"))
        for bits in (8, 16, 32, 64)
    },
}
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
)
Config = TypeVar("Config")
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
GENERATION_KEYS = (
    "do_sample",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "max_new_tokens",
)


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a safetensors file: where its bytes lie, and of what type they are."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    size: int

    def read(self, rows: slice | None = None) -> np.ndarray:
        shape, start, size = rows_of(self.shape, self.size, rows)
        # Not memory-mapped: mapped pages would count towards the process beside the parameters.
        # bfloat16 has no number in NumPy's files, so the bytes are read and viewed.
        raw = np.fromfile(self.file, np.uint8, size, offset=self.start + start)
        if raw.nbytes != size:
            raise ConversionError(f"{self.file} is truncated; fetch it again")
        return raw.view(STORED[self.dtype]).reshape(shape)


def rows_of(
    shape: tuple[int, ...], size: int, rows: slice | None
) -> tuple[tuple[int, ...], int, int]:
    """Of some rows of a tensor of ``size`` bytes: their shape, where they start, their bytes."""
    if rows is None:
        return shape, 0, size
    first, last, _ = rows.indices(shape[0])
    of_one = size // shape[0]
    return (last - first, *shape[1:]), first * of_one, (last - first) * of_one


class SafetensorsSource:
    """Reads a Hugging Face folder tensor by tensor.

    Raises ``ConversionError`` for a folder that is not a checkpoint, an unknown architecture, a
    missing or truncated file and weights quantised otherwise than to FP8 or MXFP4.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        _refuse_other_kinds(folder)
        config = read_json(folder / "config.json")
        quantised_source.refuse_unreadable(config, ())
        self.family = hf_family(config)
        self.config = understood(self.family.from_hf, config, folder / "config.json")
        self.rules: tuple[TensorRule, ...] = self.family.hf_rules
        self.ignored: tuple[Ignored, ...] = IGNORED
        if not self.config.tie_embeddings:
            self.ignored = tuple(entry for entry in IGNORED if "lm_head" not in entry.pattern)
        self._stored = stored_tensors(folder)
        quantised_source.refuse_unreadable(config, self._stored)
        self._block = quantised_source.block_shape(config)
        if any(stored.dtype in quantised_source.FP8 for stored in self._stored.values()):
            self.ignored += quantised_source.IGNORED_SCALES
        self._infos = {
            name: TensorInfo(stored.shape, stored.dtype) for name, stored in self._stored.items()
        }
        self.tensors = mxfp4.joined(self._infos)
        generation = _optional_json(folder / "generation_config.json")
        self.eos_ids = _ids("eos_token_id", generation, config)
        bos_ids = _ids("bos_token_id", generation, config)
        self.bos_id = bos_ids[0] if bos_ids else None
        self.generation = {
            key: generation[key] for key in GENERATION_KEYS if generation.get(key) is not None
        }

    @property
    def dtype(self) -> np.dtype:
        """Of the matrices; those of fewer bits become what the others are, else bfloat16."""
        scales = tuple(quantised_source.SCALES)
        found = [
            DTYPES[info.dtype]
            for name, info in self.tensors.items()
            if len(info.shape) > 1 and info.dtype in DTYPES and not name.endswith(scales)
        ]
        return promote(found or [DTYPES["BF16"]])

    @property
    def files(self) -> list[Path]:
        weights = {stored.file for stored in self._stored.values()}
        return [self.folder / "config.json", *sorted(weights)]

    def fault_of(self, name: str) -> str | None:
        kind = self.tensors[name].dtype
        if kind in DTYPES:
            return None
        if kind == mxfp4.KIND:
            return mxfp4.fault_of(name, self._infos)
        if kind not in quantised_source.FP8:
            known = ", ".join([*DTYPES, *quantised_source.FP8])
            return f"{name} is of type {kind}, which is not supported (supported: {known})"
        if quantised_source.scale_name(name, self._stored) is None:
            return f"{name} is FP8 without a scale; fetch the whole model"
        return None

    def read(self, name: str, rows: slice | None = None) -> np.ndarray:
        if self.tensors[name].dtype == mxfp4.KIND:
            parts = (self._stored[name + end].read(rows) for end in (mxfp4.BLOCKS, mxfp4.SCALES))
            return mxfp4.dequantise(name, *parts)
        if self._stored[name].dtype not in quantised_source.FP8:
            return self._stored[name].read(rows)
        scale = quantised_source.scale_name(name, self._stored)
        assert scale is not None  # `fault_of` says so before
        values = self._stored[name].read()
        whole = quantised_source.dequantise(values, self._stored[scale].read(), self._block)
        return whole if rows is None else whole[rows]

    def tokenizer_files(self) -> dict[str, bytes]:
        return _contents(self.folder, TOKENIZER_FILES)

    def original_files(self) -> dict[str, bytes]:
        return _contents(self.folder, ("config.json", "generation_config.json"))


def _refuse_other_kinds(folder: Path) -> None:
    if (folder / "config.json").is_file():
        return
    for file in sorted(folder.glob("*.gguf")):
        raise ConversionError(f"{folder} has no config.json; for its GGUF file give {file}")


def understood(read: Callable[[Any], Config], settings: Any, file: Path) -> Config:
    """``read(settings)``; raises ``ConversionError`` where a value is of no use to any model."""
    try:
        return read(settings)
    except ConversionError:
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as fault:
        said = str(fault).strip().partition("\n")[0]
        raise ConversionError(f"{file} describes no model ({said}); fetch it again") from fault


def _contents(folder: Path, names: tuple[str, ...]) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in names if (folder / name).is_file()}


def promote(dtypes: Any) -> np.dtype:
    """The type that all of ``dtypes`` are; float32 where they differ or are float64."""
    found = set(dtypes)
    return found.pop() if len(found) == 1 and found != {DTYPES["F64"]} else DTYPES["F32"]


def sha256(files: list[Path]) -> str:
    """SHA-256 of the contents of ``files``, one after the other."""
    digest = hashlib.sha256()
    for file in files:
        with open(file, "rb") as stream:
            while block := stream.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()


def read_json(file: Path) -> dict[str, Any]:
    """The JSON object in ``file``; raises ``ConversionError`` naming a missing or broken file."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConversionError(f"{file} is missing; fetch the whole model folder") from None
    except (OSError, RecursionError, ValueError) as fault:
        raise ConversionError(f"{file} cannot be read ({fault}); fetch it again") from None
    if not isinstance(value, dict):
        raise ConversionError(f"{file} holds no JSON object; fetch it again")
    return value


def _optional_json(file: Path) -> dict[str, Any]:
    return read_json(file) if file.is_file() else {}


def _ids(key: str, generation: Mapping[str, Any], config: Mapping[str, Any]) -> tuple[int, ...]:
    value = generation.get(key, config.get(key))
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(type(id) is int for id in ids):
        raise ConversionError(
            f"{key} is {value!r}, no token id; fetch the model's JSON files again"
        )
    return tuple(ids)


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    # A model that was saved anew in one file often has its old index beside it still.
    if (folder / SINGLE).is_file():
        return read_header(folder / SINGLE)
    if (folder / INDEX).is_file():
        shards = read_json(folder / INDEX).get("weight_map")
        if not isinstance(shards, Mapping) or not all(
            isinstance(one, str) for one in shards.values()
        ):
            raise ConversionError(f"{folder / INDEX} maps no tensors to files; fetch it again")
        return _sharded(folder, shards)
    refuse_pickles(folder)
    raise ConversionError(f"{folder} holds neither {SINGLE} nor {INDEX}; fetch the whole folder")


def refuse_pickles(folder: Path) -> None:
    """Raise for a folder with pickles in it."""
    pickles = [file.name for end in PICKLES for file in sorted(folder.glob(f"*{end}"))]
    if pickles:
        raise ConversionError(
            f"{folder} holds PyTorch pickles only ({pickles[0]}), which are never executed; have "
            "Transformers save a model as safetensors, and safetensors.torch a drafter's tensors"
        )


def _sharded(folder: Path, weight_map: Mapping[str, str]) -> dict[str, StoredTensor]:
    """The tensors that the index names, each from its own shard; other files do not count."""
    shards = sorted(set(weight_map.values()))
    absent = [shard for shard in shards if not (folder / shard).is_file()]
    if absent:
        raise ConversionError(
            f"{folder} lacks {', '.join(absent)}, which {INDEX} names; fetch the missing files"
        )
    headers = {shard: read_header(folder / shard) for shard in shards}
    lost = [f"{name} ({shard})" for name, shard in weight_map.items() if name not in headers[shard]]
    if lost:
        raise ConversionError(
            f"{INDEX} in {folder} names tensors that their shards lack: {', '.join(lost)}"
        )
    return {name: headers[shard][name] for name, shard in weight_map.items()}


def read_header(file: Path) -> dict[str, StoredTensor]:
    """The tensors of one safetensors file; raises ``ConversionError`` naming a truncated one."""
    size = file.stat().st_size
    if size == 0:
        raise ConversionError(f"{file} is empty; fetch it again")
    with open(file, "rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or length > size - 8:
            raise ConversionError(f"{file} is truncated or no safetensors file; fetch it again")
        try:
            header = json.loads(stream.read(length))
        except (RecursionError, ValueError):
            raise ConversionError(f"{file} is no safetensors file; fetch it again") from None
    try:
        header.pop("__metadata__", None)
        tensors = {name: _stored(file, 8 + length, name, entry) for name, entry in header.items()}
    except ConversionError:
        raise
    except (AttributeError, LookupError, TypeError, ValueError) as fault:
        raise ConversionError(f"{file} is damaged ({fault!r}); fetch it again") from None
    end = max((stored.start + stored.size for stored in tensors.values()), default=8 + length)
    if end > size:
        raise ConversionError(
            f"{file} is truncated: {size} bytes of the {end} that its header promises; "
            "fetch it again"
        )
    return tensors


def _stored(file: Path, data: int, name: str, entry: Mapping[str, Any]) -> StoredTensor:
    dtype, shape = entry["dtype"], tuple(map(operator.index, entry["shape"]))
    start, end = map(operator.index, entry["data_offsets"])
    if dtype not in STORED:
        raise ConversionError(
            f"{name} in {file} is of type {dtype}, which is not supported "
            f"(supported: {', '.join(STORED)})"
        )
    if start < 0 or end - start != math.prod(shape) * STORED[dtype].itemsize:
        raise ConversionError(f"{name} in {file} has {end - start} bytes for {list(shape)} {dtype}")
    return StoredTensor(file, dtype, shape, data + start, end - start)

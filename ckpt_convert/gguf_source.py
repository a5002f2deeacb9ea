"""A GGUF file: metadata, a tokenizer, tensors in any quantisation that ``gguf`` undoes."""

import functools
from pathlib import Path
from typing import Any

import numpy as np

from ckpt_convert.errors import ConversionError
from ckpt_convert.families import IGNORED, gguf_family
from ckpt_convert.families.gguf_config import ROPE_TENSORS, GGUFMetadata
from ckpt_convert.gguf_tokenizer import tokenizer_files
from ckpt_convert.safetensors_source import DTYPES, promote, rows_of, understood
from ckpt_convert.tensors import Ignored, TensorInfo, TensorRule

MAGIC = b"GGUF"
VERSIONS = (2, 3)
EXACT = {"F64": "F64", "F32": "F32", "F16": "F16", "BF16": "BF16"}
STOP_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
GENERATION_KEYS = {
    "general.sampling.temp": "temperature",
    "general.sampling.top_k": "top_k",
    "general.sampling.top_p": "top_p",
    "general.sampling.min_p": "min_p",
    "general.sampling.penalty_repeat": "repetition_penalty",
}


class GGUFSource:
    """Reads a GGUF file tensor by tensor, dequantised to float32.

    Raises ``ConversionError`` for a file that is no GGUF or is truncated, an unknown architecture,
    a quantisation that ``gguf`` cannot undo, and where the ``gguf`` package is not installed.
    """

    def __init__(self, file: Path):
        self.file = file
        reader = _open(file)
        self._fields = {name: field.contents() for name, field in reader.fields.items()}
        self._stored = {tensor.name: tensor for tensor in reader.tensors}
        self.tensors = {
            name: TensorInfo(_shape(tensor), tensor.tensor_type.name)
            for name, tensor in self._stored.items()
        }
        factors = {name: self.read(name) for name in ROPE_TENSORS if name in self._stored}
        metadata = GGUFMetadata(self._fields, frozenset(self.tensors), factors)
        self.family = gguf_family(metadata.architecture)
        if self.family.from_gguf is None:
            raise ConversionError(f"{self.family.name} has no GGUF form; convert the safetensors")
        self.config = understood(self.family.from_gguf, metadata, file)
        self.rules: tuple[TensorRule, ...] = self.family.gguf_rules
        self.ignored: tuple[Ignored, ...] = IGNORED
        self.eos_ids = tuple(
            dict.fromkeys(i for key in STOP_KEYS if (i := self._id(key)) is not None)
        )
        self.bos_id = self._id("bos_token_id")
        self.generation = {
            ours: self._fields[theirs]
            for theirs, ours in GENERATION_KEYS.items()
            if theirs in self._fields
        }

    @property
    def dtype(self) -> np.dtype:
        return promote(
            DTYPES[EXACT.get(info.dtype, "F32")]
            for info in self.tensors.values()
            if len(info.shape) > 1
        )

    @property
    def files(self) -> list[Path]:
        return [self.file]

    def fault_of(self, name: str) -> str | None:
        kind = self._stored[name].tensor_type
        if kind.name in EXACT or _is_dequantised(kind):
            return None
        return (
            f"{name} is quantised as {kind.name}, which gguf cannot dequantise; take a file of "
            "another quantisation"
        )

    def read(self, name: str, rows: slice | None = None) -> np.ndarray:
        import gguf

        tensor = self._stored[name]
        shape, start, size = rows_of(_shape(tensor), int(tensor.n_bytes), rows)
        # Read, not mapped: see StoredTensor.read.
        raw = np.fromfile(self.file, np.uint8, size, offset=tensor.data_offset + start)
        if raw.nbytes != size:
            raise ConversionError(f"{self.file} is truncated; fetch it again")
        kind = tensor.tensor_type.name
        if kind in EXACT:
            return raw.view(DTYPES[kind]).reshape(shape)
        packed = raw.reshape(*shape[:-1], -1)
        return gguf.quants.dequantize(packed, tensor.tensor_type).reshape(shape)

    def tokenizer_files(self) -> dict[str, bytes]:
        return tokenizer_files(self._fields)

    def original_files(self) -> dict[str, bytes]:
        return {}

    def _id(self, key: str) -> int | None:
        return self._fields.get(f"tokenizer.ggml.{key}")


@functools.cache
def _is_dequantised(kind: Any) -> bool:
    import gguf

    _, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    try:
        gguf.quants.dequantize(np.zeros((1, block_bytes), np.uint8), kind)
    except NotImplementedError:
        return False
    return True


def _shape(tensor: Any) -> tuple[int, ...]:
    return tuple(int(size) for size in reversed(tensor.shape))  # stored fastest axis first


def _open(file: Path) -> Any:
    _check_beginning(file)
    try:
        import gguf
    except ModuleNotFoundError:
        raise ConversionError(
            "reading GGUF needs the gguf package: pip install 'specjax[convert]'"
        ) from None
    try:
        reader = gguf.GGUFReader(file)
    except Exception as fault:  # the reader meets a cut with whatever NumPy raises at that place
        raise ConversionError(
            f"{file} is truncated or damaged ({type(fault).__name__}); fetch it again"
        ) from None
    end = max((tensor.data_offset + tensor.n_bytes for tensor in reader.tensors), default=0)
    if file.stat().st_size < end:
        raise ConversionError(f"{file} is truncated; fetch it again")
    _refuse_part(file, reader)
    return reader


def _check_beginning(file: Path) -> None:
    """Magic and version: the ``gguf`` package would read the wrong byte order, and we would not."""
    with open(file, "rb") as stream:
        beginning = stream.read(8)
    if not beginning:
        raise ConversionError(f"{file} is empty; fetch it again")
    if beginning[:4] != MAGIC:
        raise ConversionError(f"{file} is no GGUF file; fetch it again")
    version = int.from_bytes(beginning[4:], "little")
    if int.from_bytes(beginning[4:], "big") in VERSIONS:
        raise ConversionError(
            f"{file} is a big-endian GGUF file, of the wrong byte order; take the little-endian "
            f"one, or turn it with: gguf-convert-endian {file} little"
        )
    if len(beginning) == 8 and version not in VERSIONS:
        raise ConversionError(
            f"{file} is of GGUF version {version}, which is not supported (supported: "
            f"{', '.join(map(str, VERSIONS))}); take a newer file"
        )


def _refuse_part(file: Path, reader: Any) -> None:
    parts = reader.fields.get("split.count")
    if parts is not None and parts.contents() > 1:
        raise ConversionError(
            f"{file} is one of {parts.contents()} parts of a model; join them first with: "
            f"llama-gguf-split --merge FIRST-PART model.gguf"
        )

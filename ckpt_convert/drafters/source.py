"""A folder with a drafter in it, as published: its configuration and its tensors."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from ckpt_convert import quantised_source
from ckpt_convert.errors import ConversionError
from ckpt_convert.safetensors_source import DTYPES as FLOATS
from ckpt_convert.safetensors_source import (
    INDEX,
    SINGLE,
    StoredTensor,
    promote,
    read_header,
    read_json,
    stored_tensors,
)
from ckpt_convert.tensors import TensorInfo


@dataclass(frozen=True)
class Choices:
    """What no flag in a checkpoint settles, said by whoever converts it; None: not said.

    Attributes:
        layout: of a drafted block, "fill-in" or "anchor-first".
        taps: what the tapped layers' numbers mean, "after-layer" (i: the output of layer i) or
            "hidden-states" (i: the input of layer i); or the numbers of the layers whose outputs
            are tapped, "1,15,28", whatever the configuration says.
        embedding: "raw" rows or rows "scaled" by the square root of their width.
    """

    layout: str | None = None
    taps: str | None = None
    embedding: str | None = None

    def said(self) -> list[str]:
        """The names of what was said."""
        return [entry.name for entry in fields(self) if getattr(self, entry.name) is not None]


UNSAID = Choices()


@dataclass(frozen=True)
class Found:
    """A drafter's configuration and tensors, under the names that the formats' rules use.

    ``speculators`` says that the configuration was one of that library's, flattened since.
    """

    config: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]
    read: Callable[[str], np.ndarray]
    choices: Choices = UNSAID
    speculators: bool = False

    def renamed(self, renames: tuple[tuple[str, str], ...]) -> "Found":
        """The same under names that the patterns of ``renames`` rewrite, one after the other."""
        original = {_rewritten(name, renames): name for name in self.tensors}
        if len(original) < len(self.tensors):
            twice = sorted(set(self.tensors) - set(original.values()))
            raise ConversionError(f"the checkpoint holds {twice[0]} under two names")
        return replace(
            self,
            tensors={name: self.tensors[old] for name, old in original.items()},
            read=lambda name: self.read(original[name]),
        )

    def shape(self, name: str) -> tuple[int, ...]:
        if name not in self.tensors:
            raise ConversionError(f"the checkpoint has no {name}; fetch the complete checkpoint")
        return self.tensors[name].shape

    def optional(self, name: str) -> np.ndarray | None:
        return self.read(name) if name in self.tensors else None

    @property
    def dtype(self) -> np.dtype:
        """Of the matrices; bfloat16 where there are none but FP8."""
        matrices = [info.dtype for info in self.tensors.values() if len(info.shape) > 1]
        return promote([FLOATS[kind] for kind in matrices if kind in FLOATS] or [FLOATS["BF16"]])


def _rewritten(name: str, renames: tuple[tuple[str, str], ...]) -> str:
    for pattern, replacement in renames:
        name = re.sub(pattern, replacement, name)
    return name


def open_folder(folder: Path) -> tuple[Found, list[Path]]:
    """What ``folder`` holds, and the files it was read from.

    FP8 is undone as it is read. Raises ``ConversionError`` for a missing or truncated file, for
    other quantisations, and for pickles, which are never opened.
    """
    config = read_json(folder / "config.json")
    stored = _stored_tensors(folder)
    quantised_source.refuse_unreadable(config, stored)
    scales = {quantised_source.scale_name(name, stored) for name in stored}
    tensors = {
        name: TensorInfo(entry.shape, entry.dtype)
        for name, entry in stored.items()
        if name not in scales
    }
    block = quantised_source.block_shape(config)

    def read(name: str) -> np.ndarray:
        values = stored[name].read()
        if stored[name].dtype not in quantised_source.FP8:
            return values
        scale = quantised_source.scale_name(name, stored)
        if scale is None:
            raise ConversionError(f"{name} is FP8 and has no scale; fetch the complete checkpoint")
        return quantised_source.dequantise(values, stored[scale].read(), block)

    files = sorted({entry.file for entry in stored.values()})
    return Found(config, tensors, read), [folder / "config.json", *files]


def _stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    whole = [folder / name for name in (INDEX, SINGLE) if (folder / name).is_file()]
    files = sorted(folder.glob("*.safetensors"))
    if whole or not files:
        return stored_tensors(folder)
    if len(files) > 1:
        raise ConversionError(
            f"{folder} holds {len(files)} safetensors files and no {INDEX} that joins them; "
            "fetch the complete checkpoint"
        )
    return read_header(files[0])

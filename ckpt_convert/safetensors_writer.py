"""Safetensors files whose tensors are known beforehand and filled in any order."""

import contextlib
import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from ckpt_convert.safetensors_source import DTYPES, INDEX, SINGLE

# Bytes of tensors in one file, as Hugging Face's own tools cut.
SHARD = 5 << 30


class SafetensorsWriter(contextlib.ExitStack):
    """Writes tensors of one type into a folder: a file, or shards and the index that names them.

    ``shapes``: every tensor's, by name, in the order of the files. ``kind``: the type as
    safetensors spells it. A context: all files are complete and closed when it ends.
    """

    def __init__(self, folder: Path, shapes: Mapping[str, tuple[int, ...]], kind: str):
        super().__init__()
        self._dtype = DTYPES[kind]
        sizes = {name: math.prod(shape) * self._dtype.itemsize for name, shape in shapes.items()}
        shards = dict(zip(sizes, _shards(sizes.values()), strict=True))
        names = _file_names(len(set(shards.values())))
        self.nbytes = sum(sizes.values())
        self.files = {tensor: names[shard] for tensor, shard in shards.items()}
        self._places: dict[str, tuple[BinaryIO, int]] = {}
        for file in names:
            inside = {name: size for name, size in sizes.items() if self.files[name] == file}
            header, starts = _header(inside, shapes, kind)
            stream = self.enter_context(open(folder / file, "wb"))
            stream.write(header)
            self._places |= {name: (stream, len(header) + at) for name, at in starts.items()}
        if len(names) > 1:
            index = {"metadata": {"total_size": self.nbytes}, "weight_map": self.files}
            (folder / INDEX).write_text(json.dumps(index, indent=2), encoding="utf-8")

    def write(self, name: str, values: np.ndarray) -> None:
        """Put one tensor in its place; ``values`` are of the writer's type and the given shape."""
        stream, place = self._places[name]
        stream.seek(place)
        stream.write(np.ascontiguousarray(values, self._dtype).reshape(-1).view(np.uint8).data)


def _shards(sizes: Iterable[int]) -> list[int]:
    """The number of each tensor's file: a new one where the next tensor would not fit."""
    shards, shard, filled = [], 0, 0
    for size in sizes:
        if filled and filled + size > SHARD:
            shard, filled = shard + 1, 0
        filled += size
        shards.append(shard)
    return shards


def _file_names(files: int) -> list[str]:
    if files <= 1:
        return [SINGLE]
    return [f"model-{file + 1:05d}-of-{files:05d}.safetensors" for file in range(files)]


def _header(
    sizes: Mapping[str, int], shapes: Mapping[str, tuple[int, ...]], kind: str
) -> tuple[bytes, dict[str, int]]:
    """The beginning of a file, its length included, and where each tensor starts after it."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    starts, end = {}, 0
    for name, size in sizes.items():
        starts[name], end = end, end + size
        entries[name] = {
            "dtype": kind,
            "shape": shapes[name],
            "data_offsets": [starts[name], end],
        }
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)  # so that the data are aligned
    return len(text).to_bytes(8, "little") + text, starts

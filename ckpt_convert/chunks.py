"""How a stored parameter is cut, so that each device of a mesh reads its own bytes only."""

import math
import re
from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import AbstractMesh

from ckpt_convert.errors import ConversionError
from ckpt_convert.packing import as_dicts
from specjax.models.decoder import DecoderConfig, parameter_axes
from specjax.models.quantised import quantised_axes
from specjax.sharding import MESH_AXES, parameter_shardings

Chunk = tuple[int, ...]


def parse_mesh(text: str) -> AbstractMesh:
    """The mesh that ``2x4`` or ``data=2,model=4`` means; no device is needed.

    Raises ``ConversionError`` for anything else.
    """
    named = re.fullmatch(r"(?:data=(?P<data>[1-9]\d*))?,?(?:model=(?P<model>[1-9]\d*))?", text)
    plain = re.fullmatch(r"(?P<data>[1-9]\d*)x(?P<model>[1-9]\d*)", text)
    found = plain or named
    if not text or found is None:
        raise ConversionError(
            f"the mesh {text!r} is not understood; give DATAxMODEL such as 2x4, or data=2,model=4"
        )
    sizes = [int(found[axis] or 1) for axis in MESH_AXES]
    return AbstractMesh(tuple(sizes), MESH_AXES)


def chunk_shapes(
    config: DecoderConfig,
    quantization: str | None,
    params: Mapping[str, Any],
    mesh: AbstractMesh,
    largest: int,
) -> dict[str, Any]:
    """The shape of each parameter's chunks: of what one device holds, or an even part of it.

    No chunk is above ``largest`` bytes.
    """
    axes = as_dicts(quantised_axes(parameter_axes(config, stacked=True), quantization))
    shardings = parameter_shardings(mesh, axes, params)
    return jax.tree.map(
        lambda leaf, sharding: _cut(sharding.shard_shape(leaf.shape), leaf.dtype.itemsize, largest),
        params,
        shardings,
    )


def _cut(shape: Chunk, itemsize: int, largest: int) -> Chunk:
    """``shape`` divided evenly along its first axes until it has at most ``largest`` bytes."""
    sizes = list(shape)
    for axis in range(len(sizes)):
        while sizes[axis] > 1 and math.prod(sizes) * itemsize > largest:
            sizes[axis] //= _smallest_divisor(sizes[axis])
    return tuple(sizes)


def _smallest_divisor(number: int) -> int:
    return next((d for d in range(2, math.isqrt(number) + 1) if number % d == 0), number)

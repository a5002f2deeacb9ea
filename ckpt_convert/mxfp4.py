"""MXFP4 (OCP Microscaling Formats 1.0): 4 bits a value, and a power of two for 32 values.

A safetensors file has ``X_blocks`` and ``X_scales``, both uint8, in the place of X. The blocks run
along the inputs, which gpt-oss's plain matrices have before the outputs; X is as these are: a
stack of experts. Nothing else is read so.
"""

import functools
from collections.abc import Mapping

import ml_dtypes
import numpy as np

from ckpt_convert.errors import ConversionError
from ckpt_convert.tensors import TensorInfo

KIND = "MXFP4"
BLOCKS, SCALES = "_blocks", "_scales"
BYTES = 16
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
BIAS = 127
# The last scale by which the largest value still is a number; 255 is none by the standard.
LAST_SCALE = 252


@functools.cache
def _pairs() -> np.ndarray:
    """The two values of each byte under each scale, the lower four bits first: [scales, 256]."""
    values = np.array([*MAGNITUDES, *(-value for value in MAGNITUDES)], np.float32)
    codes = np.arange(256)
    pairs = values[np.stack([codes & 15, codes >> 4], axis=-1)]
    factors = np.ldexp(np.float32(1), np.arange(LAST_SCALE + 1) - BIAS)
    # Both in one number, which is copied where they are looked up.
    return (factors[:, None, None] * pairs).astype(ml_dtypes.bfloat16).view(np.uint32)[..., 0]


def joined(tensors: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
    """``tensors`` with one of type MXFP4 in the place of each two."""
    pairs = {}
    for name, info in tensors.items():
        joint = name.removesuffix(BLOCKS)
        if joint not in tensors and info.dtype == "U8" and len(info.shape) == 4:
            pairs[joint] = info
    made = {name: TensorInfo(_shape(info.shape), KIND) for name, info in pairs.items()}
    parts = {name + end for name in pairs for end in (BLOCKS, SCALES)}
    return made | {name: info for name, info in tensors.items() if name not in parts}


def _shape(blocks: tuple[int, ...]) -> tuple[int, ...]:
    *leading, outputs, groups, size = blocks
    return (*leading, groups * size * 2, outputs)


def fault_of(name: str, tensors: Mapping[str, TensorInfo]) -> str | None:
    """Why MXFP4's ``name`` cannot be read out of the stored ``tensors``; None where it can."""
    scales, blocks = tensors.get(name + SCALES), tensors[name + BLOCKS]
    if scales is None:
        return f"{name} is MXFP4 without its scales; fetch the whole model"
    if scales.dtype != "U8":
        return (
            f"{name} has MXFP4 scales of type {scales.dtype}, not U8; fetch the whole model again"
        )
    if blocks.shape != (*scales.shape, BYTES):
        return (
            f"{name} has MXFP4 blocks of shape {list(blocks.shape)} for scales of shape "
            f"{list(scales.shape)}; fetch the whole model again"
        )
    return None


def dequantise(name: str, blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """The values [..., inputs, outputs], of blocks [..., outputs, G, 16], scales [..., outputs, G].

    bfloat16, in which all of them are exact. Raises ``ConversionError`` for scales that stand for
    no number.
    """
    if scales.size and scales.max() > LAST_SCALE:
        raise ConversionError(f"{name} has MXFP4 scales that are no numbers; fetch it again")
    table, pairs = _pairs(), np.empty(blocks.shape, np.uint32)
    for expert in np.ndindex(scales.shape[:-2]):  # NumPy makes indices of eight bytes
        pairs[expert] = table[scales[expert][..., None], blocks[expert]]
    values = pairs.view(ml_dtypes.bfloat16)
    return values.reshape(*scales.shape[:-1], scales.shape[-1] * BYTES * 2).swapaxes(-1, -2)

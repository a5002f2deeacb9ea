"""Quantised safetensors: FP8 is undone tensor by tensor; all but it and MXFP4 is refused by name.

FP8 checkpoints hold E4M3 numbers and beside each matrix ``X.weight`` a float scale: one a block of
128 x 128 (``X.weight_scale_inv``, DeepSeek-V3, arXiv 2412.19437), or one a matrix or a row
(``X.weight_scale``). Either is multiplied, whatever its name says.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from ckpt_convert.errors import ConversionError
from ckpt_convert.tensors import Ignored

FP8 = ("F8_E4M3", "F8_E5M2")
SCALES = ("_scale_inv", "_scale")
BLOCK = (128, 128)

IGNORED_SCALES = (
    Ignored(r".*\.weight_scale(_inv)?", "undone in the weights"),
    Ignored(
        r".*\.(input|output|activation|[qkv])_scale(_ub|_inv)?",
        "a scale for computing in FP8, which is not done",
    ),
)

# What each method leaves beside, or instead of, a weight, where no configuration names it.
_TRACES = {
    "GPTQ or AWQ": r".*\.qweight",
    "bitsandbytes": r".*\.(SCB|weight\.(absmax|quant_map|quant_state\..*))",
    "compressed-tensors": r".*\.weight_packed",
    "HQQ": r".*\.W_q",
}


def refuse_unreadable(config: Mapping[str, Any], tensors: Iterable[str]) -> None:
    """Raise for quantised weights other than FP8 and MXFP4, by the method's name."""
    settings = config.get("quantization_config") or config.get("compression_config") or {}
    if not isinstance(settings, Mapping):
        raise ConversionError("config.json's quantization_config is no object; fetch it again")
    method = _method(settings)
    if method is None:
        method = next((m for m, mark in _TRACES.items() if _any_matches(mark, tensors)), None)
    if method not in (None, "mxfp4") and not _is_fp8(settings):
        raise ConversionError(
            f"the weights are quantised by {method}, which is not supported (supported: FP8 and "
            "MXFP4 with scales); take the model's unquantised checkpoint, or a GGUF file of it"
        )


def _method(settings: Mapping[str, Any]) -> str | None:
    if not settings:
        return None
    if settings.get("load_in_4bit") or settings.get("load_in_8bit"):
        return "bitsandbytes"
    method = str(settings.get("quant_method") or "an unnamed method")
    kinds = [f"{bits} bits {kind}" for bits, kind in _compressed(settings)]
    return f"{method} ({', '.join(dict.fromkeys(kinds))})" if kinds else method


def _is_fp8(settings: Mapping[str, Any]) -> bool:
    method = settings.get("quant_method")
    if method == "compressed-tensors":
        kinds = _compressed(settings)
        return bool(kinds) and all(kind == (8, "float") for kind in kinds)
    if method == "modelopt":
        return settings.get("quant_algo") == "FP8"
    return method in ("fp8", "fbgemm_fp8")


def _compressed(settings: Mapping[str, Any]) -> list[tuple[Any, Any]]:
    groups = _object(settings.get("config_groups")).values()
    weights = [_object(_object(group).get("weights")) for group in groups]
    return [(kind.get("num_bits"), kind.get("type")) for kind in weights]


def _object(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _any_matches(pattern: str, names: Iterable[str]) -> bool:
    return any(re.fullmatch(pattern, name) for name in names)


def block_shape(config: Mapping[str, Any]) -> tuple[int, int]:
    """Rows and columns that share one scale."""
    settings = config.get("quantization_config") or {}
    block = settings.get("weight_block_size") or BLOCK
    if (
        not isinstance(block, list | tuple)
        or len(block) != 2
        or not all(isinstance(size, int) and size > 0 for size in block)
    ):
        raise ConversionError(f"config.json sets weight_block_size={block!r}; two sizes are needed")
    return block[0], block[1]


def scale_name(name: str, tensors: Iterable[str]) -> str | None:
    """The name of the scale that belongs to an FP8 tensor, if it is there."""
    return next((name + end for end in SCALES if name + end in tensors), None)


def dequantise(weight: np.ndarray, scale: np.ndarray, block: tuple[int, int]) -> np.ndarray:
    """``weight`` times its scales, float32.

    ``scale``: one number, one a row [rows] or [rows, 1], or one a block [rows / block[0],
    columns / block[1]], both rounded up. Raises ``ConversionError`` for any other shape.
    """
    values, scale = weight.astype(np.float32), scale.astype(np.float32)
    if scale.size == 1:
        return values * scale.reshape(())
    if values.ndim == 2 and scale.shape == values.shape[:1]:
        return values * scale[:, None]
    if scale.ndim == values.ndim and all(
        ours in (1, theirs) for ours, theirs in zip(scale.shape, values.shape, strict=True)
    ):
        return values * scale
    blocks = tuple(-(-size // along) for size, along in zip(values.shape, block, strict=False))
    if values.ndim != 2 or scale.shape != blocks:
        raise ConversionError(
            f"FP8 scales of shape {list(scale.shape)} do not fit weights of shape "
            f"{list(weight.shape)} in blocks of {list(block)}; fetch the whole model again"
        )
    for row, factors in enumerate(scale):  # never the scales at full size
        rows = slice(row * block[0], (row + 1) * block[0])
        values[rows] *= np.repeat(factors, block[1])[: values.shape[1]]
    return values

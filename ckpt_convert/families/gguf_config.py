"""Reading GGUF metadata, whose keys start with the architecture's name."""

import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from ckpt_convert.errors import ConversionError
from ckpt_convert.families.hf_config import longrope_attention_factor
from specjax.models.decoder import DecoderConfig
from specjax.models.experts import Routing
from specjax.models.rope import Rope

ROPE_FACTORS = "rope_freqs.weight"
SHORT_FACTORS, LONG_FACTORS = "rope_factors_short.weight", "rope_factors_long.weight"
ROPE_TENSORS = (ROPE_FACTORS, SHORT_FACTORS, LONG_FACTORS)
HEAD = "output.weight"


class GGUFMetadata:
    """One file's metadata: architecture-relative keys, tensor names and RoPE's factor tensors."""

    def __init__(
        self,
        fields: Mapping[str, Any],
        tensor_names: frozenset[str],
        rope_tensors: Mapping[str, np.ndarray] | None = None,
    ):
        self.fields = fields
        self.tensor_names = tensor_names
        self.rope_tensors = rope_tensors or {}
        self.architecture = fields.get("general.architecture")

    def get(self, key: str, default: Any = None) -> Any:
        value = self.fields.get(f"{self.architecture}.{key}", default)
        if isinstance(value, list) and len(set(value)) == 1:
            return value[0]  # some writers repeat a number for every layer
        return value

    def require(self, key: str) -> Any:
        value = self.get(key)
        if value is None:
            raise ConversionError(f"the GGUF metadata has no {self.architecture}.{key}")
        if isinstance(value, list):
            raise ConversionError(
                f"the GGUF metadata gives {self.architecture}.{key} layer by layer; not supported"
            )
        return value

    def number(self, key: str) -> float | None:
        """A number as it was written before it was stored in single precision."""
        value = self.get(key)
        return None if value is None else _shortest(value)

    def windows(self, every: int = 0, default: int | None = None) -> tuple[int | None, ...]:
        """Each layer's sliding window: by the file's own pattern, else all but each ``every``-th.

        0 is a window in every layer. ``default`` is the window of a file that tells none.
        """
        window = self.get("attention.sliding_window", default)
        if not window:
            return ()
        layers = range(self.require("block_count"))
        pattern = self.fields.get(f"{self.architecture}.attention.sliding_window_pattern")
        if isinstance(pattern, Iterable):
            windowed = [bool(flag) for flag in pattern]
        else:
            every = int(pattern or every)
            windowed = [not every or (layer + 1) % every != 0 for layer in layers]
        return tuple(window if windowed[layer] else None for layer in layers)


def decoder_config(
    metadata: GGUFMetadata,
    *,
    epsilon: str = "attention.layer_norm_rms_epsilon",
    default_theta: float = 10_000.0,
    attention_scale: float | None = None,
    partial_rotary: bool = False,
    **family: Any,
) -> DecoderConfig:
    """The fields that most families spell alike, and ``family``'s own on top.

    ``epsilon`` is the key of the norms' constant; ``default_theta`` and ``attention_scale`` are
    what counts where the file does not say.
    """
    heads = metadata.require("attention.head_count")
    hidden = metadata.require("embedding_length")
    head_dim = metadata.get("attention.key_length") or hidden // heads
    _same(metadata, "attention.value_length", head_dim)
    shared = {
        "vocab_size": _vocab_size(metadata),
        "hidden_size": hidden,
        "intermediate_size": metadata.require("feed_forward_length"),
        "num_layers": metadata.require("block_count"),
        "num_heads": heads,
        "num_kv_heads": metadata.get("attention.head_count_kv") or heads,
        "head_dim": head_dim,
        "max_position": metadata.require("context_length"),
        # Stored in single precision: 1e-5 comes back as 9.99999975e-06.
        "rms_norm_eps": _shortest(metadata.require(epsilon)),
        "tie_embeddings": HEAD not in metadata.tensor_names,
        "attention_scale": metadata.number("attention.scale") or attention_scale,
    }
    if "rope" not in family:
        if not partial_rotary:
            _same(metadata, "rope.dimension_count", head_dim)
        shared["rope"] = rope(metadata, head_dim, default_theta)
    if "windows" not in family:
        shared["windows"] = metadata.windows()
    return DecoderConfig(**(shared | family))


def routing(metadata: GGUFMetadata) -> Routing:
    """The experts of a mixture; llama.cpp renormalises the chosen shares of all that are read."""
    return Routing(metadata.require("expert_count"), metadata.require("expert_used_count"))


def _shortest(number: float) -> float:
    return float(str(np.float32(number)))


def _same(metadata: GGUFMetadata, key: str, head_dim: int) -> None:
    value = metadata.get(key, head_dim)
    if value != head_dim:
        raise ConversionError(
            f"the GGUF metadata sets {metadata.architecture}.{key}={value} with heads of "
            f"{head_dim}; not supported"
        )


def _vocab_size(metadata: GGUFMetadata) -> int:
    tokens = metadata.fields.get("tokenizer.ggml.tokens")
    return len(tokens) if tokens else metadata.require("vocab_size")


def rope(metadata: GGUFMetadata, head_dim: int, default_theta: float = 10_000.0) -> Rope:
    """RoPE from the metadata and the tensors of Llama 3's scaling or of LongRoPE.

    Raises ``ConversionError`` naming any scaling but none, linear and longrope, and for factors
    that no Llama 3 scaling explains.
    """
    theta = _shortest(metadata.get("rope.freq_base", default_theta))
    kind = metadata.get("rope.scaling.type") or "none"
    pairs = (metadata.get("rope.dimension_count") or head_dim) // 2
    partial = 2 * pairs / head_dim
    if LONG_FACTORS in metadata.rope_tensors and kind in ("none", "longrope"):
        return Rope(theta=theta, partial=partial, **_longrope(metadata, pairs))
    factor = metadata.get("rope.scaling.factor") or metadata.get("rope.scale_linear") or 1.0
    if kind not in ("none", "linear"):
        raise ConversionError(
            f"the GGUF metadata asks for RoPE scaling {kind!r}, which is not supported "
            "(supported: none, linear, and the factors of llama3 and longrope)"
        )
    factors = metadata.rope_tensors.get(ROPE_FACTORS)
    if factors is not None and not _is_inverse_frequencies(factors):
        if factor != 1.0:
            raise ConversionError(f"both {ROPE_FACTORS} and a linear RoPE factor; not supported")
        return llama3_rope(factors, theta, head_dim)
    # Files older than ``rope.scaling.type`` had the bare factor of linear scaling.
    if factor == 1.0:
        return Rope(theta=theta, partial=partial)
    return Rope(theta=theta, kind="linear", factor=_shortest(factor), partial=partial)


def _longrope(metadata: GGUFMetadata, pairs: int) -> dict[str, Any]:
    """LongRoPE's own settings; its factors are two tensors of one number a rotated pair."""
    for name in (SHORT_FACTORS, LONG_FACTORS):
        held = len(metadata.rope_tensors.get(name, ()))
        if held != pairs:
            raise ConversionError(f"{name} holds {held} RoPE factors; {pairs} are needed")
    original = metadata.require("rope.scaling.original_context_length")
    factor = metadata.require("context_length") / original
    attention = longrope_attention_factor(factor, original)
    stored = metadata.get("rope.scaling.attn_factor", attention)
    if not math.isclose(stored, attention, rel_tol=1e-6):  # in single precision at best
        attention = _shortest(stored)
    short, long = (
        tuple(_shortest(one) for one in metadata.rope_tensors[name])
        for name in (SHORT_FACTORS, LONG_FACTORS)
    )
    return {
        "kind": "longrope",
        "original_max_position": original,
        "short_factors": short,
        "long_factors": long,
        "attention_factor": attention,
    }


def _is_inverse_frequencies(factors: np.ndarray) -> bool:
    """True for the table of frequencies that very old files carried under the same name."""
    return len(factors) > 1 and bool(factors[-1] < 1.0)


def llama3_rope(factors: np.ndarray, theta: float, head_dim: int) -> Rope:
    """Llama 3's scaling that explains the divisors ``factors`` [W/2] of the frequencies.

    Between the two cut-offs the blend is linear in the frequency, so two such entries give slope
    and intercept. They fix the cut-offs up to a common scale, which RoPE does not depend on;
    ``low_freq_factor`` is put at 1, as published.
    """
    factors = np.asarray(factors, np.float64)
    if np.all(factors == 1.0):
        return Rope(theta=theta)
    turns = theta ** (-np.arange(0, head_dim, 2) / head_dim) / (2 * np.pi)
    factor = float(factors.max())
    blend = (1 / factors - 1 / factor) / (1 - 1 / factor)
    inner = np.flatnonzero((blend > 1e-3) & (blend < 1 - 1e-3))
    if len(inner) >= 2:
        slope, intercept = np.polyfit(turns[inner], blend[inner], 1)
        high = 1.0 + (1 / -intercept if intercept < 0 else np.inf)
        candidate = (high, slope * (high - 1.0))
    else:
        candidate = (4.0, 8192.0)
    high, original = candidate
    if np.isfinite(high) and high > 1:
        found = Rope(theta, "llama3", factor, 1.0, round(high, 3), round(original))
        if np.allclose(_llama3_factors(found, turns), factors, rtol=2e-3):
            return found
    raise ConversionError(
        f"{ROPE_FACTORS} holds RoPE factors that no Llama 3 scaling explains; "
        "convert from the safetensors instead"
    )


def _llama3_factors(rope: Rope, turns: np.ndarray) -> np.ndarray:
    span = rope.high_freq_factor - rope.low_freq_factor
    blend = (turns * rope.original_max_position - rope.low_freq_factor) / span
    blend = np.clip(blend, 0.0, 1.0)
    return 1 / ((1 - blend) / rope.factor + blend)

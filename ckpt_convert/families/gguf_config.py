"""Reading GGUF metadata, whose keys start with the architecture's name."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from ckpt_convert.errors import ConversionError
from specjax.models.decoder import DecoderConfig
from specjax.models.rope import Rope

ROPE_FACTORS = "rope_freqs.weight"
HEAD = "output.weight"


class GGUFMetadata:
    """One file's metadata: architecture-relative keys, tensor names and RoPE's factor tensor."""

    def __init__(
        self,
        fields: Mapping[str, Any],
        tensor_names: frozenset[str],
        rope_factors: np.ndarray | None = None,
    ):
        self.fields = fields
        self.tensor_names = tensor_names
        self.rope_factors = rope_factors
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


def decoder_config(metadata: GGUFMetadata, **family: Any) -> DecoderConfig:
    """The fields that all families spell alike, and ``family``'s own on top."""
    heads = metadata.require("attention.head_count")
    hidden = metadata.require("embedding_length")
    head_dim = metadata.get("attention.key_length") or hidden // heads
    _same(metadata, "attention.value_length", head_dim)
    _same(metadata, "rope.dimension_count", head_dim)
    layers = metadata.require("block_count")
    window = metadata.get("attention.sliding_window")
    return DecoderConfig(
        vocab_size=_vocab_size(metadata),
        hidden_size=hidden,
        intermediate_size=metadata.require("feed_forward_length"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=metadata.get("attention.head_count_kv") or heads,
        head_dim=head_dim,
        max_position=metadata.require("context_length"),
        # Stored in single precision: 1e-5 comes back as 9.99999975e-06.
        rms_norm_eps=_shortest(metadata.require("attention.layer_norm_rms_epsilon")),
        rope=rope(metadata, head_dim),
        tie_embeddings=HEAD not in metadata.tensor_names,
        windows=(window,) * layers if window else (),
        **family,
    )


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


def rope(metadata: GGUFMetadata, head_dim: int) -> Rope:
    """RoPE from the metadata, or, for Llama 3's scaling, from the tensor of factors.

    Raises ``ConversionError`` naming any scaling but none and linear, and for factors that no
    Llama 3 scaling explains.
    """
    theta = _shortest(metadata.get("rope.freq_base", 10_000.0))
    kind = metadata.get("rope.scaling.type") or "none"
    factor = metadata.get("rope.scaling.factor") or metadata.get("rope.scale_linear") or 1.0
    if kind not in ("none", "linear"):
        raise ConversionError(
            f"the GGUF metadata asks for RoPE scaling {kind!r}, which is not supported "
            "(supported: none, linear, and llama3's factors)"
        )
    if metadata.rope_factors is not None and not _is_inverse_frequencies(metadata.rope_factors):
        if factor != 1.0:
            raise ConversionError(f"both {ROPE_FACTORS} and a linear RoPE factor; not supported")
        return llama3_rope(metadata.rope_factors, theta, head_dim)
    # Files older than ``rope.scaling.type`` had the bare factor of linear scaling.
    if factor == 1.0:
        return Rope(theta=theta)
    return Rope(theta=theta, kind="linear", factor=_shortest(factor))


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

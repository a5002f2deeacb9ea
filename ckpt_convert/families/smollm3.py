"""SmolLM3: Llama in which every fourth layer rotates nothing (NoPE, arXiv 2305.19466)."""

from dataclasses import replace
from typing import Any

from ckpt_convert.errors import ConversionError
from ckpt_convert.families.family import GGUF_PAIRED_RULES, HF_RULES, Family
from ckpt_convert.families.gguf_config import GGUFMetadata
from ckpt_convert.families.gguf_config import decoder_config as from_metadata
from ckpt_convert.families.hf_config import (
    UNBIASED,
    HFConfig,
    decoder_config,
    refuse,
    required,
    rope,
    windows,
)
from specjax.models.decoder import DecoderConfig

INTERVAL = 4
THETA = 2_000_000.0
DEFAULTS: dict[str, Any] = {
    "num_key_value_heads": 4,
    "rope_theta": THETA,
    "tie_word_embeddings": True,
}


def from_hf(config: HFConfig) -> DecoderConfig:
    refuse(config, UNBIASED)
    layers = required(config, "num_hidden_layers")
    interval = config.get("no_rope_layer_interval") or INTERVAL
    rotating = config.get("no_rope_layers") or _rotating(layers, interval)
    if len(rotating) < layers:
        raise ConversionError(f"config.json's no_rope_layers tells {len(rotating)} of {layers}")
    settings = DEFAULTS | dict(config)
    turned = rope(settings)
    window = config.get("sliding_window") if config.get("use_sliding_window") else None
    if window is not None and not config.get("layer_types"):
        settings["layer_types"] = [
            "full_attention" if rotates else "sliding_attention" for rotates in rotating[:layers]
        ]
    return decoder_config(
        settings,
        rope=turned,
        ropes=tuple(turned if rotates else None for rotates in rotating[:layers]),
        windows=windows(settings, window),
    )


def _rotating(layers: int, interval: int) -> list[int]:
    return [int(layer % interval != 0) for layer in range(1, layers + 1)]


def from_gguf(metadata: GGUFMetadata) -> DecoderConfig:
    config = from_metadata(metadata, default_theta=THETA)
    rotating = _rotating(config.num_layers, INTERVAL)
    return replace(config, ropes=tuple(config.rope if rotates else None for rotates in rotating))


SMOLLM3 = Family(
    name="smollm3",
    architectures=("SmolLM3ForCausalLM",),
    gguf_architectures=("smollm3",),
    from_hf=from_hf,
    from_gguf=from_gguf,
    hf_rules=HF_RULES,
    gguf_rules=GGUF_PAIRED_RULES,
)

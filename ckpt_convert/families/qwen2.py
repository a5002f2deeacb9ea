"""Qwen2 and Qwen2.5: Llama with biases on queries, keys and values."""

from typing import Any

from ckpt_convert.families.family import GGUF_RULES, HF_RULES, Family
from ckpt_convert.families.gguf_config import GGUFMetadata
from ckpt_convert.families.gguf_config import decoder_config as from_metadata
from ckpt_convert.families.hf_config import HFConfig, decoder_config, qwen_windows
from specjax.models.decoder import DecoderConfig

DEFAULTS: dict[str, Any] = {
    "num_key_value_heads": 32,
    "sliding_window": 4096,
    "max_window_layers": 28,
}


def from_hf(config: HFConfig) -> DecoderConfig:
    settings = DEFAULTS | dict(config)
    return decoder_config(settings, qkv_bias=True, windows=qwen_windows(settings))


def from_gguf(metadata: GGUFMetadata) -> DecoderConfig:
    return from_metadata(metadata, qkv_bias=True)


QWEN2 = Family(
    name="qwen2",
    architectures=("Qwen2ForCausalLM",),
    gguf_architectures=("qwen2",),
    from_hf=from_hf,
    from_gguf=from_gguf,
    hf_rules=HF_RULES,
    gguf_rules=GGUF_RULES,
)

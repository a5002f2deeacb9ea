"""Mistral 7B and its kin: Llama with a sliding window on every layer. Its GGUFs say "llama"."""

from typing import Any

from ckpt_convert.families.family import HF_RULES, Family
from ckpt_convert.families.hf_config import HFConfig, decoder_config, windows
from specjax.models.decoder import DecoderConfig

DEFAULTS: dict[str, Any] = {"num_key_value_heads": 8, "sliding_window": 4096}


def from_hf(config: HFConfig) -> DecoderConfig:
    settings = DEFAULTS | dict(config)
    return decoder_config(settings, windows=windows(settings, settings["sliding_window"]))


MISTRAL = Family(
    name="mistral",
    architectures=("MistralForCausalLM",),
    gguf_architectures=(),
    from_hf=from_hf,
    from_gguf=None,
    hf_rules=HF_RULES,
    gguf_rules=(),
)

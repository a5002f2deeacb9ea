"""Mistral 7B and its kin: Llama with a sliding window on every layer. Its GGUFs say "llama"."""

from ckpt_convert.families.family import HF_RULES, Family
from ckpt_convert.families.hf_config import HFConfig, decoder_config, windows
from specjax.models.decoder import DecoderConfig

WINDOW = 4096


def from_hf(config: HFConfig) -> DecoderConfig:
    return decoder_config(config, windows=windows(config, config.get("sliding_window", WINDOW)))


MISTRAL = Family(
    name="mistral",
    architectures=("MistralForCausalLM",),
    gguf_architectures=(),
    from_hf=from_hf,
    from_gguf=None,
    hf_rules=HF_RULES,
    gguf_rules=(),
)

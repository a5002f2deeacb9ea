"""Llama 2, 3, 3.1, 3.2 and SmolLM2; also what GGUF files call "llama": Mistral and Mixtral too."""

from ckpt_convert.families.family import (
    GGUF_EXPERT_RULES,
    GGUF_PAIRED_RULES,
    HF_RULES,
    Family,
    changed,
)
from ckpt_convert.families.gguf_config import GGUFMetadata, routing
from ckpt_convert.families.gguf_config import decoder_config as from_metadata
from ckpt_convert.families.hf_config import UNBIASED, HFConfig, decoder_config, refuse
from specjax.models.decoder import DecoderConfig


def from_hf(config: HFConfig) -> DecoderConfig:
    refuse(config, UNBIASED)
    return decoder_config(config)


def from_gguf(metadata: GGUFMetadata) -> DecoderConfig:
    experts = routing(metadata) if metadata.get("expert_count") else None
    return from_metadata(metadata, experts=experts)


LLAMA = Family(
    name="llama",
    architectures=("LlamaForCausalLM",),
    gguf_architectures=("llama",),
    from_hf=from_hf,
    from_gguf=from_gguf,
    hf_rules=HF_RULES,
    gguf_rules=changed(GGUF_PAIRED_RULES, *GGUF_EXPERT_RULES),
)

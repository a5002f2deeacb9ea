"""Qwen3: Llama with RMSNorm on every query and key head, before RoPE."""

from ckpt_convert.families.family import GGUF_RULES, HF_RULES, Family
from ckpt_convert.families.gguf_config import GGUFMetadata
from ckpt_convert.families.gguf_config import decoder_config as from_metadata
from ckpt_convert.families.hf_config import UNBIASED, HFConfig, decoder_config, qwen_windows, refuse
from ckpt_convert.families.qwen2 import DEFAULTS as QWEN2_DEFAULTS
from specjax.models.decoder import DecoderConfig

DEFAULTS = QWEN2_DEFAULTS | {"head_dim": 128}


def from_hf(config: HFConfig) -> DecoderConfig:
    refuse(config, UNBIASED)
    settings = DEFAULTS | dict(config)
    return decoder_config(settings, qk_norm=True, windows=qwen_windows(settings))


def from_gguf(metadata: GGUFMetadata) -> DecoderConfig:
    return from_metadata(metadata, qk_norm=True)


QWEN3 = Family(
    name="qwen3",
    architectures=("Qwen3ForCausalLM",),
    gguf_architectures=("qwen3",),
    from_hf=from_hf,
    from_gguf=from_gguf,
    hf_rules=HF_RULES,
    gguf_rules=GGUF_RULES,
)

"""Llama 2, 3, 3.1, 3.2 and SmolLM2; also what GGUF files call "llama", Mistral included."""

from ckpt_convert.errors import ConversionError
from ckpt_convert.families.family import GGUF_PAIRED_RULES, HF_RULES, Family
from ckpt_convert.families.gguf_config import GGUFMetadata
from ckpt_convert.families.gguf_config import decoder_config as from_metadata
from ckpt_convert.families.hf_config import HFConfig, decoder_config, refuse
from specjax.models.decoder import DecoderConfig


def from_hf(config: HFConfig) -> DecoderConfig:
    refuse(config, {"attention_bias": (False, None)})
    return decoder_config(config)


def from_gguf(metadata: GGUFMetadata) -> DecoderConfig:
    experts = metadata.get("expert_count")
    if experts:
        raise ConversionError(f"a mixture of {experts} experts (Mixtral) is not supported")
    return from_metadata(metadata)


LLAMA = Family(
    name="llama",
    architectures=("LlamaForCausalLM",),
    gguf_architectures=("llama",),
    from_hf=from_hf,
    from_gguf=from_gguf,
    hf_rules=HF_RULES,
    gguf_rules=GGUF_PAIRED_RULES,
)

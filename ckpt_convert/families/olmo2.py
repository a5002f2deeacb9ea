"""OLMo 2: norms after attention and MLP and none before, and over all heads' queries and keys."""

from typing import Any

from ckpt_convert.families.family import (
    GGUF_POST_NORM_NAMES,
    HF_RULES,
    LAYER,
    Family,
    changed,
    layer_rule,
    renamed,
)
from ckpt_convert.families.gguf_config import GGUFMetadata
from ckpt_convert.families.gguf_config import decoder_config as from_metadata
from ckpt_convert.families.hf_config import UNBIASED, HFConfig, decoder_config, refuse
from specjax.models.decoder import DecoderConfig

DEFAULTS: dict[str, Any] = {"rms_norm_eps": 1e-5}
NORMS = {"norm": "rms_float32", "pre_norm": False, "post_norm": True, "whole_qk_norm": True}


def from_hf(config: HFConfig) -> DecoderConfig:
    refuse(config, UNBIASED)
    return decoder_config(DEFAULTS | dict(config), **NORMS)


def from_gguf(metadata: GGUFMetadata) -> DecoderConfig:
    return from_metadata(metadata, **NORMS)


OLMO2_RULES = changed(
    HF_RULES,
    layer_rule(LAYER + "self_attn.q_norm.weight", "q_norm", "(K G W) -> K G W"),
    layer_rule(LAYER + "self_attn.k_norm.weight", "k_norm", "(K W) -> K W"),
    layer_rule(LAYER + "post_attention_layernorm.weight", "post_attention_norm", "D -> D"),
    layer_rule(LAYER + "post_feedforward_layernorm.weight", "post_mlp_norm", "D -> D"),
    without=("q_norm.weight", "k_norm.weight", "post_attention_layernorm.weight"),
)

OLMO2 = Family(
    name="olmo2",
    architectures=("Olmo2ForCausalLM",),
    gguf_architectures=("olmo2",),
    from_hf=from_hf,
    from_gguf=from_gguf,
    hf_rules=OLMO2_RULES,
    gguf_rules=renamed(OLMO2_RULES, GGUF_POST_NORM_NAMES),
)

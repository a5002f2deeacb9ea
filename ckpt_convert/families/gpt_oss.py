"""GPT-OSS (arXiv 2508.10925): attention with sinks, biases everywhere, experts with bounded gates.

Its experts are published in MXFP4, which is undone as they are read.
"""

from typing import Any

from ckpt_convert.errors import ConversionError
from ckpt_convert.families.family import (
    GGUF_EXPERT_RULES,
    GGUF_NAMES,
    HF_RULES,
    LAYER,
    Family,
    changed,
    layer_rule,
    renamed,
)
from ckpt_convert.families.gguf_config import GGUFMetadata
from ckpt_convert.families.gguf_config import decoder_config as from_metadata
from ckpt_convert.families.hf_config import (
    ORIGINAL,
    HFConfig,
    decoder_config,
    every,
    expert_count,
    refuse,
    required,
    rope,
    rope_settings,
    windows,
)
from ckpt_convert.tensors import GATE, UP
from specjax.models.decoder import DecoderConfig
from specjax.models.experts import Routing
from specjax.models.rope import Rope

DEFAULTS: dict[str, Any] = {
    "num_key_value_heads": 8,
    "head_dim": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 150_000.0,
    "sliding_window": 128,
    "num_local_experts": 128,
    "num_experts_per_tok": 4,
    "swiglu_limit": 7.0,
}
ROPE = {"rope_type": "yarn", "factor": 32.0, ORIGINAL: 4096, "truncate": False}
BODY: dict[str, Any] = {
    "qkv_bias": True,
    "output_bias": True,
    "sinks": True,
    "activation": "gelu_sigmoid",
}


def from_hf(config: HFConfig) -> DecoderConfig:
    refuse(
        config,
        {"attention_bias": (True,), "hidden_act": ("silu",), "swiglu_alpha": (1.702,)},
    )
    settings = every(DEFAULTS | dict(config), 2)
    routing = Routing(
        count=expert_count(settings),
        chosen=required(settings, "num_experts_per_tok"),
        biased=True,
        limit=float(required(settings, "swiglu_limit")),
    )
    return decoder_config(
        settings,
        experts=routing,
        rope=rope(settings, rope_settings(settings) or ROPE),
        windows=windows(settings, settings["sliding_window"]),
        **BODY,
    )


def from_gguf(metadata: GGUFMetadata) -> DecoderConfig:
    routing = Routing(
        count=metadata.require("expert_count"),
        chosen=metadata.require("expert_used_count"),
        biased=True,
        limit=DEFAULTS["swiglu_limit"],  # as llama.cpp: no file tells it
    )
    return from_metadata(
        metadata,
        intermediate_size=metadata.require("expert_feed_forward_length"),
        experts=routing,
        rope=_gguf_rope(metadata),
        windows=metadata.windows(every=2),
        **BODY,
    )


def _gguf_rope(metadata: GGUFMetadata) -> Rope:
    kind = metadata.get("rope.scaling.type")
    if kind != "yarn":
        raise ConversionError(
            f"the GGUF metadata asks for RoPE scaling {kind!r}, which gpt-oss does not have "
            "(supported: yarn); convert from the safetensors instead"
        )
    scaling = {
        "rope_theta": metadata.number("rope.freq_base") or DEFAULTS["rope_theta"],
        "factor": metadata.require("rope.scaling.factor"),
        ORIGINAL: metadata.require("rope.scaling.original_context_length"),
    }
    return rope({"max_position_embeddings": metadata.require("context_length")}, ROPE | scaling)


# One name stands for the norm before the MLP, as in Hugging Face's files.
NAMES = GGUF_NAMES | {LAYER + "post_attention_layernorm.": "blk.{layer}.post_attention_norm."}
MLP = LAYER + "mlp."
OUT_BIAS = layer_rule(LAYER + "self_attn.o_proj.bias", "out_bias", "D -> D")

GPT_OSS = Family(
    name="gpt_oss",
    architectures=("GptOssForCausalLM",),
    gguf_architectures=("gpt-oss",),
    from_hf=from_hf,
    from_gguf=from_gguf,
    hf_rules=changed(
        HF_RULES,
        OUT_BIAS,
        layer_rule(LAYER + "self_attn.sinks", "sinks", "(K G) -> K G"),
        layer_rule(MLP + "router.weight", "router", "X D -> D X"),
        layer_rule(MLP + "router.bias", "router_bias", "X -> X"),
        # Gate and up take turns, column by column.
        layer_rule(MLP + "experts.gate_up_proj", "experts_gate_up", "X D (I P) -> X D P I"),
        layer_rule(MLP + "experts.gate_up_proj_bias", "experts_gate_up_bias", "X (I P) -> X P I"),
        layer_rule(MLP + "experts.down_proj", "experts_down", "X I D -> X I D"),
        layer_rule(MLP + "experts.down_proj_bias", "experts_down_bias", "X D -> X D"),
    ),
    gguf_rules=changed(
        renamed((*HF_RULES, OUT_BIAS), NAMES),
        *GGUF_EXPERT_RULES,
        layer_rule("blk.{layer}.attn_sinks.weight", "sinks", "(K G) -> K G"),
        layer_rule("blk.{layer}.ffn_gate_inp.bias", "router_bias", "X -> X"),
        layer_rule("blk.{layer}.ffn_gate_exps.bias", "experts_gate_up_bias", "X I -> X I", GATE),
        layer_rule("blk.{layer}.ffn_up_exps.bias", "experts_gate_up_bias", "X I -> X I", UP),
        layer_rule("blk.{layer}.ffn_down_exps.bias", "experts_down_bias", "X D -> X D"),
    ),
)

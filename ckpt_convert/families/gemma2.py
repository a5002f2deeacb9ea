"""Gemma 2: norms before and after each part, soft caps, every second layer sees everything."""

from typing import Any

from ckpt_convert.families.family import (
    GGUF_POST_NORM_NAMES,
    HF_RULES,
    LAYER,
    Family,
    changed,
    layer_rule,
    renamed,
    shifted,
)
from ckpt_convert.families.gguf_config import GGUFMetadata
from ckpt_convert.families.gguf_config import decoder_config as from_metadata
from ckpt_convert.families.hf_config import (
    UNBIASED,
    HFConfig,
    decoder_config,
    every,
    refuse,
    required,
    windows,
)
from specjax.models.decoder import DecoderConfig

DEFAULTS: dict[str, Any] = {
    "hidden_activation": "gelu_pytorch_tanh",
    "num_key_value_heads": 4,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "tie_word_embeddings": True,
}
# The one size whose queries are not scaled by the width of a head.
SCALED_BY_WIDTH = 46


def from_hf(config: HFConfig) -> DecoderConfig:
    settings = every(DEFAULTS | dict(config), 2)
    kept = windows(settings, settings["sliding_window"])
    return decoder_config(settings, windows=kept, **gemma(settings))


def gemma(settings: HFConfig) -> dict[str, Any]:
    """What all Gemmas have, from a config in which nothing is missing."""
    refuse(
        settings,
        UNBIASED
        | {
            "hidden_activation": ("gelu_pytorch_tanh",),
            "use_bidirectional_attention": (False, None),
        },
    )
    return GEMMA | {
        "embedding_scale": required(settings, "hidden_size") ** 0.5,
        "attention_scale": settings["query_pre_attn_scalar"] ** -0.5,
        "attention_softcap": settings.get("attn_logit_softcapping"),
        "logit_softcap": settings.get("final_logit_softcapping"),
    }


GEMMA = {"norm": "rms_plus_one", "post_norm": True, "activation": "gelu_tanh"}


def gemma_gguf(metadata: GGUFMetadata, scaled_by_width: int) -> dict[str, Any]:
    """What all Gemmas have, from metadata, whose files do not tell the scale of the queries."""
    hidden, heads = metadata.require("embedding_length"), metadata.require("attention.head_count")
    width = metadata.get("attention.key_length") or hidden // heads
    if metadata.require("block_count") == scaled_by_width:
        width = hidden // heads
    return GEMMA | {
        "embedding_scale": hidden**0.5,
        "attention_scale": width**-0.5,
        "attention_softcap": metadata.number("attn_logit_softcapping"),
        "logit_softcap": metadata.number("final_logit_softcapping"),
    }


def from_gguf(metadata: GGUFMetadata) -> DecoderConfig:
    """The first files of Gemma 2 leave window and soft caps to the reader."""
    body = gemma_gguf(metadata, SCALED_BY_WIDTH)
    body["attention_softcap"] = body["attention_softcap"] or DEFAULTS["attn_logit_softcapping"]
    body["logit_softcap"] = body["logit_softcap"] or DEFAULTS["final_logit_softcapping"]
    kept = metadata.windows(every=2, default=DEFAULTS["sliding_window"])
    return from_metadata(metadata, windows=kept, **body)


GEMMA_RULES = changed(
    HF_RULES,
    layer_rule(LAYER + "post_attention_layernorm.weight", "post_attention_norm", "D -> D"),
    layer_rule(LAYER + "pre_feedforward_layernorm.weight", "mlp_norm", "D -> D"),
    layer_rule(LAYER + "post_feedforward_layernorm.weight", "post_mlp_norm", "D -> D"),
    without=("post_attention_layernorm.weight",),
)
# Their norms hold the whole factor, which Hugging Face's hold less one.
GEMMA_GGUF_RULES = shifted(renamed(GEMMA_RULES, GGUF_POST_NORM_NAMES))

GEMMA2 = Family(
    name="gemma2",
    architectures=("Gemma2ForCausalLM",),
    gguf_architectures=("gemma2",),
    from_hf=from_hf,
    from_gguf=from_gguf,
    hf_rules=GEMMA_RULES,
    gguf_rules=GEMMA_GGUF_RULES,
)

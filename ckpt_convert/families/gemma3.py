"""Gemma 3's text model: Gemma 2 with normed heads, and another RoPE in the windowed layers."""

from dataclasses import replace
from typing import Any

from ckpt_convert.families.family import Family
from ckpt_convert.families.gemma2 import GEMMA_GGUF_RULES, GEMMA_RULES, gemma, gemma_gguf
from ckpt_convert.families.gguf_config import GGUFMetadata
from ckpt_convert.families.gguf_config import decoder_config as from_metadata
from ckpt_convert.families.hf_config import (
    HFConfig,
    decoder_config,
    every,
    layer_types,
    rope,
    rope_settings,
    windows,
)
from specjax.models.decoder import DecoderConfig
from specjax.models.rope import Rope

# What a config may leave out: that of a model with vision names few settings of its text model.
DEFAULTS = {
    "vocab_size": 262_208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-6,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "sliding_window_pattern": 6,
    "tie_word_embeddings": True,
}
GLOBAL_THETA, LOCAL_THETA = 1_000_000.0, 10_000.0
SCALED_BY_WIDTH = 62


def from_hf(config: HFConfig) -> DecoderConfig:
    given = config.get("text_config") or config
    settings = DEFAULTS | {key: value for key, value in given.items() if value is not None}
    settings = every(settings, settings["sliding_window_pattern"])
    ropes = _ropes(settings)
    return decoder_config(
        settings,
        qk_norm=True,
        windows=windows(settings, settings["sliding_window"]),
        rope=ropes["full_attention"],
        ropes=tuple(ropes[kind] for kind in layer_types(settings)),
        **gemma(settings),
    )


def _ropes(settings: HFConfig) -> dict[str, Rope]:
    """The RoPE of either type of layer; scaling without a type is the unwindowed layers'."""
    given = rope_settings(settings)
    whole = given.get("full_attention") or given
    windowed = given.get("sliding_attention") or {}
    theta = settings.get("rope_theta") or GLOBAL_THETA
    local = settings.get("rope_local_base_freq") or LOCAL_THETA
    return {
        "full_attention": rope(settings, {"rope_theta": theta} | _own(whole)),
        "sliding_attention": rope(settings, {"rope_theta": local} | _own(windowed)),
    }


def _own(settings: HFConfig) -> dict[str, Any]:
    return {key: value for key, value in settings.items() if not key.endswith("_attention")}


def from_gguf(metadata: GGUFMetadata) -> DecoderConfig:
    kept = metadata.windows(every=6)
    base = metadata.get("rope.freq_base_swa") or LOCAL_THETA
    scaled = from_metadata(
        metadata,
        qk_norm=True,
        windows=kept,
        **gemma_gguf(metadata, SCALED_BY_WIDTH),
        default_theta=GLOBAL_THETA,
    )
    local = Rope(theta=float(base))
    return replace(scaled, ropes=tuple(local if window else scaled.rope for window in kept))


# Text weights of a model with vision lie deeper, in one place or the other.
PREFIXES = {"model.": ("language_model.model.", "model.language_model."), "lm_head.": ()}


def _also(rule):
    start = next(start for start in PREFIXES if rule.name.startswith(start))
    rest = rule.name.removeprefix(start)
    deeper = tuple(prefix + rest for prefix in PREFIXES[start])
    return replace(rule, others=deeper or (f"language_model.{rule.name}",))


GEMMA3 = Family(
    name="gemma3",
    architectures=("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"),
    gguf_architectures=("gemma3",),
    from_hf=from_hf,
    from_gguf=from_gguf,
    hf_rules=tuple(_also(rule) for rule in GEMMA_RULES),
    gguf_rules=GEMMA_GGUF_RULES,
    model_types=("gemma3_text",),
)

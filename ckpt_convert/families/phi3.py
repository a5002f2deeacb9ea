"""Phi-3, Phi-3.5 and Phi-4: Llama with fused projections, and LongRoPE for long contexts."""

from typing import Any

from ckpt_convert.errors import ConversionError
from ckpt_convert.families.family import (
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
    UNBIASED,
    HFConfig,
    decoder_config,
    refuse,
    rope_settings,
    windows,
)
from ckpt_convert.tensors import KEY, QUERY, VALUE
from specjax.models.decoder import DecoderConfig

DEFAULTS: dict[str, Any] = {"rms_norm_eps": 1e-5, ORIGINAL: 4096}


def from_hf(config: HFConfig) -> DecoderConfig:
    refuse(config, UNBIASED)
    settings = DEFAULTS | dict(config)
    kept = windows(settings, settings.get("sliding_window"))
    return decoder_config(_with_longrope(settings), partial_rotary=True, windows=kept)


def _with_longrope(config: HFConfig) -> HFConfig:
    """The first files of Phi-3 call LongRoPE "su", some "yarn", which it is not."""
    scaling = rope_settings(config)
    kinds = {str(scaling[key]) for key in ("rope_type", "type") if scaling.get(key)}
    if kinds <= {"default", "longrope"}:
        return config
    if not kinds <= {"su", "yarn"}:
        raise ConversionError(
            f"config.json asks for RoPE of type {', '.join(map(repr, sorted(kinds)))}, which Phi-3 "
            "does not support (supported: default, longrope)"
        )
    bare = {key: value for key, value in scaling.items() if key not in ("rope_type", "type")}
    return dict(config) | {"rope_parameters": None, "rope_scaling": bare | {"type": "longrope"}}


def from_gguf(metadata: GGUFMetadata) -> DecoderConfig:
    return from_metadata(metadata, partial_rotary=True)


QKV = {"name": LAYER + "self_attn.qkv_proj.weight", "blocks": ("K G W", "K W", "K W")}

PHI3_RULES = changed(
    HF_RULES,
    layer_rule(parameter="qkv", turn="(K G W) D -> D K G W", part=QUERY, block=0, **QKV),
    layer_rule(parameter="qkv", turn="(K W) D -> D K W", part=KEY, block=1, **QKV),
    layer_rule(parameter="qkv", turn="(K W) D -> D K W", part=VALUE, block=2, **QKV),
    layer_rule(LAYER + "mlp.gate_up_proj.weight", "gate_up", "(P I) D -> D P I"),
    without=(
        "q_proj.weight",
        "k_proj.weight",
        "v_proj.weight",
        "gate_proj.weight",
        ".up_proj.weight",
    ),
)

PHI3 = Family(
    name="phi3",
    architectures=("Phi3ForCausalLM",),
    gguf_architectures=("phi3",),
    from_hf=from_hf,
    from_gguf=from_gguf,
    hf_rules=PHI3_RULES,
    gguf_rules=renamed(PHI3_RULES, GGUF_NAMES),
)

"""A config.json for a model that came without one, in the spelling before Transformers 5."""

from collections.abc import Callable
from typing import Any

from ckpt_convert.families.family import Family
from ckpt_convert.store import Manifest
from specjax.models.decoder import DecoderConfig
from specjax.models.experts import Routing
from specjax.models.rope import Rope


def synthesised(manifest: Manifest, family: Family) -> dict[str, Any]:
    """What Hugging Face's format can say of the model; the caller sees whether that is all."""
    config = manifest.config
    own = OWN.get(family.name)
    return {
        "architectures": [family.architectures[0]],
        "model_type": (*family.model_types, family.name)[0],
        "vocab_size": config.vocab_size,
        "tie_word_embeddings": config.tie_embeddings,
        "eos_token_id": list(manifest.eos_ids),
        "bos_token_id": manifest.bos_id,
        "pad_token_id": None,  # each class has a default of its own
    } | (_llama(config) if own is None else own(config))


def _llama(config: DecoderConfig) -> dict[str, Any]:
    """What Llama and most others are described by."""
    return {
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_position,
        "rms_norm_eps": config.rms_norm_eps,
        "hidden_act": "silu",
        **_rope(config.rope),
        **_windows(config),
    }


def _rope(rope: Rope | None) -> dict[str, Any]:
    if rope is None:
        return {}
    settings = {
        "default": {},
        "linear": {"factor": rope.factor},
        "llama3": {
            "factor": rope.factor,
            "low_freq_factor": rope.low_freq_factor,
            "high_freq_factor": rope.high_freq_factor,
            "original_max_position_embeddings": rope.original_max_position,
        },
        "yarn": {
            "factor": rope.factor,
            "original_max_position_embeddings": rope.original_max_position,
            "attention_factor": rope.attention_factor,
            "beta_fast": rope.beta_fast,
            "beta_slow": rope.beta_slow,
            "truncate": rope.truncate,
        },
        "longrope": {
            "short_factor": list(rope.short_factors),
            "long_factor": list(rope.long_factors),
            "attention_factor": rope.attention_factor,
        },
    }[rope.kind]
    made = {
        "rope_theta": rope.theta,
        "rope_scaling": {"rope_type": rope.kind} | settings if settings else None,
    }
    if rope.kind == "longrope":  # whose class looks for it here, and overrides what lies deeper
        made["original_max_position_embeddings"] = rope.original_max_position
    return made if rope.partial == 1.0 else made | {"partial_rotary_factor": rope.partial}


def _windows(config: DecoderConfig) -> dict[str, Any]:
    if not config.windows:
        return {"sliding_window": None, "use_sliding_window": False}
    return {
        "sliding_window": next(window for window in config.windows if window is not None),
        "use_sliding_window": True,
        "layer_types": [
            "full_attention" if window is None else "sliding_attention" for window in config.windows
        ],
    }


def _gemma(config: DecoderConfig) -> dict[str, Any]:
    scale = config.attention_scale or config.head_dim**-0.5
    made = _llama(config) | {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": round(scale**-2),
        "attn_logit_softcapping": config.attention_softcap,
        "final_logit_softcapping": config.logit_softcap,
    }
    del made["hidden_act"], made["use_sliding_window"]
    return made


def _gemma3(config: DecoderConfig) -> dict[str, Any]:
    pairs = zip(config.layer_ropes, config.layer_windows, strict=True)
    local = next((rope for rope, window in pairs if rope and window), None)
    return _gemma(config) | ({} if local is None else {"rope_local_base_freq": local.theta})


def _smollm3(config: DecoderConfig) -> dict[str, Any]:
    return _llama(config) | {"no_rope_layers": [int(rope is not None) for rope in config.ropes]}


def _routing(config: DecoderConfig) -> Routing:
    assert config.experts is not None  # its family has them
    return config.experts


def _qwen3_moe(config: DecoderConfig) -> dict[str, Any]:
    experts = _routing(config)
    return _llama(config) | {
        "moe_intermediate_size": config.intermediate_size,
        "num_experts": experts.count,
        "num_experts_per_tok": experts.chosen,
        "norm_topk_prob": experts.renormalise,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _gpt_oss(config: DecoderConfig) -> dict[str, Any]:
    experts = _routing(config)
    return _llama(config) | {
        "num_local_experts": experts.count,
        "num_experts_per_tok": experts.chosen,
        "swiglu_limit": experts.limit,
    }


def _gpt2(config: DecoderConfig) -> dict[str, Any]:
    return {
        "n_embd": config.hidden_size,
        "n_inner": config.intermediate_size,
        "n_layer": config.num_layers,
        "n_head": config.num_heads,
        "n_positions": config.max_position,
        "layer_norm_epsilon": config.rms_norm_eps,
        "activation_function": "gelu_new",
    }


OWN: dict[str, Callable[[DecoderConfig], dict[str, Any]]] = {
    "gemma2": _gemma,
    "gemma3": _gemma3,
    "gpt2": _gpt2,
    "gpt_oss": _gpt_oss,
    "qwen3_moe": _qwen3_moe,
    "smollm3": _smollm3,
}

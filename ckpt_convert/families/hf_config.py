"""Reading Hugging Face's ``config.json``, in the spellings before and after Transformers 5."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ckpt_convert.errors import ConversionError
from specjax.models.decoder import DecoderConfig
from specjax.models.rope import Rope

HFConfig = Mapping[str, Any]

ORIGINAL = "original_max_position_embeddings"
SILU = {"hidden_act": ("silu", "swish")}
UNBIASED = {"attention_bias": (False, None)}


def required(config: HFConfig, key: str) -> Any:
    if config.get(key) is None:
        raise ConversionError(f"config.json has no {key!r}; fetch the model's complete config.json")
    return config[key]


def refuse(config: HFConfig, unsupported: Mapping[str, tuple[Any, ...]]) -> None:
    """Raise for a setting outside the values that this decoder computes."""
    for key, supported in unsupported.items():
        if key in config and config[key] not in supported:
            raise ConversionError(
                f"config.json sets {key}={config[key]!r}, which is not supported "
                f"(supported: {', '.join(repr(value) for value in supported)})"
            )


def decoder_config(
    config: HFConfig, *, partial_rotary: bool = False, **family: Any
) -> DecoderConfig:
    """The fields that most families spell alike, and ``family``'s own on top.

    What ``config`` lacks has the default of most classes; a family's own are in its ``DEFAULTS``.
    """
    if "activation" not in family:
        refuse(config, SILU)
    refuse(config, {"mlp_bias": (False, None)})
    heads = required(config, "num_attention_heads")
    hidden = required(config, "hidden_size")
    shared = {
        "vocab_size": required(config, "vocab_size"),
        "hidden_size": hidden,
        "num_layers": required(config, "num_hidden_layers"),
        "num_heads": heads,
        "num_kv_heads": config.get("num_key_value_heads") or heads,
        "head_dim": config.get("head_dim") or hidden // heads,
        "max_position": required(config, "max_position_embeddings"),
        "rms_norm_eps": config.get("rms_norm_eps") or 1e-6,
        "tie_embeddings": bool(config.get("tie_word_embeddings", False)),
    }
    if "intermediate_size" not in family:
        shared["intermediate_size"] = required(config, "intermediate_size")
    if "rope" not in family:
        shared["rope"] = rope(config)
    made = DecoderConfig(**(shared | family))
    made = replace(made, max_position=_reach(made))
    for one in made.layer_ropes:
        if one is not None:
            _check_rotated(one, made.head_dim, partial_rotary)
    return made


def _reach(config: DecoderConfig) -> int:
    """The context; published YaRN settings often leave the original one in the config."""
    found = config.rope
    if found is None or found.kind != "yarn":
        return config.max_position
    return max(config.max_position, round(found.factor * found.original_max_position))


def _check_rotated(rope: Rope, head_dim: int, partial_rotary: bool) -> None:
    if rope.partial != 1.0 and not partial_rotary:
        raise ConversionError(
            f"config.json sets partial_rotary_factor={rope.partial}, which is not supported for "
            "this family"
        )
    pairs = rope.rotated(head_dim) // 2
    if rope.rotated(head_dim) % 2 or not pairs:
        raise ConversionError(
            f"config.json sets partial_rotary_factor={rope.partial} with heads of {head_dim}, "
            "which leaves no even number of components to rotate"
        )
    for name, factors in (("short", rope.short_factors), ("long", rope.long_factors)):
        if rope.kind == "longrope" and len(factors) != pairs:
            raise ConversionError(
                f"config.json has {len(factors)} {name} LongRoPE factors; {pairs} are needed"
            )


def rope(config: HFConfig, settings: HFConfig | None = None) -> Rope:
    """RoPE from ``rope_parameters``, or from ``rope_theta`` and ``rope_scaling``.

    ``settings`` are those of one layer type, where the config tells them apart. Raises
    ``ConversionError`` naming any type but default, linear, llama3, yarn and longrope.
    """
    if settings is None:
        settings = rope_settings(config)
    nested = [key for key, value in settings.items() if isinstance(value, Mapping)]
    if nested:
        raise ConversionError(
            f"config.json has RoPE parameters per layer type ({', '.join(nested)}); not supported"
        )
    kind = _rope_kind(settings)
    theta = float(settings.get("rope_theta") or config.get("rope_theta") or 10_000.0)
    partial = settings.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0
    shared = {"theta": theta, "kind": kind, "partial": float(partial)}
    if kind == "default":
        return Rope(**shared)
    if kind == "linear":
        return Rope(**shared, factor=_setting(settings, kind, "factor"))
    if kind == "llama3":
        return Rope(
            **shared,
            factor=_setting(settings, kind, "factor"),
            low_freq_factor=_setting(settings, kind, "low_freq_factor"),
            high_freq_factor=_setting(settings, kind, "high_freq_factor"),
            original_max_position=int(_setting(settings, kind, ORIGINAL)),
        )
    if kind == "yarn":
        return Rope(**shared, **_yarn(config, settings))
    if kind == "longrope":
        return Rope(**shared, **_longrope(config, settings))
    raise ConversionError(
        f"config.json asks for RoPE of type {kind!r}, which is not supported "
        "(supported: default, linear, llama3, yarn, longrope)"
    )


def rope_settings(config: HFConfig) -> dict[str, Any]:
    return dict(config.get("rope_scaling") or {}) | dict(config.get("rope_parameters") or {})


def _yarn(config: HFConfig, settings: HFConfig) -> dict[str, Any]:
    longest = required(config, "max_position_embeddings")
    original = settings.get(ORIGINAL) or config.get(ORIGINAL) or longest
    factor = settings.get("factor") or longest / original
    attention = settings.get("attention_factor") or _yarn_attention_factor(settings, factor)
    return {
        "factor": float(factor),
        "original_max_position": int(original),
        "attention_factor": float(attention),
        "beta_fast": float(settings.get("beta_fast") or 32),
        "beta_slow": float(settings.get("beta_slow") or 1),
        "truncate": bool(settings.get("truncate", True)),
    }


def _yarn_attention_factor(settings: HFConfig, factor: float) -> float:
    """By how much YaRN scales cosine and sine; DeepSeek's models divide one such by another."""

    def scale(strength: float) -> float:
        return 0.1 * strength * math.log(factor) + 1.0 if factor > 1 else 1.0

    upper, lower = settings.get("mscale"), settings.get("mscale_all_dim")
    return scale(upper) / scale(lower) if upper and lower else scale(1.0)


def _longrope(config: HFConfig, settings: HFConfig) -> dict[str, Any]:
    original = config.get(ORIGINAL) or settings.get(ORIGINAL)
    if original is None:
        raise ConversionError(f"config.json's RoPE of type 'longrope' has no {ORIGINAL!r}")
    factor = settings.get("factor") or required(config, "max_position_embeddings") / original
    attention = settings.get("attention_factor") or longrope_attention_factor(factor, original)
    return {
        "original_max_position": int(original),
        "short_factors": _factors(settings, "short_factor"),
        "long_factors": _factors(settings, "long_factor"),
        "attention_factor": float(attention),
    }


def longrope_attention_factor(factor: float, original: int) -> float:
    """By how much LongRoPE scales cosine and sine when its context is ``factor`` times longer."""
    return math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0


def _factors(settings: HFConfig, key: str) -> tuple[float, ...]:
    if not isinstance(settings.get(key), list):
        raise ConversionError(f"config.json's RoPE of type 'longrope' has no list {key!r}")
    return tuple(float(factor) for factor in settings[key])


def _rope_kind(settings: HFConfig) -> str:
    # An old file's ``type`` and a newer one's ``rope_type`` may stand side by side.
    kinds = {settings[key] for key in ("rope_type", "type") if settings.get(key)} or {"default"}
    if len(kinds) > 1:
        raise ConversionError(f"config.json names two RoPE types: {', '.join(sorted(kinds))}")
    return kinds.pop()


def _setting(settings: HFConfig, kind: str, key: str) -> float:
    if settings.get(key) is None:
        raise ConversionError(f"config.json's RoPE of type {kind!r} has no {key!r}")
    return float(settings[key])


def expert_count(config: HFConfig) -> int:
    """How many experts a layer has, under either name."""
    return required(config, "num_experts" if "num_experts" in config else "num_local_experts")


def layer_types(config: HFConfig, first: int = 0) -> list[str]:
    """``layer_types`` where given, else sliding from layer ``first`` on; checked."""
    layers = required(config, "num_hidden_layers")
    types = config.get("layer_types") or [
        "sliding_attention" if layer >= first else "full_attention" for layer in range(layers)
    ]
    unknown = sorted(set(types) - {"sliding_attention", "full_attention"})
    if unknown:
        raise ConversionError(f"config.json has layers of type {unknown[0]!r}; not supported")
    if len(types) != layers:
        raise ConversionError(f"config.json types {len(types)} of its {layers} layers")
    return list(types)


def windows(config: HFConfig, window: int | None, first: int = 0) -> tuple[int | None, ...]:
    """Each layer's sliding window: by ``layer_types`` where given, else from layer ``first`` on."""
    types = layer_types(config, first)
    if window is None or "sliding_attention" not in types:
        return ()
    return tuple(window if kind == "sliding_attention" else None for kind in types)


def every(config: HFConfig, full: int) -> dict[str, Any]:
    """``config`` with the layer types that it implies: each ``full``-th layer sees everything."""
    if config.get("layer_types"):
        return dict(config)
    layers = range(1, required(config, "num_hidden_layers") + 1)
    types = ["sliding_attention" if layer % full else "full_attention" for layer in layers]
    return dict(config) | {"layer_types": types}


def qwen_windows(config: HFConfig) -> tuple[int | None, ...]:
    """Qwen's windows: off unless ``use_sliding_window``, and then from ``max_window_layers`` on."""
    window = config.get("sliding_window") if config.get("use_sliding_window") else None
    return windows(config, window, first=config.get("max_window_layers") or 0)

"""Reading Hugging Face's ``config.json``, in the spellings before and after Transformers 5."""

from collections.abc import Mapping
from typing import Any

from ckpt_convert.errors import ConversionError
from specjax.models.decoder import DecoderConfig
from specjax.models.rope import Rope

HFConfig = Mapping[str, Any]


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


def decoder_config(config: HFConfig, **family: Any) -> DecoderConfig:
    """The fields that all families spell alike, and ``family``'s own on top."""
    refuse(
        config,
        {
            "hidden_act": ("silu", "swish"),
            "mlp_bias": (False, None),
            "partial_rotary_factor": (1.0, None),
        },
    )
    heads = required(config, "num_attention_heads")
    hidden = required(config, "hidden_size")
    return DecoderConfig(
        vocab_size=required(config, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=required(config, "intermediate_size"),
        num_layers=required(config, "num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or hidden // heads,
        max_position=required(config, "max_position_embeddings"),
        rms_norm_eps=config.get("rms_norm_eps", 1e-6),
        rope=rope(config),
        tie_embeddings=bool(config.get("tie_word_embeddings", False)),
        **family,
    )


def rope(config: HFConfig) -> Rope:
    """RoPE from ``rope_parameters``, or from ``rope_theta`` and ``rope_scaling``.

    Raises ``ConversionError`` naming any type but default, linear and llama3.
    """
    settings = dict(config.get("rope_scaling") or {}) | dict(config.get("rope_parameters") or {})
    nested = [key for key, value in settings.items() if isinstance(value, Mapping)]
    if nested:
        raise ConversionError(
            f"config.json has RoPE parameters per layer type ({', '.join(nested)}); not supported"
        )
    kind = _rope_kind(settings)
    theta = float(settings.get("rope_theta") or config.get("rope_theta") or 10_000.0)
    if settings.get("partial_rotary_factor") not in (None, 1.0):
        raise ConversionError("config.json rotates a part of each head only; not supported")
    if kind == "default":
        return Rope(theta=theta)
    if kind == "linear":
        return Rope(theta=theta, kind=kind, factor=_setting(settings, kind, "factor"))
    if kind == "llama3":
        return Rope(
            theta=theta,
            kind=kind,
            factor=_setting(settings, kind, "factor"),
            low_freq_factor=_setting(settings, kind, "low_freq_factor"),
            high_freq_factor=_setting(settings, kind, "high_freq_factor"),
            original_max_position=int(_setting(settings, kind, "original_max_position_embeddings")),
        )
    raise ConversionError(
        f"config.json asks for RoPE of type {kind!r}, which is not supported "
        "(supported: default, linear, llama3)"
    )


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


def windows(config: HFConfig, window: int | None, first: int = 0) -> tuple[int | None, ...]:
    """Each layer's sliding window: by ``layer_types`` where given, else from layer ``first`` on."""
    layers = required(config, "num_hidden_layers")
    types = config.get("layer_types") or [
        "sliding_attention" if layer >= first else "full_attention" for layer in range(layers)
    ]
    unknown = sorted(set(types) - {"sliding_attention", "full_attention"})
    if unknown:
        raise ConversionError(f"config.json has layers of type {unknown[0]!r}; not supported")
    if len(types) != layers:
        raise ConversionError(f"config.json types {len(types)} of its {layers} layers")
    if window is None or "sliding_attention" not in types:
        return ()
    return tuple(window if kind == "sliding_attention" else None for kind in types)


def qwen_windows(config: HFConfig) -> tuple[int | None, ...]:
    """Qwen's windows: off unless ``use_sliding_window``, and then from ``max_window_layers`` on."""
    window = config.get("sliding_window") if config.get("use_sliding_window") else None
    return windows(config, window, first=config.get("max_window_layers") or 0)

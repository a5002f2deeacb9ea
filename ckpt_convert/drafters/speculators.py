"""The configuration of vLLM's ``speculators`` library, laid flat for the formats' own readers."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ckpt_convert.drafters.source import Found
from ckpt_convert.errors import ConversionError

KEY = "speculators_model_type"
NESTED = "transformer_layer_config"
# What the library takes where a file does not say.
DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "eagle3": {"draft_vocab_size": 32_000, "norm_before_residual": False},
    "peagle": {"draft_vocab_size": 32_000, "norm_before_residual": False},
    "dflash": {
        "draft_vocab_size": 32_000,
        "block_size": 8,
        "sample_from_anchor": False,
        "sliding_window_non_causal": False,
    },
    "dflash2": {
        "draft_vocab_size": 32_000,
        "block_size": 8,
        "sample_from_anchor": False,
        "sliding_window_non_causal": True,
        "conv_kernel_size": 2,
        "conv_group_size": 16,
        "selector_rank": 256,
        "selector_top_k": 16,
    },
    "dspark": {
        "draft_vocab_size": 32_000,
        "block_size": 8,
        "sample_from_anchor": True,
        "sliding_window_non_causal": False,
        "markov_rank": 0,
        "markov_head_type": "vanilla",
        "enable_confidence_head": False,
        "confidence_head_with_markov": False,
    },
    "mtp": {"num_nextn_predict_layers": 1},
}


def flattened(found: Found) -> Found:
    """``found`` with one flat configuration: the nested layer's, the library's on top.

    Raises ``ConversionError`` naming a method that is not supported. A configuration that is not
    the library's comes back as it is.
    """
    method = found.config.get(KEY)
    if method is None:
        return found
    if method not in DEFAULTS:
        raise ConversionError(
            f"{KEY} {method!r} is not supported (supported: {', '.join(DEFAULTS)})"
        )
    nested = found.config.get(NESTED)
    if not isinstance(nested, Mapping):
        raise ConversionError(f"config.json has no {NESTED!r}; fetch the complete config.json")
    own = {name: value for name, value in found.config.items() if value is not None}
    own.pop(NESTED)
    # The outer architecture names the drafter, the nested one the model it was cut from.
    config = {**DEFAULTS[method], **nested, **own}
    return replace(found, config=config, speculators=True)

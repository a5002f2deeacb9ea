"""Transformer layers as all drafters' files spell them: sizes, tensors, and what is refused."""

import re
from collections.abc import Mapping
from typing import Any

from ckpt_convert.drafters.rules import Rule
from ckpt_convert.drafters.source import Found
from ckpt_convert.errors import ConversionError
from ckpt_convert.families.hf_config import HFConfig, refuse, required, rope
from ckpt_convert.quantised_source import IGNORED_SCALES
from ckpt_convert.tensors import Ignored
from specjax.models.draft_layer import DraftLayerConfig
from specjax.models.rope import Rope

EMBEDDING = "embed_tokens.weight"
HEAD = "lm_head.weight"
ROPES = ("default", "linear", "llama3", "yarn")
IGNORED = (
    Ignored(r"(.*\.)?rotary_emb\.inv_freq", "follows from the config"),
    Ignored(r"verifier_(lm_head|norm)\.weight", "the target's own"),
    *IGNORED_SCALES,
)


def layer_config(found: Found, prefix: str, **kind: Any) -> DraftLayerConfig:
    """Sizes of the layers whose first one's tensors begin with ``prefix``, by the draft's config.

    The RoPE base is the draft's own, 10,000 where its config has none, whatever the target's is.
    """
    config = found.config
    refuse(config, {"hidden_act": ("silu", "swish"), "mlp_bias": (False, None)})
    heads, hidden = size(config, "num_attention_heads"), size(config, "hidden_size")
    head_dim = size(config, "head_dim", hidden // heads)
    return DraftLayerConfig(
        hidden_size=hidden,
        intermediate_size=size(config, "intermediate_size"),
        num_heads=heads,
        num_kv_heads=size(config, "num_key_value_heads", heads),
        head_dim=head_dim,
        rms_norm_eps=float(config.get("rms_norm_eps") or 1e-6),
        rope=_rope(config, head_dim),
        qkv_bias=f"{prefix}self_attn.q_proj.bias" in found.tensors,
        qk_norm=f"{prefix}self_attn.q_norm.weight" in found.tensors,
        **kind,
    )


def refuse_windows(config: HFConfig) -> None:
    """Raise for a drafter whose layers would see a part of the context only."""
    refuse(config, {"use_sliding_window": (False, None)})
    if "sliding_attention" in (config.get("layer_types") or []):
        raise ConversionError(
            "config.json has layers of type 'sliding_attention', which is not supported for this "
            "drafter"
        )


def size(config: HFConfig, key: str, default: int | None = None) -> int:
    """A positive whole number of the config; without a default it must be there."""
    value = required(config, key) if default is None else config.get(key) or default
    if type(value) is not int or value < 1:
        raise ConversionError(f"config.json sets {key}={value!r}; it must be a positive integer")
    return value


def layer_count(config: HFConfig, found: Found) -> int:
    """The number of layers; raises ``ConversionError`` for more than a file's tensors can make."""
    layers = size(config, "num_hidden_layers")
    if layers > len(found.tensors):
        raise ConversionError(
            f"config.json counts {layers} layers, and the checkpoint has {len(found.tensors)} "
            "tensors; fetch the complete checkpoint"
        )
    return layers


def mask_token(config: HFConfig, vocab_size: int) -> int:
    """The id that stands for tokens to come."""
    mask = required(config, "mask_token_id")
    if type(mask) is not int or not 0 <= mask < vocab_size:
        raise ConversionError(
            f"mask_token_id {mask} is outside the {vocab_size} rows of the vocabulary; the padded "
            "rows behind the tokenizer's ids belong to the model and must be kept"
        )
    return mask


def _rope(config: HFConfig, head_dim: int) -> Rope:
    found = rope(config)
    if found.kind not in ROPES:
        raise ConversionError(
            f"config.json asks for RoPE of type {found.kind!r}, not supported for drafters "
            f"(supported: {', '.join(ROPES)})"
        )
    if found.rotated(head_dim) % 2 or not found.rotated(head_dim):
        raise ConversionError(
            f"config.json sets partial_rotary_factor={found.partial} with heads of {head_dim}, "
            "which leaves no even number of components to rotate"
        )
    return found


def layer_sizes(config: DraftLayerConfig) -> dict[str, int]:
    """Letters of the layers' rules: D width, I MLP width, K KV heads, G group, W head width."""
    return {
        "D": config.hidden_size,
        "I": config.intermediate_size,
        "K": config.num_kv_heads,
        "G": config.group,
        "W": config.head_dim,
    }


def attention_rules(
    config: DraftLayerConfig, source: str, path: tuple[str, ...], inputs: str = "D"
) -> tuple[Rule, ...]:
    """Projections of the layers called ``source``; ``inputs`` is the letter of their input."""
    at = f"{source}self_attn."
    if config.gated:
        rules = [
            Rule(f"{at}q_proj.weight", (*path, "q"), f"(K G 0/2 W) {inputs} -> {inputs} K G W"),
            Rule(f"{at}q_proj.weight", (*path, "gate"), f"(K G 1/2 W) {inputs} -> {inputs} K G W"),
        ]
    else:
        rules = [Rule(f"{at}q_proj.weight", (*path, "q"), f"(K G W) {inputs} -> {inputs} K G W")]
    rules += [
        Rule(f"{at}k_proj.weight", (*path, "kv"), f"(K W) {inputs} -> {inputs} K 0/2 W"),
        Rule(f"{at}v_proj.weight", (*path, "kv"), f"(K W) {inputs} -> {inputs} K 1/2 W"),
        Rule(f"{at}o_proj.weight", (*path, "out"), "D (K G W) -> K G W D"),
    ]
    if config.qkv_bias:
        rules += [
            Rule(f"{at}q_proj.bias", (*path, "q_bias"), "(K G W) -> K G W"),
            Rule(f"{at}k_proj.bias", (*path, "kv_bias"), "(K W) -> K 0/2 W"),
            Rule(f"{at}v_proj.bias", (*path, "kv_bias"), "(K W) -> K 1/2 W"),
        ]
    if config.qk_norm:
        rules += [
            Rule(f"{at}q_norm.weight", (*path, "q_norm"), "W -> W"),
            Rule(f"{at}k_norm.weight", (*path, "k_norm"), "W -> W"),
        ]
    return tuple(rules)


def mlp_rules(source: str, path: tuple[str, ...]) -> tuple[Rule, ...]:
    """The norm before the MLP, and the MLP."""
    return (
        Rule(f"{source}post_attention_layernorm.weight", (*path, "mlp_norm"), "D -> D"),
        Rule(f"{source}mlp.gate_proj.weight", (*path, "gate_up"), "I D -> D 0/2 I"),
        Rule(f"{source}mlp.up_proj.weight", (*path, "gate_up"), "I D -> D 1/2 I"),
        Rule(f"{source}mlp.down_proj.weight", (*path, "down"), "D I -> I D"),
    )


def input_norm_rule(source: str, path: tuple[str, ...]) -> Rule:
    return Rule(f"{source}input_layernorm.weight", (*path, "attention_norm"), "D -> D")


def layer_rules(
    config: DraftLayerConfig, source: str, path: tuple[str, ...], inputs: str = "D"
) -> tuple[Rule, ...]:
    """A whole pre-norm layer."""
    norm = input_norm_rule(source, path)
    return (norm, *attention_rules(config, source, path, inputs), *mlp_rules(source, path))


def spelled_out(taps: str | None) -> tuple[int, ...]:
    """The layers that a choice of taps names by their numbers, () where it names none."""
    if taps is None or not re.fullmatch(r"\d+(,\d+)*", taps):
        return ()
    return tuple(map(int, taps.split(",")))


def layer_numbers(ids: Any, counted: str, *, target_layers: int | None = None) -> tuple[int, ...]:
    """The layers after which features are taken.

    ``counted`` says what ``ids`` are: "after-layer", or "hidden-states", where i is the stream that
    enters layer i. Raises ``ConversionError`` for the embeddings and, where the target's depth is
    known, for its last layer, of which other programs hand out the normed state.
    """
    shift = {"after-layer": 0, "hidden-states": 1}
    if counted not in shift:
        raise ConversionError(
            f"taps {counted!r} is not known (known: {', '.join(shift)}, or the layers' own numbers)"
        )
    if not isinstance(ids, list | tuple) or any(type(number) is not int for number in ids):
        raise ConversionError(f"config.json taps {ids!r}; a list of layers' numbers is needed")
    taps = tuple(number - shift[counted] for number in ids)
    if min(taps, default=0) < 0:
        raise ConversionError(
            f"config.json taps {list(ids)}, counted {counted}: the embeddings before the first "
            "layer cannot be tapped; if the numbers mean something else, say so with --taps"
        )
    if target_layers is not None and max(taps, default=0) >= target_layers - 1:
        raise ConversionError(
            f"the taps {list(ids)}, counted {counted}, hold the last of the target's "
            f"{target_layers} layers or one beyond; if the numbers mean something else, say so "
            "with --taps"
        )
    return taps


def flag(config: Mapping[str, Any] | HFConfig, *names: str, default: bool = False) -> bool:
    """The first of the settings ``names`` that is there."""
    for name in names:
        if config.get(name) is not None:
            return bool(config[name])
    return default

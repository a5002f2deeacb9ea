"""What a family of models is: how its configuration is read and where its tensors go."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ckpt_convert.families.gguf_config import GGUFMetadata
from ckpt_convert.tensors import GATE, KEY, QUERY, UP, VALUE, Ignored, TensorRule
from specjax.models.decoder import DecoderConfig


@dataclass(frozen=True)
class Family:
    """One family: its names in either format, its configuration, its tensors."""

    name: str
    architectures: tuple[str, ...]
    gguf_architectures: tuple[str, ...]
    from_hf: Callable[[Mapping[str, Any]], DecoderConfig]
    from_gguf: Callable[[GGUFMetadata], DecoderConfig] | None
    hf_rules: tuple[TensorRule, ...]
    gguf_rules: tuple[TensorRule, ...]
    model_types: tuple[str, ...] = ()


def layer_rule(name: str, parameter: str, turn: str, part: Any = None, **more: Any) -> TensorRule:
    """The rule of a tensor that every layer has."""
    sliced = {} if part is None else {"part": part}
    return TensorRule(name, ("layers", parameter), turn, **sliced, **more)


def changed(
    rules: Iterable[TensorRule], *others: TensorRule, without: tuple[str, ...] = ()
) -> tuple[TensorRule, ...]:
    """``rules`` with those whose names end like one in ``without`` left out, and ``others``."""
    kept = [rule for rule in rules if not rule.name.endswith(without)] if without else rules
    return (*kept, *others)


def renamed(rules: Iterable[TensorRule], names: Mapping[str, str]) -> tuple[TensorRule, ...]:
    """``rules`` under the names that begin otherwise: by the first of ``names`` that fits."""

    def other(name):
        known = next(start for start in names if name.startswith(start))
        return names[known] + name.removeprefix(known)

    return tuple(replace(rule, name=other(rule.name), others=()) for rule in rules)


def shifted(rules: Iterable[TensorRule]) -> tuple[TensorRule, ...]:
    """``rules`` of files that store each norm's weight plus one."""
    return tuple(
        replace(rule, add=-1.0) if rule.path[-1].endswith("norm") else rule for rule in rules
    )


LAYER = "model.layers.{layer}."

HF_RULES = (
    TensorRule("model.embed_tokens.weight", ("embed",), "V D -> V D"),
    TensorRule("model.norm.weight", ("norm",), "D -> D"),
    TensorRule("lm_head.weight", ("head",), "V D -> V D"),
    layer_rule(LAYER + "input_layernorm.weight", "attention_norm", "D -> D"),
    layer_rule(LAYER + "self_attn.q_proj.weight", "qkv", "(K G W) D -> D K G W", QUERY),
    layer_rule(LAYER + "self_attn.k_proj.weight", "qkv", "(K W) D -> D K W", KEY),
    layer_rule(LAYER + "self_attn.v_proj.weight", "qkv", "(K W) D -> D K W", VALUE),
    layer_rule(LAYER + "self_attn.q_proj.bias", "qkv_bias", "(K G W) -> K G W", QUERY),
    layer_rule(LAYER + "self_attn.k_proj.bias", "qkv_bias", "(K W) -> K W", KEY),
    layer_rule(LAYER + "self_attn.v_proj.bias", "qkv_bias", "(K W) -> K W", VALUE),
    layer_rule(LAYER + "self_attn.q_norm.weight", "q_norm", "W -> W"),
    layer_rule(LAYER + "self_attn.k_norm.weight", "k_norm", "W -> W"),
    layer_rule(LAYER + "self_attn.o_proj.weight", "out", "D (K G W) -> K G W D"),
    layer_rule(LAYER + "post_attention_layernorm.weight", "mlp_norm", "D -> D"),
    layer_rule(LAYER + "mlp.gate_proj.weight", "gate_up", "I D -> D I", GATE),
    layer_rule(LAYER + "mlp.up_proj.weight", "gate_up", "I D -> D I", UP),
    layer_rule(LAYER + "mlp.down_proj.weight", "down", "D I -> I D"),
)

GGUF_NAMES = {
    "model.embed_tokens.": "token_embd.",
    "model.norm.": "output_norm.",
    "lm_head.": "output.",
    LAYER + "input_layernorm.": "blk.{layer}.attn_norm.",
    LAYER + "self_attn.q_proj.": "blk.{layer}.attn_q.",
    LAYER + "self_attn.k_proj.": "blk.{layer}.attn_k.",
    LAYER + "self_attn.v_proj.": "blk.{layer}.attn_v.",
    LAYER + "self_attn.qkv_proj.": "blk.{layer}.attn_qkv.",
    LAYER + "self_attn.q_norm.": "blk.{layer}.attn_q_norm.",
    LAYER + "self_attn.k_norm.": "blk.{layer}.attn_k_norm.",
    LAYER + "self_attn.o_proj.": "blk.{layer}.attn_output.",
    LAYER + "post_attention_layernorm.": "blk.{layer}.ffn_norm.",
    LAYER + "mlp.gate_proj.": "blk.{layer}.ffn_gate.",
    LAYER + "mlp.gate_up_proj.": "blk.{layer}.ffn_up.",
    LAYER + "mlp.up_proj.": "blk.{layer}.ffn_up.",
    LAYER + "mlp.down_proj.": "blk.{layer}.ffn_down.",
}
# Where a norm follows attention, its name is Hugging Face's own, and the MLP has two more.
GGUF_POST_NORM_NAMES = {
    LAYER + "post_attention_layernorm.": "blk.{layer}.post_attention_norm.",
    LAYER + "pre_feedforward_layernorm.": "blk.{layer}.ffn_norm.",
    LAYER + "post_feedforward_layernorm.": "blk.{layer}.post_ffw_norm.",
} | {name: other for name, other in GGUF_NAMES.items() if "post_attention" not in name}

GGUF_EXPERT_RULES = (
    layer_rule("blk.{layer}.ffn_gate_inp.weight", "router", "X D -> D X"),
    layer_rule("blk.{layer}.ffn_gate_exps.weight", "experts_gate_up", "X I D -> X D I", GATE),
    layer_rule("blk.{layer}.ffn_up_exps.weight", "experts_gate_up", "X I D -> X D I", UP),
    layer_rule("blk.{layer}.ffn_down_exps.weight", "experts_down", "X D I -> X I D"),
)
GGUF_RULES = renamed(HF_RULES, GGUF_NAMES)

_PAIRED = {
    "(K G W) D -> D K G W": "(K G R P) D -> D K G (P R)",
    "(K W) D -> D K W": "(K R P) D -> D K (P R)",
    "(K G W) -> K G W": "(K G R P) -> K G (P R)",
    "(K W) -> K W": "(K R P) -> K (P R)",
}


def _paired_rule(rule: TensorRule) -> TensorRule:
    rotated = ".attn_q." in rule.name or ".attn_k." in rule.name
    return replace(rule, turn=_PAIRED[rule.turn]) if rotated else rule


# llama.cpp rotates neighbouring rows of the "llama" architecture, so its converter interleaves
# the two halves of every query and key head; these rules undo that, head by head.
GGUF_PAIRED_RULES = tuple(_paired_rule(rule) for rule in GGUF_RULES)

IGNORED = (
    Ignored(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq", "follows from the config"),
    Ignored(r"(language_model\.)?lm_head\.weight", "the head is tied to the embeddings"),
    Ignored(r"rope_freqs\.weight", "already in the configuration's RoPE parameters"),
    Ignored(r"rope_factors_(short|long)\.weight", "already in the configuration's RoPE parameters"),
    Ignored(r"(transformer\.)?h\.\d+\.attn\.(masked_)?bias", "the causal mask"),
    Ignored(r"(model\.)?(vision_tower|multi_modal_projector)\..*", "no part of the text model"),
)

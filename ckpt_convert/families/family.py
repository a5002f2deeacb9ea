"""What a family of models is: how its configuration is read and where its tensors go."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
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


def _layer(*names: str) -> tuple[str, ...]:
    return ("layers", *names)


HF_RULES = (
    TensorRule("model.embed_tokens.weight", ("embed",), "V D -> V D"),
    TensorRule("model.norm.weight", ("norm",), "D -> D"),
    TensorRule("lm_head.weight", ("head",), "V D -> V D"),
    TensorRule("model.layers.{layer}.input_layernorm.weight", _layer("attention_norm"), "D -> D"),
    TensorRule(
        "model.layers.{layer}.self_attn.q_proj.weight",
        _layer("qkv"),
        "(K G W) D -> D K G W",
        QUERY,
    ),
    TensorRule(
        "model.layers.{layer}.self_attn.k_proj.weight", _layer("qkv"), "(K W) D -> D K W", KEY
    ),
    TensorRule(
        "model.layers.{layer}.self_attn.v_proj.weight", _layer("qkv"), "(K W) D -> D K W", VALUE
    ),
    TensorRule(
        "model.layers.{layer}.self_attn.q_proj.bias",
        _layer("qkv_bias"),
        "(K G W) -> K G W",
        QUERY,
    ),
    TensorRule(
        "model.layers.{layer}.self_attn.k_proj.bias", _layer("qkv_bias"), "(K W) -> K W", KEY
    ),
    TensorRule(
        "model.layers.{layer}.self_attn.v_proj.bias", _layer("qkv_bias"), "(K W) -> K W", VALUE
    ),
    TensorRule("model.layers.{layer}.self_attn.q_norm.weight", _layer("q_norm"), "W -> W"),
    TensorRule("model.layers.{layer}.self_attn.k_norm.weight", _layer("k_norm"), "W -> W"),
    TensorRule(
        "model.layers.{layer}.self_attn.o_proj.weight", _layer("out"), "D (K G W) -> K G W D"
    ),
    TensorRule(
        "model.layers.{layer}.post_attention_layernorm.weight", _layer("mlp_norm"), "D -> D"
    ),
    TensorRule("model.layers.{layer}.mlp.gate_proj.weight", _layer("gate_up"), "I D -> D I", GATE),
    TensorRule("model.layers.{layer}.mlp.up_proj.weight", _layer("gate_up"), "I D -> D I", UP),
    TensorRule("model.layers.{layer}.mlp.down_proj.weight", _layer("down"), "D I -> I D"),
)

_GGUF_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "model.layers.{layer}.input_layernorm.": "blk.{layer}.attn_norm.",
    "model.layers.{layer}.self_attn.q_proj.": "blk.{layer}.attn_q.",
    "model.layers.{layer}.self_attn.k_proj.": "blk.{layer}.attn_k.",
    "model.layers.{layer}.self_attn.v_proj.": "blk.{layer}.attn_v.",
    "model.layers.{layer}.self_attn.q_norm.": "blk.{layer}.attn_q_norm.",
    "model.layers.{layer}.self_attn.k_norm.": "blk.{layer}.attn_k_norm.",
    "model.layers.{layer}.self_attn.o_proj.": "blk.{layer}.attn_output.",
    "model.layers.{layer}.post_attention_layernorm.": "blk.{layer}.ffn_norm.",
    "model.layers.{layer}.mlp.gate_proj.": "blk.{layer}.ffn_gate.",
    "model.layers.{layer}.mlp.up_proj.": "blk.{layer}.ffn_up.",
    "model.layers.{layer}.mlp.down_proj.": "blk.{layer}.ffn_down.",
}


def _gguf_rule(rule: TensorRule) -> TensorRule:
    known = next(name for name in _GGUF_NAMES if rule.name.startswith(name))
    name = _GGUF_NAMES[known] + rule.name.removeprefix(known)
    return TensorRule(name, rule.path, rule.turn, rule.part)


GGUF_RULES = tuple(_gguf_rule(rule) for rule in HF_RULES)

_PAIRED = {
    "(K G W) D -> D K G W": "(K G R P) D -> D K G (P R)",
    "(K W) D -> D K W": "(K R P) D -> D K (P R)",
    "(K G W) -> K G W": "(K G R P) -> K G (P R)",
    "(K W) -> K W": "(K R P) -> K (P R)",
}


def _paired_rule(rule: TensorRule) -> TensorRule:
    rotated = ".attn_q." in rule.name or ".attn_k." in rule.name
    return TensorRule(rule.name, rule.path, _PAIRED[rule.turn] if rotated else rule.turn, rule.part)


# llama.cpp rotates neighbouring rows of the "llama" architecture, so its converter interleaves
# the two halves of every query and key head; these rules undo that, head by head.
GGUF_PAIRED_RULES = tuple(_paired_rule(rule) for rule in GGUF_RULES)

IGNORED = (
    Ignored(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq", "follows from the config"),
    Ignored(r"lm_head\.weight", "the head is tied to the embeddings"),
    Ignored(r"rope_freqs\.weight", "already in the configuration's RoPE parameters"),
)

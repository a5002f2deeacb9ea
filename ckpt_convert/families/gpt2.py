"""GPT-2: learned positions, LayerNorm, biases everywhere, an MLP without a gate."""

from typing import Any

from ckpt_convert.families.family import Family, layer_rule
from ckpt_convert.families.gguf_config import GGUFMetadata
from ckpt_convert.families.gguf_config import decoder_config as from_metadata
from ckpt_convert.families.hf_config import HFConfig, refuse, required
from ckpt_convert.tensors import TensorRule
from specjax.models.decoder import DecoderConfig

BODY: dict[str, Any] = {
    "rope": None,
    "learned_positions": True,
    "norm": "layer",
    "qkv_bias": True,
    "output_bias": True,
    "activation": "gelu_tanh",
    "gated": False,
}


def from_hf(config: HFConfig) -> DecoderConfig:
    refuse(
        config,
        {
            "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
            "scale_attn_weights": (True,),
            "scale_attn_by_inverse_layer_idx": (False,),
            "add_cross_attention": (False,),
        },
    )
    hidden, heads = required(config, "n_embd"), required(config, "n_head")
    return DecoderConfig(
        vocab_size=required(config, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=config.get("n_inner") or 4 * hidden,
        num_layers=required(config, "n_layer"),
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=hidden // heads,
        max_position=required(config, "n_positions"),
        rms_norm_eps=config.get("layer_norm_epsilon") or 1e-5,
        tie_embeddings=bool(config.get("tie_word_embeddings", True)),
        **BODY,
    )


def from_gguf(metadata: GGUFMetadata) -> DecoderConfig:
    return from_metadata(metadata, epsilon="attention.layer_norm_epsilon", **BODY)


def _rules(
    ends: dict[str, str], layer: dict[str, str], turns: dict[str, str], prefix: str = ""
) -> tuple[TensorRule, ...]:
    """Rules for the names of one format, most of which may stand after a prefix."""

    def other(name):
        return (name.removeprefix(prefix),) if prefix and name.startswith(prefix) else ()

    return tuple(
        TensorRule(name, (parameter,), turns[parameter], others=other(name))
        for parameter, name in ends.items()
    ) + tuple(
        layer_rule(name, parameter, turns[parameter], others=other(name))
        for parameter, name in layer.items()
    )


TURNS = {
    "embed": "V D -> V D",
    "positions": "N D -> N D",
    "head": "V D -> V D",
    "qkv_bias": "(T K W) -> K T W",
    "up_bias": "I -> I",
} | dict.fromkeys(
    (
        "norm",
        "norm_bias",
        "attention_norm",
        "attention_norm_bias",
        "mlp_norm",
        "mlp_norm_bias",
        "out_bias",
        "down_bias",
    ),
    "D -> D",
)
# Hugging Face keeps GPT-2's matrices as (in, out); llama.cpp's converter turns them round.
IN_OUT = {
    "qkv": "D (T K W) -> D K T W",
    "out": "(K G W) D -> K G W D",
    "up": "D I -> D I",
    "down": "I D -> I D",
}
OUT_IN = {
    "qkv": "(T K W) D -> D K T W",
    "out": "D (K G W) -> K G W D",
    "up": "I D -> D I",
    "down": "D I -> I D",
}
PREFIX = "transformer."
HF_ENDS = {
    "embed": PREFIX + "wte.weight",
    "positions": PREFIX + "wpe.weight",
    "norm": PREFIX + "ln_f.weight",
    "norm_bias": PREFIX + "ln_f.bias",
    "head": "lm_head.weight",
}
HF_LAYER = {
    "attention_norm": "ln_1.weight",
    "attention_norm_bias": "ln_1.bias",
    "qkv": "attn.c_attn.weight",
    "qkv_bias": "attn.c_attn.bias",
    "out": "attn.c_proj.weight",
    "out_bias": "attn.c_proj.bias",
    "mlp_norm": "ln_2.weight",
    "mlp_norm_bias": "ln_2.bias",
    "up": "mlp.c_fc.weight",
    "up_bias": "mlp.c_fc.bias",
    "down": "mlp.c_proj.weight",
    "down_bias": "mlp.c_proj.bias",
}
GGUF_ENDS = {
    "embed": "token_embd.weight",
    "positions": "position_embd.weight",
    "norm": "output_norm.weight",
    "norm_bias": "output_norm.bias",
    "head": "output.weight",
}
GGUF_LAYER = {
    "attention_norm": "attn_norm.weight",
    "attention_norm_bias": "attn_norm.bias",
    "qkv": "attn_qkv.weight",
    "qkv_bias": "attn_qkv.bias",
    "out": "attn_output.weight",
    "out_bias": "attn_output.bias",
    "mlp_norm": "ffn_norm.weight",
    "mlp_norm_bias": "ffn_norm.bias",
    "up": "ffn_up.weight",
    "up_bias": "ffn_up.bias",
    "down": "ffn_down.weight",
    "down_bias": "ffn_down.bias",
}


def _at(prefix: str, names: dict[str, str]) -> dict[str, str]:
    return {parameter: prefix + name for parameter, name in names.items()}


GPT2 = Family(
    name="gpt2",
    architectures=("GPT2LMHeadModel",),
    gguf_architectures=("gpt2",),
    from_hf=from_hf,
    from_gguf=from_gguf,
    hf_rules=_rules(HF_ENDS, _at(PREFIX + "h.{layer}.", HF_LAYER), TURNS | IN_OUT, PREFIX),
    gguf_rules=_rules(GGUF_ENDS, _at("blk.{layer}.", GGUF_LAYER), TURNS | OUT_IN),
)

"""Mixtral: Mistral with two routed experts a token for an MLP. Its GGUFs say "llama"."""

from typing import Any

from ckpt_convert.families.family import HF_RULES, LAYER, Family, changed, layer_rule
from ckpt_convert.families.hf_config import (
    HFConfig,
    decoder_config,
    expert_count,
    required,
    windows,
)
from ckpt_convert.tensors import GATE, UP
from specjax.models.decoder import DecoderConfig
from specjax.models.experts import Routing

DEFAULTS: dict[str, Any] = {
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1_000_000.0,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}
MOE = LAYER + "block_sparse_moe."


def from_hf(config: HFConfig) -> DecoderConfig:
    settings = DEFAULTS | dict(config)
    routing = Routing(
        count=expert_count(settings), chosen=required(settings, "num_experts_per_tok")
    )
    kept = windows(settings, settings.get("sliding_window"))
    return decoder_config(settings, experts=routing, windows=kept)


MIXTRAL = Family(
    name="mixtral",
    architectures=("MixtralForCausalLM",),
    gguf_architectures=(),
    from_hf=from_hf,
    from_gguf=None,
    hf_rules=changed(
        HF_RULES,
        layer_rule(MOE + "gate.weight", "router", "X D -> D X"),
        layer_rule(MOE + "experts.{expert}.w1.weight", "experts_gate_up", "I D -> D I", GATE),
        layer_rule(MOE + "experts.{expert}.w3.weight", "experts_gate_up", "I D -> D I", UP),
        layer_rule(MOE + "experts.{expert}.w2.weight", "experts_down", "D I -> I D"),
    ),
    gguf_rules=(),
)

"""Mixtral: Mistral with two routed experts a token for an MLP. Its GGUFs say "llama"."""

from ckpt_convert.families.family import HF_RULES, LAYER, Family, changed, layer_rule
from ckpt_convert.families.hf_config import HFConfig, decoder_config, required, windows
from ckpt_convert.tensors import GATE, UP
from specjax.models.decoder import DecoderConfig
from specjax.models.experts import Routing

MOE = LAYER + "block_sparse_moe."


def from_hf(config: HFConfig) -> DecoderConfig:
    routing = Routing(
        count=required(config, "num_local_experts"), chosen=required(config, "num_experts_per_tok")
    )
    kept = windows(config, config.get("sliding_window"))
    return decoder_config(config, experts=routing, windows=kept)


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

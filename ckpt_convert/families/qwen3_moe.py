"""Qwen3-MoE: Qwen3 with routed experts in every layer."""

from typing import Any

from ckpt_convert.families.family import (
    GGUF_EXPERT_RULES,
    GGUF_RULES,
    HF_RULES,
    LAYER,
    Family,
    changed,
    layer_rule,
)
from ckpt_convert.families.gguf_config import GGUFMetadata
from ckpt_convert.families.gguf_config import decoder_config as from_metadata
from ckpt_convert.families.gguf_config import routing as routing_of
from ckpt_convert.families.hf_config import (
    UNBIASED,
    HFConfig,
    decoder_config,
    expert_count,
    refuse,
    required,
    windows,
)
from ckpt_convert.tensors import GATE, UP
from specjax.models.decoder import DecoderConfig
from specjax.models.experts import Routing

DEFAULTS: dict[str, Any] = {
    "num_key_value_heads": 4,
    "sliding_window": 4096,
    "num_local_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
}
EXPERT = LAYER + "mlp.experts.{expert}."


def from_hf(config: HFConfig) -> DecoderConfig:
    refuse(config, UNBIASED | {"decoder_sparse_step": (1,), "mlp_only_layers": ([], None)})
    settings = DEFAULTS | dict(config)
    routing = Routing(
        count=expert_count(settings),
        chosen=required(settings, "num_experts_per_tok"),
        renormalise=bool(settings.get("norm_topk_prob", False)),
    )
    window = settings["sliding_window"] if settings.get("use_sliding_window") else None
    return decoder_config(
        settings,
        intermediate_size=required(settings, "moe_intermediate_size"),
        qk_norm=True,
        experts=routing,
        windows=windows(settings, window),
    )


def from_gguf(metadata: GGUFMetadata) -> DecoderConfig:
    return from_metadata(
        metadata,
        intermediate_size=metadata.require("expert_feed_forward_length"),
        qk_norm=True,
        experts=routing_of(metadata),
    )


QWEN3_MOE = Family(
    name="qwen3_moe",
    architectures=("Qwen3MoeForCausalLM",),
    gguf_architectures=("qwen3moe",),
    from_hf=from_hf,
    from_gguf=from_gguf,
    hf_rules=changed(
        HF_RULES,
        layer_rule(LAYER + "mlp.gate.weight", "router", "X D -> D X"),
        layer_rule(EXPERT + "gate_proj.weight", "experts_gate_up", "I D -> D I", GATE),
        layer_rule(EXPERT + "up_proj.weight", "experts_gate_up", "I D -> D I", UP),
        layer_rule(EXPERT + "down_proj.weight", "experts_down", "D I -> I D"),
    ),
    gguf_rules=changed(GGUF_RULES, *GGUF_EXPERT_RULES),
)

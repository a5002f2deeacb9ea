"""Multi-token prediction modules, inside a target's checkpoint or cut out of it by speculators."""

import functools
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ckpt_convert.drafters.drafter import Format
from ckpt_convert.drafters.latent_attention import latent_config, latent_rules, latent_sizes
from ckpt_convert.drafters.layers import (
    IGNORED,
    attention_rules,
    flag,
    input_norm_rule,
    layer_config,
    layer_sizes,
    mlp_rules,
    size,
)
from ckpt_convert.drafters.rules import Rule
from ckpt_convert.drafters.source import Found
from ckpt_convert.errors import ConversionError
from ckpt_convert.families.hf_config import refuse
from ckpt_convert.tensors import Ignored
from specjax.models.draft_experts import ExpertsConfig
from specjax.models.mtp import MTPConfig

_MODULE = "module.{module}."
# Every writer's names for the parts around the layer, and the one that the rules use.
_PARTS = {
    "enorm": "token_norm",
    "hnorm": "hidden_norm",
    "eh_proj": "fuse",
    "shared_head.norm": "final_norm",
    "shared_head.head": "head",
    "token_layernorm": "token_norm",
    "hidden_layernorm": "hidden_norm",
    "input_proj": "fuse",
    "final_layernorm": "final_norm",
    "pre_fc_norm_embedding": "token_norm",
    "pre_fc_norm_hidden": "hidden_norm",
    "fc": "fuse",
    "norm": "final_norm",
}


def _named(pattern: str, found: Found) -> Found:
    """The modules' tensors alone, by canonical names; ``pattern`` finds module and part.

    Modules are numbered from the first one there is: DeepSeek's count on from the target's layers.
    """
    matches = {name: re.fullmatch(pattern, name) for name in found.tensors}
    parts = {name: (int(m["module"] or 0), m["part"]) for name, m in matches.items() if m}
    first = min((module for module, _ in parts.values()), default=0)
    original = {}
    for name, (module, part) in parts.items():
        stem, _, kind = part.rpartition(".")
        original[f"module.{module - first}.{_PARTS.get(stem, stem)}.{kind}"] = name
    if len(original) < len(parts):
        twice = sorted(set(parts) - set(original.values()))
        raise ConversionError(f"the checkpoint holds {twice[0]} under two names")
    return replace(
        found,
        tensors={name: found.tensors[old] for name, old in original.items()},
        read=lambda name: found.read(original[name]),
    )


def _named_behind_layers(found: Found) -> Found:
    layers = _text_config(found).get("num_hidden_layers")
    beyond = {
        name: info
        for name, info in found.tensors.items()
        if (match := re.match(r"model\.layers\.(\d+)\.", name)) and int(match[1]) >= (layers or 0)
    }
    named = _named(r"model\.layers\.(?P<module>\d+)\.(?P<part>.+)", replace(found, tensors=beyond))
    return named if "module.0.fuse.weight" in named.tensors else replace(named, tensors={})


def _text_config(found: Found) -> Mapping[str, Any]:
    return found.config.get("text_config") or found.config


def recognises(found: Found) -> bool:
    return "module.0.fuse.weight" in found.tensors and "module.0.token_norm.weight" in found.tensors


def read_config(
    found: Found, *, hidden_first: bool, feeds_normed: bool, unit_offset: bool | None
) -> MTPConfig:
    """``unit_offset=None``: by the model type, as Qwen3's norms differ from its successors'."""
    config = _text_config(found)
    if unit_offset is None:
        unit_offset = str(config.get("model_type")).startswith(("qwen3_next", "qwen3_5"))
    latent = latent_config(config)
    if latent:
        config = {**config, "head_dim": latent.rotary_dim}
    layer = layer_config(
        replace(found, config=config),
        "module.0.",
        unit_offset=unit_offset,
        gated=latent is None and _is_gated(found, config),
    )
    modules = {name.split(".")[1] for name in found.tensors}
    return MTPConfig(
        vocab_size=size(config, "vocab_size"),
        layer=layer,
        num_modules=len(modules),
        hidden_first=hidden_first,
        feeds_normed=feeds_normed,
        own_embedding="module.0.embed_tokens.weight" in found.tensors,
        own_head="module.0.head.weight" in found.tensors,
        experts=_experts(found, config),
        latent=latent,
    )


def _is_gated(found: Found, config: Mapping[str, Any]) -> bool:
    heads = size(config, "num_attention_heads")
    queries = heads * size(config, "head_dim", size(config, "hidden_size") // heads)
    return found.shape("module.0.self_attn.q_proj.weight")[0] == 2 * queries


def _experts(found: Found, config: Mapping[str, Any]) -> ExpertsConfig | None:
    if "module.0.mlp.gate.weight" not in found.tensors:
        return None
    biased = "module.0.mlp.gate.e_score_correction_bias" in found.tensors
    if biased:
        refuse(config, {"scoring_func": ("sigmoid", None), "topk_method": ("noaux_tc", None)})
    else:
        alone = {"n_group": (1, None), "topk_group": (1, None)}
        refuse(config, alone | {"scoring_func": ("softmax", None)})
    inner = size(config, "moe_intermediate_size")
    return ExpertsConfig(
        count=found.shape("module.0.mlp.gate.weight")[0],
        chosen=size(config, "num_experts_per_tok"),
        size=inner,
        sigmoid=biased,
        biased=biased,
        renormalise=flag(config, "norm_topk_prob", default=True),
        scale=float(config.get("routed_scaling_factor") or 1.0),
        shared_size=_shared_size(config, inner),
        shared_gated="module.0.mlp.shared_expert_gate.weight" in found.tensors,
        groups=size(config, "n_group", 1),
        chosen_groups=size(config, "topk_group", 1),
    )


def _shared_size(config: Mapping[str, Any], inner: int) -> int:
    if config.get("shared_expert_intermediate_size"):
        return size(config, "shared_expert_intermediate_size")
    return inner * size(config, "n_shared_experts") if config.get("n_shared_experts") else 0


def rules(config: MTPConfig, *, fused: bool = False) -> tuple[Rule, ...]:
    """``fused``: the file has all experts in one tensor, gate above up."""
    path = ("modules",)
    if config.latent:
        attention = latent_rules(config.latent, _MODULE, path)
    else:
        attention = attention_rules(config.layer, _MODULE, path)
    found = [
        Rule(f"{_MODULE}token_norm.weight", (*path, "token_norm"), "D -> D"),
        Rule(f"{_MODULE}hidden_norm.weight", (*path, "hidden_norm"), "D -> D"),
        Rule(f"{_MODULE}fuse.weight", (*path, "fuse"), "D both -> both D"),
        input_norm_rule(_MODULE, path),
        *attention,
        Rule(f"{_MODULE}final_norm.weight", (*path, "final_norm"), "D -> D"),
    ]
    if config.experts:
        found += _experts_rules(config.experts, path, fused)
    else:
        found += mlp_rules(_MODULE, path)
    if config.own_embedding:
        found.append(Rule("module.0.embed_tokens.weight", ("embed",), "V D -> V D"))
    if config.own_head:
        found.append(Rule(f"{_MODULE}head.weight", (*path, "head"), "V D -> V D"))
    return tuple(found)


def _experts_rules(config: ExpertsConfig, path: tuple[str, ...], fused: bool) -> list[Rule]:
    at, gate_up, down = f"{_MODULE}mlp.", (*path, "experts", "gate_up"), (*path, "experts", "down")
    one, all_of = f"{at}experts.{{expert}}.", f"{at}experts."
    shared = f"{at}shared_expert." if config.shared_gated else f"{at}shared_experts."
    found = [
        Rule(f"{_MODULE}post_attention_layernorm.weight", (*path, "mlp_norm"), "D -> D"),
        Rule(f"{at}gate.weight", (*path, "router"), "X D -> D X"),
    ]
    if fused:
        found += [
            Rule(f"{all_of}gate_up_proj", gate_up, "X (0/2 J) D -> X D 0/2 J"),
            Rule(f"{all_of}gate_up_proj", gate_up, "X (1/2 J) D -> X D 1/2 J"),
            Rule(f"{all_of}down_proj", down, "X D J -> X J D"),
        ]
    else:
        found += [
            Rule(f"{one}gate_proj.weight", gate_up, "J D -> D 0/2 J"),
            Rule(f"{one}up_proj.weight", gate_up, "J D -> D 1/2 J"),
            Rule(f"{one}down_proj.weight", down, "D J -> J D"),
        ]
    if config.biased:
        # Rounded to 16 bits it would lead tokens to other experts.
        bias = f"{at}gate.e_score_correction_bias"
        found.append(Rule(bias, (*path, "router_bias"), "X -> X", wide=True))
    if config.shared_size:
        found += [
            Rule(f"{shared}gate_proj.weight", (*path, "shared", "gate_up"), "S D -> D 0/2 S"),
            Rule(f"{shared}up_proj.weight", (*path, "shared", "gate_up"), "S D -> D 1/2 S"),
            Rule(f"{shared}down_proj.weight", (*path, "shared", "down"), "D S -> S D"),
        ]
    if config.shared_gated:
        found.append(Rule(f"{at}shared_expert_gate.weight", (*path, "shared_gate"), "P D -> D P"))
    return found


def sizes(config: MTPConfig) -> dict[str, int]:
    experts = config.experts or ExpertsConfig(0, 0, 0)
    latent = latent_sizes(config.latent, config.layer.num_heads) if config.latent else {}
    return (
        layer_sizes(config.layer)
        | latent
        | {
            "V": config.vocab_size,
            "both": 2 * config.layer.hidden_size,
            "module": config.num_modules,
            "X": experts.count,
            "expert": experts.count,
            "J": experts.size,
            "S": experts.shared_size,
            "P": 1,
        }
    )


_MORE = (Ignored(r"module\.[1-9]\d*\.embed_tokens\.weight", "the first module's again"),)


def _format(named, fused: bool = False, **kind: bool | None) -> Format:
    return Format(
        name="mtp",
        config=MTPConfig,
        named=named,
        recognises=recognises,
        read_config=functools.partial(read_config, **kind),
        rules=functools.partial(rules, fused=fused),
        sizes=sizes,
        ignored=(*IGNORED, *_MORE),
    )


# DeepSeek's own and GLM's: layers behind the target's last one.
GLM_MTP = _format(_named_behind_layers, hidden_first=False, feeds_normed=False, unit_offset=False)
QWEN_MTP = _format(
    functools.partial(_named, r"mtp\.(layers\.(?P<module>\d+)\.)?(?P<part>.+)"),
    hidden_first=False,
    feeds_normed=True,
    unit_offset=True,
)
MIMO_MTP = _format(
    functools.partial(_named, r"model\.mtp_layers\.(?P<module>\d+)\.(?P<part>.+)"),
    hidden_first=True,
    feeds_normed=True,
    unit_offset=False,
)
# The same names without the prefix, and the other order.
SPECULATORS_MTP = _format(
    functools.partial(_named, r"mtp_layers\.(?P<module>\d+)\.(?P<part>.+)"),
    fused=True,
    hidden_first=False,
    feeds_normed=True,
    unit_offset=None,
)

"""Tiny models of every family as llama.cpp's converter writes them, from Hugging Face's tensors.

The names come from the ``gguf`` package, and what happens to the numbers is written out by hand:
nothing here is shared with the rules of the converter.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

SHIFTED = ("gemma2", "gemma3")
PAIRED = ("llama", "smollm3")
CONV1D = (".c_attn.weight", ".c_proj.weight", ".c_fc.weight")


def write_family_gguf(
    file: Path,
    architecture: str,
    config: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray],
    *,
    drop: tuple[str, ...] = (),
) -> None:
    """Write a Hugging Face model's ``tensors``; metadata that ends like ``drop`` is left out."""
    import gguf

    kind = next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    known = gguf.get_tensor_name_map(kind, config.get("num_hidden_layers") or config["n_layer"])
    writer = gguf.GGUFWriter(file, architecture)
    for key, value in _metadata(architecture, config).items():
        if not key.endswith(drop or ("nothing",)):
            _add(writer, f"{architecture}.{key}", value)
    merged = _taken_apart(tensors) if architecture == "gpt-oss" else _merged(tensors)
    for name, tensor in merged.items():
        stored = _stored(architecture, config, name, tensor)
        writer.add_tensor(known.get_name(name, (".weight", ".bias")), np.ascontiguousarray(stored))
    rope = config.get("rope_parameters") or {}
    for which in ("long", "short"):
        if f"{which}_factor" in rope:
            factors = np.array(rope[f"{which}_factor"], np.float32)
            writer.add_tensor(f"rope_factors_{which}.weight", factors)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _merged(tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Each projection of a layer's experts as one tensor, under Qwen's name or Mixtral's."""
    merged: dict[str, Any] = {}
    for name, tensor in tensors.items():
        head, experts, tail = name.partition(".experts.")
        if not experts:
            merged[name] = tensor
            continue
        expert, part = tail.split(".", 1)
        merged.setdefault(f"{head}.experts.{part}", {})[int(expert)] = tensor
    return {
        name: np.stack([value[index] for index in sorted(value)])
        if isinstance(value, dict)
        else value
        for name, value in merged.items()
    }


def _taken_apart(tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """GPT-OSS's experts as three matrices, (out, in), of which gate and up took turns."""
    made: dict[str, np.ndarray] = {}
    for name, tensor in tensors.items():
        if name.endswith(".sinks"):
            made[name + ".weight"] = tensor
            continue
        if ".experts." not in name:
            made[name] = tensor
            continue
        plain, kind = name.removesuffix("_bias"), "bias" if name.endswith("_bias") else "weight"
        turned = tensor if kind == "bias" else tensor.swapaxes(1, 2)
        if plain.endswith("gate_up_proj"):
            for start, part in enumerate(("gate_proj", "up_proj")):
                made[f"{plain.removesuffix('gate_up_proj')}{part}.{kind}"] = turned[:, start::2]
        else:
            made[f"{plain}.{kind}"] = turned
    return made


def _stored(architecture, config, name, tensor):
    if architecture in SHIFTED and name.endswith("norm.weight"):
        return tensor + np.float32(1)
    if architecture == "gpt2" and name.endswith(CONV1D):
        return tensor.T
    if architecture in PAIRED and ".q_proj." in name:
        return _interleaved(tensor, config["num_attention_heads"])
    if architecture in PAIRED and ".k_proj." in name:
        return _interleaved(tensor, config["num_key_value_heads"])
    return tensor


def _interleaved(tensor, heads):
    """Row i of each head beside row i + W/2."""
    halves = tensor.reshape(heads, 2, -1, tensor.shape[-1])
    return np.stack([halves[:, 0], halves[:, 1]], axis=2).reshape(tensor.shape)


def _metadata(architecture: str, config: Mapping[str, Any]) -> dict[str, Any]:
    if architecture == "gpt2":
        return {
            "context_length": config["n_positions"],
            "embedding_length": config["n_embd"],
            "feed_forward_length": config["n_inner"],
            "block_count": config["n_layer"],
            "attention.head_count": config["n_head"],
            "attention.layer_norm_epsilon": config["layer_norm_epsilon"],
            "vocab_size": config["vocab_size"],
        }
    heads, width = config["num_attention_heads"], config["head_dim"]
    shared = {
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "block_count": config["num_hidden_layers"],
        "attention.head_count": heads,
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "vocab_size": config["vocab_size"],
    }
    if architecture != "phi3":
        shared |= {"attention.key_length": width, "attention.value_length": width}
    return shared | OWN.get(architecture, _rope_base)(config)


def _rope_base(config):
    return {"rope.freq_base": config["rope_parameters"]["rope_theta"]}


def _llama(config):
    experts = {
        "expert_count": config["num_local_experts"],
        "expert_used_count": config["num_experts_per_tok"],
    }
    return _rope_base(config) | experts | {"rope.dimension_count": config["head_dim"]}


def _gemma2(config):
    return {
        "attn_logit_softcapping": config["attn_logit_softcapping"],
        "final_logit_softcapping": config["final_logit_softcapping"],
        "attention.sliding_window": config["sliding_window"],
    }


def _gemma3(config):
    full = config["rope_parameters"]["full_attention"]
    local = config["rope_parameters"]["sliding_attention"]
    return {
        "attention.sliding_window": config["sliding_window"],
        "attention.sliding_window_pattern": [
            kind == "sliding_attention" for kind in config["layer_types"]
        ],
        "rope.freq_base": full["rope_theta"],
        "rope.freq_base_swa": local["rope_theta"],
        "rope.scaling.type": "linear",
        "rope.scaling.factor": full["factor"],
    }


def _phi3(config):
    rope = config["rope_parameters"]
    original = rope["original_max_position_embeddings"]
    factor = config["max_position_embeddings"] / original
    return {
        "rope.dimension_count": int(config["head_dim"] * rope["partial_rotary_factor"]),
        "rope.freq_base": rope["rope_theta"],
        "rope.scaling.original_context_length": original,
        "rope.scaling.attn_factor": np.sqrt(1 + np.log(factor) / np.log(original)),
        "attention.sliding_window": config["sliding_window"] or 0,
    }


def _gpt_oss(config):
    rope = config["rope_parameters"]
    return _rope_base(config) | {
        "rope.dimension_count": config["head_dim"],
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": rope["factor"],
        "rope.scaling.original_context_length": rope["original_max_position_embeddings"],
        "attention.sliding_window": config["sliding_window"],
        "expert_count": config["num_local_experts"],
        "expert_used_count": config["num_experts_per_tok"],
        "expert_feed_forward_length": config["intermediate_size"],
    }


def _qwen3moe(config):
    return _rope_base(config) | {
        "expert_count": config["num_local_experts"],
        "expert_used_count": config["num_experts_per_tok"],
        "expert_feed_forward_length": config["moe_intermediate_size"],
    }


OWN = {
    "llama": _llama,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "phi3": _phi3,
    "gpt-oss": _gpt_oss,
    "qwen3moe": _qwen3moe,
}


def _add(writer, key: str, value: Any) -> None:
    if isinstance(value, str):
        writer.add_string(key, value)
    elif isinstance(value, list):
        writer.add_array(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    else:
        writer.add_float32(key, float(value))

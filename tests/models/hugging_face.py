"""Tiny models of each family in Hugging Face's format, with weights made from a seed.

The golden files hold what Transformers computes with them. To make them anew, where torch is
installed: ``python tests/models/hugging_face.py``.
"""

import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from ml_dtypes import bfloat16

GOLDEN = Path(__file__).parents[1] / "golden"
SEED, ROWS, LENGTH = 11, 2, 64

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
# The scaling bends within the few positions that are compared.
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
# Three query heads a KV head, and heads that are wider than their share of the model.
ODD = {"hidden_size": 48, "num_attention_heads": 6, "head_dim": 16}
PLAIN_ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "short_factor": [1.0, 1.25, 1.5, 1.75],
    "long_factor": [1.0, 1.5, 3.0, 6.0],
}
MODELS: dict[str, dict[str, Any]] = {
    "llama2": {"architecture": "LlamaForCausalLM", "num_key_value_heads": 4},
    "llama3": {"architecture": "LlamaForCausalLM", "rope_parameters": LLAMA3_ROPE},
    "smollm2": {
        "architecture": "LlamaForCausalLM",
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100_000.0},
    },
    "mistral": {"architecture": "MistralForCausalLM", "sliding_window": 8},
    "nemo": ODD | {"architecture": "MistralForCausalLM", "sliding_window": None},
    "mixtral": ODD
    | {"architecture": "MixtralForCausalLM", "num_local_experts": 4, "sliding_window": 16},
    "qwen2": {
        "architecture": "Qwen2ForCausalLM",
        "tie_word_embeddings": True,
        "use_sliding_window": True,
        "sliding_window": 8,
        "max_window_layers": 1,
    },
    "qwen3": {"architecture": "Qwen3ForCausalLM", "head_dim": 16},
    "qwen3_moe": ODD
    | {
        "architecture": "Qwen3MoeForCausalLM",
        "tie_word_embeddings": True,
        "moe_intermediate_size": 24,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "norm_topk_prob": True,
    },
    "gemma2": ODD
    | {
        "architecture": "Gemma2ForCausalLM",
        "tie_word_embeddings": True,
        "query_pre_attn_scalar": 20,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0,
        "sliding_window": 8,
    },
    "gemma3": ODD
    | {
        "architecture": "Gemma3ForCausalLM",
        "num_hidden_layers": 4,
        "sliding_window_pattern": 3,
        "tie_word_embeddings": True,
        "query_pre_attn_scalar": 20,
        "sliding_window": 8,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "rope_theta": 100_000.0, "factor": 4.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1_000.0},
        },
    },
    "gemma3_untied": ODD | {"architecture": "Gemma3ForCausalLM"},
    "phi3": ODD
    | {
        "architecture": "Phi3ForCausalLM",
        "head_dim": 8,
        "sliding_window": 24,
        "rope_parameters": LONG_ROPE,
        "original_max_position_embeddings": 256,
        "pad_token_id": 0,
    },
    "phi4": ODD
    | {
        "architecture": "Phi3ForCausalLM",
        "head_dim": 8,
        "rope_parameters": LONG_ROPE
        | {
            "partial_rotary_factor": 0.75,
            "short_factor": [1.0, 1.25, 1.5],
            "long_factor": [1.0, 2.0, 4.0],
        },
        "original_max_position_embeddings": 32,
        "pad_token_id": 0,
    },
    "smollm3": ODD
    | {"architecture": "SmolLM3ForCausalLM", "no_rope_layer_interval": 2, "pad_token_id": 0},
    "olmo2": ODD | {"architecture": "Olmo2ForCausalLM"},
    "gpt2": {
        "architecture": "GPT2LMHeadModel",
        "hidden_size": 48,
        "num_attention_heads": 6,
        "tie_word_embeddings": True,
        "max_position_embeddings": 64,
        "n_inner": 40,
    },
    "gpt_oss": ODD
    | {
        "architecture": "GptOssForCausalLM",
        "intermediate_size": 40,
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
        "sliding_window": 8,
        "swiglu_limit": 0.75,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10_000.0,
            "factor": 8.0,
            "original_max_position_embeddings": 32,
            "beta_fast": 2.0,
            "truncate": False,
        },
    },
}
# What a model's class does not know.
UNKNOWN = {"gpt2": ("intermediate_size", "num_key_value_heads", "head_dim", "rms_norm_eps")}


def tokens(seed: int = SEED) -> np.ndarray:
    """Token ids [ROWS, LENGTH]."""
    return np.random.RandomState(seed).randint(0, SIZES["vocab_size"], (ROWS, LENGTH))


def weights(shapes: dict[str, Any], seed: int = SEED) -> dict[str, np.ndarray]:
    """Weights of these shapes, from the one generator whose stream NumPy has frozen."""
    random = np.random.RandomState(seed)
    return {name: _weight(random, name, shapes[name]) for name in sorted(shapes)}


def _weight(random, name, shape):
    value = random.standard_normal(shape)
    if "norm" in name or ".ln_" in name:
        value = 1 + 0.1 * value
    elif name.endswith("bias"):
        value = 0.3 * value
    elif "embed" not in name:
        value = 1.5 * value / np.sqrt(shape[-1])
    return value.astype(np.float32)


def transformers_model(name: str, seed: int = SEED, rounded: bool = False, **changes):
    """The PyTorch model in float32, loaded from its own files, and the shapes in these by name."""
    import safetensors.numpy
    import transformers

    settings = SIZES | MODELS[name]
    architecture = getattr(transformers, settings.pop("architecture"))
    for key in UNKNOWN.get(name, ()):
        settings.pop(key, None)
    config = architecture.config_class(**settings, attn_implementation="eager")
    with tempfile.TemporaryDirectory() as folder:
        architecture(config).float().save_pretrained(folder)
        file = Path(folder) / "model.safetensors"
        shapes = {
            key: list(value.shape) for key, value in safetensors.numpy.load_file(file).items()
        }
        made = weights(shapes, seed)
        if rounded:
            made = {key: value.astype(bfloat16).astype(np.float32) for key, value in made.items()}
        safetensors.numpy.save_file(made, file, metadata={"format": "pt"})
        model = architecture.from_pretrained(folder, attn_implementation="eager", **changes)
    return model.eval(), shapes


def transformers_logits(model, ids: np.ndarray) -> np.ndarray:
    import torch

    with torch.no_grad():
        return model(torch.from_numpy(ids)).logits.numpy()


def config_json(model) -> dict[str, Any]:
    """What ``save_pretrained`` writes, without the version that wrote it."""
    settings = json.loads(model.config.to_json_string(use_diff=False))
    settings["architectures"] = [type(model).__name__]
    for key in ("transformers_version", "_name_or_path"):
        settings.pop(key, None)
    return settings


def write_golden() -> None:
    for name in MODELS:
        model, shapes = transformers_model(name)
        described = {"config": config_json(model), "shapes": shapes}
        text = json.dumps(described, indent=1, sort_keys=True)
        (GOLDEN / f"{name}.json").write_text(text + "\n", encoding="utf-8")
        np.save(GOLDEN / f"{name}.npy", transformers_logits(model, tokens()))


def read_golden(name: str) -> tuple[dict[str, Any], dict[str, Any], np.ndarray]:
    """Config, shapes and expected logits."""
    described = json.loads((GOLDEN / f"{name}.json").read_text(encoding="utf-8"))
    return described["config"], described["shapes"], np.load(GOLDEN / f"{name}.npy")


if __name__ == "__main__":
    write_golden()

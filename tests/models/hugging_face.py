"""Tiny models of each family in Hugging Face's format, with weights made from a seed.

The golden files hold what Transformers computes with them. To make them anew, where torch is
installed: ``python tests/models/hugging_face.py``.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np

GOLDEN = Path(__file__).parents[1] / "golden"
SEED, ROWS, LENGTH = 11, 2, 24

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
MODELS: dict[str, dict[str, Any]] = {
    "llama2": {"architecture": "LlamaForCausalLM", "num_key_value_heads": 4},
    "llama3": {"architecture": "LlamaForCausalLM", "rope_parameters": LLAMA3_ROPE},
    "smollm2": {
        "architecture": "LlamaForCausalLM",
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100_000.0},
    },
    "mistral": {"architecture": "MistralForCausalLM", "sliding_window": 8},
    "qwen2": {
        "architecture": "Qwen2ForCausalLM",
        "tie_word_embeddings": True,
        "use_sliding_window": True,
        "sliding_window": 8,
        "max_window_layers": 1,
    },
    "qwen3": {"architecture": "Qwen3ForCausalLM", "head_dim": 16},
}


def tokens(seed: int = SEED) -> np.ndarray:
    """Token ids [ROWS, LENGTH]."""
    return np.random.RandomState(seed).randint(0, SIZES["vocab_size"], (ROWS, LENGTH))


def weights(shapes: dict[str, Any], seed: int = SEED) -> dict[str, np.ndarray]:
    """Weights of these shapes, from the one generator whose stream NumPy has frozen."""
    random = np.random.RandomState(seed)
    return {name: _weight(random, name, shapes[name]) for name in sorted(shapes)}


def _weight(random, name, shape):
    value = random.standard_normal(shape)
    if "norm" in name:
        value = 1 + 0.1 * value
    elif name.endswith("bias"):
        value = 0.3 * value
    elif "embed" not in name:
        value = 1.5 * value / np.sqrt(shape[-1])
    return value.astype(np.float32)


def transformers_model(name: str, seed: int = SEED):
    """The PyTorch model in float32, and its shapes by name."""
    import torch
    import transformers

    settings = SIZES | MODELS[name]
    architecture = getattr(transformers, settings.pop("architecture"))
    config = architecture.config_class(**settings, attn_implementation="eager")
    model = architecture(config).float().eval()
    state = model.state_dict()
    if config.tie_word_embeddings:
        state.pop("lm_head.weight")
    shapes = {key: list(value.shape) for key, value in state.items()}
    made = {key: torch.from_numpy(value) for key, value in weights(shapes, seed).items()}
    model.load_state_dict(made, strict=False)
    model.tie_weights()
    return model, shapes


def transformers_logits(model, ids: np.ndarray) -> np.ndarray:
    import torch

    with torch.no_grad():
        return model(torch.from_numpy(ids)).logits.numpy()


def config_json(model) -> dict[str, Any]:
    """What ``save_pretrained`` writes, without the version that wrote it."""
    settings = json.loads(model.config.to_json_string(use_diff=False))
    settings["architectures"] = [type(model).__name__]
    settings.pop("transformers_version", None)
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

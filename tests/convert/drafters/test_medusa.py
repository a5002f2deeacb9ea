"""Medusa heads, in their authors' names and in vLLM's."""

import re

import jax
import numpy as np
import pytest
from convert.drafters.numpy_layers import silu
from convert.drafters.tiny_drafters import VOCAB, WIDTH, medusa_tensors, write

from ckpt_convert import ConversionError
from ckpt_convert.drafters import convert_drafter, load_drafter
from specjax.models.medusa import medusa_logits

pytestmark = pytest.mark.fast

# What published configs say of files with five heads.
CONFIG = {"medusa_num_heads": 2, "medusa_num_layers": 1, "base_model_name_or_path": "some/target"}
HIDDEN = np.random.default_rng(9).standard_normal((2, 3, WIDTH)).astype(np.float32)


def expected(tensors, heads, blocks):
    out = []
    for head in range(heads):
        x = HIDDEN.astype(np.float64)
        for block in range(blocks):
            at = f"{head}.{block}.linear."
            x = x + silu(x @ tensors[at + "weight"].T + tensors.get(at + "bias", 0.0))
        out.append(x @ tensors[f"{head}.{blocks}.weight"].T)
    return np.stack(out, axis=2)


def converted(tmp_path, config, tensors, name="medusa_lm_head.safetensors"):
    write(tmp_path / "source", config, tensors, name)
    convert_drafter(tmp_path / "source", tmp_path / "converted")
    return load_drafter(tmp_path / "converted")


def vllm_names(tensors):
    pairs = (
        (r"^(\d+)\.(\d+)\.linear\.", r"blocks.\1.layers.\2."),
        (r"^(\d+)\.\d+\.", r"lm_heads.\1."),
    )
    renamed = {}
    for name, tensor in tensors.items():
        for pattern, replacement in pairs:
            name = re.sub(pattern, replacement, name)
        renamed[name] = tensor
    return renamed


@pytest.mark.parametrize(
    ("form", "blocks"), [("authors", 1), ("authors", 2), ("vllm", 1), ("merged", 1)]
)
def test_heads_are_counted_in_the_keys(tmp_path, form, blocks):
    tensors = medusa_tensors(heads=5, blocks=blocks)
    written = {
        "authors": tensors,
        "vllm": vllm_names(tensors),
        "merged": {f"medusa_head.{name}": tensor for name, tensor in tensors.items()}
        | {"model.norm.weight": np.ones(WIDTH, np.float32)},
    }[form]
    drafter = converted(tmp_path, CONFIG, written)
    assert drafter.method == "medusa" and drafter.target == "some/target"
    assert (drafter.config.num_heads, drafter.config.num_layers) == (5, blocks)
    logits = jax.jit(medusa_logits, static_argnums=0)(drafter.config, drafter.params, HIDDEN)
    np.testing.assert_allclose(logits, expected(tensors, 5, blocks), atol=1e-4)


def test_blocks_without_bias_and_a_map_of_ids(tmp_path):
    """vLLM's map holds ids, not offsets."""
    ids = np.array([0, 3, 4, 9], np.int64)
    tensors = {n: t for n, t in medusa_tensors(2).items() if not n.endswith("bias")}
    cut = {n: t[:4] if n.endswith(".1.weight") else t for n, t in tensors.items()}
    written = vllm_names(cut) | {"token_map": ids}
    drafter = converted(tmp_path, CONFIG | {"vocab_size": VOCAB}, written)
    np.testing.assert_array_equal(drafter.params["draft_to_target"], ids)
    assert drafter.config.draft_vocab_size == 4
    logits = jax.jit(medusa_logits, static_argnums=0)(drafter.config, drafter.params, HIDDEN)
    np.testing.assert_allclose(logits, expected(cut, 2, 1), atol=1e-4)


@pytest.mark.parametrize(
    ("change", "config", "message"),
    [
        ({"1.0.linear.weight": None}, {}, "missing blocks.1.layers.0.weight"),
        ({"1.1.weight": np.zeros((VOCAB, 3), np.float32)}, {}, "misshapen lm_heads.1.weight"),
        ({"stray": np.zeros(2, np.float32)}, {}, "unmapped stray"),
        ({}, {"original_lm_head": True}, "original_lm_head.*take a checkpoint"),
        ({}, {"vocab_size": VOCAB + 3}, "token_map, which says which ones, is missing"),
        ({"token_map": np.zeros(VOCAB, np.int64)}, {"vocab_size": VOCAB}, "must hold 61 different"),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path, change, config, message):
    tensors = medusa_tensors(2) | change
    tensors = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    write(tmp_path / "source", CONFIG | config, tensors)
    with pytest.raises(ConversionError, match=message):
        convert_drafter(tmp_path / "source", tmp_path / "converted")
    assert not (tmp_path / "converted").exists()

"""A drafter with its target's own weights: never wrong, at any position, unless RoPE differs."""

import functools
import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from convert.drafters.tiny_drafters import LAYER_CONFIG, VOCAB, WIDTH, Tensors, write

from ckpt_convert import convert, load, load_drafter
from specjax.models import DecoderTarget, Rope
from specjax.models.mtp import mtp_logits, mtp_states

LENGTH = 450
TOKENS = np.random.default_rng(21).integers(0, VOCAB, (1, LENGTH)).astype(np.int32)
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
ROPES = {
    "base 1e6": ({"rope_theta": 1e6}, Rope(theta=1e6)),
    "llama3": (
        {"rope_theta": 500_000.0, "rope_scaling": LLAMA3},
        Rope(500_000.0, "llama3", 8.0, 1.0, 4.0, 128),
    ),
    "yarn": (
        {"rope_theta": 1e6, "rope_scaling": YARN},
        Rope(1e6, "yarn", 4.0, original_max_position=128, attention_factor=0.1 * math.log(4) + 1),
    ),
}


def one_layer_target():
    """Its tensors, and those of a module that passes embeddings on and is that very layer."""
    tensors = Tensors(22)
    tensors.layer("model.layers.0.", bias=True)
    tensors.norm("model.norm")
    tensors.add("lm_head.weight", VOCAB, WIDTH, scale=1.0)
    rows = tensors.rng.standard_normal((VOCAB, WIDTH))
    # Of root mean square 1, so that the module's norm leaves them as they are.
    rows /= np.sqrt(np.mean(rows**2, axis=1, keepdims=True))
    tensors["model.embed_tokens.weight"] = rows.astype(np.float32)
    at = "model.mtp_layers.0."
    module = {
        f"{at}token_layernorm.weight": np.ones(WIDTH, np.float32),
        f"{at}hidden_layernorm.weight": np.ones(WIDTH, np.float32),
        # [hidden ; embedding]
        f"{at}input_proj.weight": np.eye(WIDTH, 2 * WIDTH, WIDTH, dtype=np.float32),
        f"{at}final_layernorm.weight": tensors["model.norm.weight"],
    }
    for name in list(tensors):
        if name.startswith("model.layers.0."):
            module[name.replace("model.layers.0.", at)] = tensors[name]
    return tensors, module


@pytest.mark.parametrize("case", ROPES.values(), ids=ROPES)
def test_A7_acceptance_is_whole_at_early_and_late_positions(tmp_path, case):
    settings, rope = case
    tensors, module = one_layer_target()
    config = LAYER_CONFIG | {"num_hidden_layers": 1, "rms_norm_eps": 1e-9} | settings
    names = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
    convert(write(tmp_path / "model", config | names, tensors), tmp_path / "target")
    names = {"architectures": ["MiMoForCausalLM"], "model_type": "mimo"}
    source = write(tmp_path / "with module", config | names, tensors | module)
    convert(source, tmp_path / "drafter", drafter=True)
    model, drafter = load(tmp_path / "target"), load_drafter(tmp_path / "drafter")
    assert drafter.config.layer.rope == model.config.rope == rope

    target = DecoderTarget(model.config)
    out = jax.jit(target)(model.params, TOKENS, None, target.init_cache(1, LENGTH))
    best = np.argmax(out.logits[0], -1)
    drafts = np.argmax(draft(drafter.config, drafter.params, model.params)[0], -1)
    agreed = drafts == best
    assert agreed[:50].all() and agreed[400:450].all()

    # The test is not blind: under the usual base, positions disagree.
    plain = replace(drafter.config, layer=replace(drafter.config.layer, rope=Rope()))
    agreed = np.argmax(draft(plain, drafter.params, model.params)[0], -1) == best
    assert not agreed[400:450].all()


@functools.partial(jax.jit, static_argnums=0)
def draft(config, params, target):
    """Logits at every position; what the module is told of the target's states doesn't matter."""
    positions, hidden = jnp.arange(LENGTH)[None], jnp.zeros((1, LENGTH, WIDTH))
    tokens = jnp.asarray(TOKENS)
    state, _, _ = mtp_states(config, params, 0, tokens, hidden, positions, embed=target["embed"])
    return mtp_logits(config, params, 0, state, matrix=target["head"])

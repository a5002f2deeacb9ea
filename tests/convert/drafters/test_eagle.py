"""EAGLE-1 and EAGLE-2 checkpoints against their definition in NumPy."""

import functools

import jax
import numpy as np
import pytest
from convert.drafters.numpy_layers import attention, frequencies, layer, mlp, rms, triangle
from convert.drafters.tiny_drafters import (
    HEAD_DIM,
    VOCAB,
    WIDTH,
    eagle_config,
    eagle_tensors,
    write,
)

from ckpt_convert import ConversionError
from ckpt_convert.drafters import UNSAID, Choices, convert_drafter, load_drafter
from specjax.models.eagle import eagle_features

ROWS, LENGTH = 2, 7
_RNG = np.random.default_rng(4)
TOKENS = _RNG.integers(0, VOCAB, (ROWS, LENGTH)).astype(np.int32)
FEATURES = _RNG.standard_normal((ROWS, LENGTH, WIDTH)).astype(np.float32)
POSITIONS = np.tile(np.arange(400, 400 + LENGTH, dtype=np.int32), (ROWS, 1))
TARGET_EMBEDDING = _RNG.standard_normal((VOCAB, WIDTH)).astype(np.float32)

features = jax.jit(eagle_features, static_argnums=0)


def expected(tensors, layers=1, theta=10_000.0, scale=1.0):
    embedding = tensors.get("embed_tokens.weight", TARGET_EMBEDDING) * scale
    out = []
    for row in range(ROWS):
        fused = np.concatenate([embedding[TOKENS[row]], FEATURES[row]], axis=-1, dtype=np.float64)
        x = fused @ tensors["fc.weight"].T + tensors.get("fc.bias", 0.0)
        place = POSITIONS[row], frequencies(HEAD_DIM, theta), triangle(LENGTH), HEAD_DIM
        x = x + attention(tensors, "layers.0.self_attn.", x, *place)
        normed = rms(x, tensors["layers.0.post_attention_layernorm.weight"])
        x = x + mlp(tensors, "layers.0.mlp.", normed)
        for index in range(1, layers):
            x = layer(tensors, f"layers.{index}.", x, *place)
        out.append(x)
    return np.stack(out)


def converted(tmp_path, config, tensors, choices=UNSAID):
    write(tmp_path / "source", config, tensors)
    convert_drafter(tmp_path / "source", tmp_path / "converted", choices)
    return load_drafter(tmp_path / "converted")


CASES = {
    "with the bias that no flag tells of": ({}, {}, {}),
    "without it, whatever the config says": ({"bias": False}, {"bias": True}, {}),
    "biased heads, the target's embedding": (
        {"qkv_bias": True, "embedding": False, "bias": False},
        {"rope_theta": 1e6},
        {"theta": 1e6},
    ),
    "two layers": ({"layers": 2}, {"num_hidden_layers": 2}, {"layers": 2}),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_next_features_are_the_definitions(tmp_path, case):
    made, config, how = case
    tensors = eagle_tensors(**made)
    drafter = converted(tmp_path, eagle_config(**config), tensors)
    borrowed = "head" if drafter.config.own_embedding else "embedding and head"
    assert drafter.method == "eagle"
    assert f"borrows     the target's {borrowed}" in drafter.describe()
    embed = None if drafter.config.own_embedding else TARGET_EMBEDDING
    run = functools.partial(features, drafter.config, drafter.params, embed=embed)
    out, _ = run(TOKENS, FEATURES, POSITIONS)
    np.testing.assert_allclose(out, expected(tensors, **how), atol=1e-4)
    # Step by step, over the keys and values of the steps before.
    first, past = run(TOKENS[:, :4], FEATURES[:, :4], POSITIONS[:, :4])
    rest, _ = run(TOKENS[:, 4:], FEATURES[:, 4:], POSITIONS[:, 4:], past=past)
    np.testing.assert_allclose(np.concatenate([first, rest], 1), out, atol=1e-5)


def test_each_trap_would_be_seen():
    """The definition itself, read wrongly: bias dropped, inputs swapped, another rope base."""
    tensors = eagle_tensors()
    right = expected(tensors)
    unbiased = {name: tensor for name, tensor in tensors.items() if name != "fc.bias"}
    swapped = tensors | {"fc.weight": np.roll(tensors["fc.weight"], WIDTH, axis=1)}
    wrong = [expected(unbiased), expected(swapped), expected(tensors, theta=1e6)]
    assert min(np.abs(right - one).max() for one in wrong) > 1e-2


def test_embeddings_scaled_as_gemma_has_them_are_a_choice(tmp_path):
    tensors = eagle_tensors()
    drafter = converted(tmp_path, eagle_config(), tensors, Choices(embedding="scaled"))
    out, _ = features(drafter.config, drafter.params, TOKENS, FEATURES, POSITIONS)
    np.testing.assert_allclose(out, expected(tensors, scale=np.sqrt(WIDTH)), atol=1e-4)


@pytest.mark.parametrize(
    ("made", "config", "choices", "message"),
    [
        ({}, {"hidden_act": "gelu"}, Choices(), "hidden_act='gelu', which is not supported"),
        ({}, {"use_sliding_window": True}, UNSAID, "use_sliding_window=True"),
        ({}, {"layer_types": ["sliding_attention"]}, UNSAID, "'sliding_attention'"),
        ({}, {"rope_scaling": {"type": "made-up"}}, Choices(), "'made-up'"),
        ({}, {"quantization_config": {"bits": 4}}, Choices(), "quantised by"),
        ({}, {}, Choices(embedding="halved"), "embedding 'halved' is not known"),
        ({}, {}, Choices(layout="fill-in"), "layout was chosen, which makes no difference"),
        ({"layers": 2}, {}, Choices(), "unmapped layers.1.input_layernorm.weight"),
    ],
)
def test_what_it_cannot_do_is_refused(tmp_path, made, config, choices, message):
    write(tmp_path / "source", eagle_config(**config), eagle_tensors(**made))
    with pytest.raises(ConversionError, match=message):
        convert_drafter(tmp_path / "source", tmp_path / "converted", choices)


def test_an_input_norm_in_the_first_layer_is_refused(tmp_path):
    tensors = eagle_tensors() | {"layers.0.input_layernorm.weight": np.ones(WIDTH, np.float32)}
    write(tmp_path / "source", eagle_config(), tensors)
    with pytest.raises(ConversionError, match="whose first layer norms its input"):
        convert_drafter(tmp_path / "source", tmp_path / "converted")

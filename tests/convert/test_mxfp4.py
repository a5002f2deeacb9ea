"""Experts in MXFP4: decoded value by value, and read as the plain experts that they stand for."""

import json

import jax
import ml_dtypes
import numpy as np
import pytest
from convert.test_families import from_hf, model
from convert.tiny_checkpoints import write_hf
from models.hugging_face import tokens, transformers_logits
from safetensors.numpy import load_file

from ckpt_convert import ConversionError, convert, export, load, mxfp4
from ckpt_convert.tensors import TensorInfo
from specjax.models.decoder import DecoderTarget

pytestmark = pytest.mark.fast

EXPERTS = ("gate_up_proj", "down_proj")
PACKED = ("_blocks", "_scales")
METHOD = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}


def decoded(blocks, scales):
    """As the standard says it: sign, two bits of exponent, one of mantissa, low bits first."""
    values = np.zeros((*scales.shape, 32))
    for place in np.ndindex(blocks.shape):
        for half, code in enumerate((int(blocks[place]) % 16, int(blocks[place]) // 16)):
            exponent, mantissa = code // 2 % 4, code % 2
            magnitude = mantissa / 2 if exponent == 0 else (1 + mantissa / 2) * 2 ** (exponent - 1)
            sign = -1 if code >= 8 else 1
            scale = 2.0 ** (int(scales[place[:-1]]) - 127)
            values[(*place[:-1], 2 * place[-1] + half)] = sign * magnitude * scale
    return values.reshape(*scales.shape[:-1], -1).swapaxes(-1, -2)


def packed(rng, shape):
    """Blocks and scales of a plain matrix of this shape, (inputs, outputs) last."""
    *leading, inputs, outputs = shape
    blocks = rng.integers(0, 256, (*leading, outputs, inputs // 32, 16)).astype(np.uint8)
    return blocks, rng.integers(120, 126, blocks.shape[:-1]).astype(np.uint8)


def test_every_code_and_every_scale():
    """All pairs of codes in one expert; from the smallest scale to the largest in another."""
    blocks = np.arange(256, dtype=np.uint8).reshape(1, 16, 1, 16).repeat(2, 0)
    scales = np.full((2, 16, 1), 127, np.uint8)
    scales[1, :, 0] = [0, 1, 2, 60, 100, 119, 126, 127, 128, 129, 140, 200, 250, 251, 252, 252]
    found = mxfp4.dequantise("x", blocks, scales)
    assert (found.shape, found.dtype) == ((2, 32, 16), ml_dtypes.bfloat16)
    np.testing.assert_array_equal(found.astype(np.float64), decoded(blocks, scales))


def in_mxfp4():
    """A tiny model, its tensors with packed experts, and those with plain ones instead."""
    config, tensors = model("gpt_oss", hidden_size=64, intermediate_size=32)
    plain = {name: tensor.astype(ml_dtypes.bfloat16) for name, tensor in tensors.items()}
    held, rng = dict(plain), np.random.default_rng(1)
    for name in [name for name in tensors if name.endswith(EXPERTS)]:
        blocks, scales = packed(rng, held.pop(name).shape)
        held |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        plain[name] = decoded(blocks, scales).astype(ml_dtypes.bfloat16)
    return config | {"quantization_config": METHOD}, held, plain


def test_packed_experts_are_read_as_plain_ones_and_exported_so(tmp_path):
    config, held, plain = in_mxfp4()
    write_hf(tmp_path / "source", config, held, shards=2)
    done = convert(tmp_path / "source", tmp_path / "converted")
    assert done.dtype == "bfloat16" and not done.ignored
    expected = from_hf(config, {name: value.astype(np.float32) for name, value in plain.items()})[1]
    params = load(tmp_path / "converted", dtype="float32").params
    jax.tree.map(np.testing.assert_array_equal, params, expected)
    export(tmp_path / "converted", tmp_path / "exported")
    written = load_file(tmp_path / "exported" / "model.safetensors")
    assert written.keys() == plain.keys()
    assert all(written[name].tobytes() == plain[name].tobytes() for name in plain)
    assert "quantization_config" not in json.loads(
        (tmp_path / "exported" / "config.json").read_text()
    )


@pytest.mark.torch
def test_transformers_reads_the_same_model(tmp_path):
    import torch
    import transformers

    config, held, _ = in_mxfp4()
    held = {name: value if name.endswith(PACKED) else value / 4 for name, value in held.items()}
    write_hf(tmp_path / "source", config, held)
    there = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "source",
        attn_implementation="eager",
        dtype=torch.float32,
        quantization_config=transformers.Mxfp4Config(dequantize=True),
    ).eval()
    convert(tmp_path / "source", tmp_path / "converted", dtype="float32")
    checkpoint, ids = load(tmp_path / "converted"), tokens(6)
    target = DecoderTarget(checkpoint.config)
    logits = jax.jit(target)(checkpoint.params, ids, None, target.init_cache(*ids.shape)).logits
    expected = transformers_logits(there, ids)
    assert expected.std() > 0.05
    np.testing.assert_allclose(logits, expected, atol=1e-5)


def _without_scales(name, held):
    del held[f"{name}_scales"]


def _short_scales(name, held):
    held[f"{name}_scales"] = held[f"{name}_scales"][:, 1:]


def _scales_of_another_type(name, held):
    held[f"{name}_scales"] = held[f"{name}_scales"].astype(np.float32)


def _no_number(name, held):
    held[f"{name}_scales"][0, 0, 0] = 255


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (_without_scales, "is MXFP4 without its scales; fetch the whole model"),
        (
            _short_scales,
            r"has MXFP4 blocks of shape \[6, 64, 2, 16\] for scales of shape \[6, 63, 2\]",
        ),
        (_scales_of_another_type, "has MXFP4 scales of type F32, not U8"),
        (_no_number, "has MXFP4 scales that are no numbers; fetch it again"),
    ],
)
def test_damaged_scales_are_named(damage, said, tmp_path):
    config, held, _ = in_mxfp4()
    name = "model.layers.1.mlp.experts.gate_up_proj"
    damage(name, held)
    write_hf(tmp_path / "source", config, held)
    with pytest.raises(ConversionError, match=f"{name} {said}"):
        convert(tmp_path / "source", tmp_path / "converted")
    assert not (tmp_path / "converted").exists()


def test_what_is_there_twice_or_is_no_stack_is_not_read():
    blocks, scales = TensorInfo((4, 32, 1, 16), "U8"), TensorInfo((4, 32, 1), "U8")
    packed_one = {"x_blocks": blocks, "x_scales": scales}
    assert mxfp4.joined(packed_one) == {"x": TensorInfo((4, 32, 32), "MXFP4")}
    twice = packed_one | {"x": TensorInfo((4, 32, 32), "BF16")}
    assert mxfp4.joined(twice) == twice
    # A matrix (outputs, inputs) is no stack of them the other way round.
    single = {"x_blocks": TensorInfo((32, 1, 16), "U8"), "x_scales": TensorInfo((32, 1), "U8")}
    assert mxfp4.joined(single) == single

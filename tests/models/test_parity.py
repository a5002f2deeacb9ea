"""The decoder computes what Transformers computes, from the files that Transformers writes."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models.hugging_face import (
    MODELS,
    config_json,
    read_golden,
    tokens,
    transformers_logits,
    transformers_model,
    weights,
)
from safetensors.numpy import save_file

import ckpt_convert
from specjax.models import DecoderTarget

TOLERANCE = 1e-4


def _converted(folder, config, tensors):
    """Safetensors to checkpoint to parameters: the whole way that a model takes."""
    source = folder / "source"
    source.mkdir()
    (source / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file(tensors, source / "model.safetensors")
    ckpt_convert.convert(source, folder / "converted")
    checkpoint = ckpt_convert.load(folder / "converted")
    return DecoderTarget(checkpoint.config), checkpoint.params


@functools.cache
def _forward(target):
    def forward(params, ids):
        return target(params, ids, None, target.init_cache(*ids.shape)).logits

    return jax.jit(forward)


def _logits(folder, config, tensors, ids):
    target, params = _converted(folder, config, tensors)
    return np.asarray(_forward(target)(params, jnp.asarray(ids, jnp.int32)))


@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_the_golden_files(name, tmp_path):
    config, shapes, expected = read_golden(name)
    logits = _logits(tmp_path, config, weights(shapes), tokens())
    assert expected.std() > 0.5
    np.testing.assert_allclose(logits, expected, atol=TOLERANCE, rtol=0)


@pytest.mark.torch
@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_transformers(name, tmp_path):
    """Other weights and tokens than the golden files have."""
    model, shapes = transformers_model(name, seed=5)
    expected = transformers_logits(model, tokens(6))
    logits = _logits(tmp_path, config_json(model), weights(shapes, seed=5), tokens(6))
    np.testing.assert_allclose(logits, expected, atol=TOLERANCE, rtol=0)


@pytest.mark.torch
@pytest.mark.parametrize("name", MODELS)
def test_the_golden_files_are_what_transformers_says(name):
    config, shapes, expected = read_golden(name)
    model, now = transformers_model(name)
    assert now == shapes
    np.testing.assert_allclose(transformers_logits(model, tokens()), expected, atol=1e-5)
    assert config["architectures"] == [type(model).__name__]


@pytest.mark.parametrize(
    ("name", "setting", "other"),
    [
        ("llama3", "rope_parameters", {"rope_type": "default", "rope_theta": 10_000.0}),
        ("smollm2", "rope_parameters", {"rope_type": "default", "rope_theta": 10_000.0}),
        ("mistral", "sliding_window", None),
        ("qwen2", "max_window_layers", 2),
        ("qwen3", "rms_norm_eps", 0.1),
    ],
)
def test_each_setting_is_seen_by_the_golden_files(name, setting, other, tmp_path):
    """With the setting changed the logits are off by far: a dropped one would not pass above."""
    config, shapes, expected = read_golden(name)
    changed = config | {setting: other}
    changed.pop("layer_types", None)
    logits = _logits(tmp_path, changed, weights(shapes), tokens())
    assert np.abs(logits - expected).max() > 100 * TOLERANCE

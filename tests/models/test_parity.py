"""The decoder computes what Transformers computes, from the files that Transformers writes."""

import functools
import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from llm.engines import tiny_model
from models.hugging_face import (
    LENGTH,
    MODELS,
    ROWS,
    config_json,
    read_golden,
    tokens,
    transformers_logits,
    transformers_model,
    weights,
)
from safetensors.numpy import save_file

import ckpt_convert
from ckpt_convert.families import IGNORED, hf_family
from ckpt_convert.tensors import TensorInfo, place, plan
from specjax import LLM, noise
from specjax.draft import NGram
from specjax.generation import generate
from specjax.models import DecoderTarget
from specjax.models.decoder import unstack
from specjax.models.layer import initial
from specjax.sampling import Sampling
from specjax.sharding import make_mesh, parameter_shardings

TOLERANCE = 1e-4
HALF_TOLERANCE = 2e-2
# One of each kind of layer: the rest differ in sizes only.
KINDS = (
    "mistral",
    "qwen2",
    "qwen3",
    "mixtral",
    "qwen3_moe",
    "gemma2",
    "gemma3",
    "phi4",
    "smollm3",
    "olmo2",
    "gpt2",
    "gpt_oss",
)


def _on_disk(folder, config, tensors):
    """Safetensors to checkpoint to parameters: the whole way that a model takes."""
    source = folder / "source"
    source.mkdir()
    (source / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file(tensors, source / "model.safetensors")
    ckpt_convert.convert(source, folder / "converted")
    checkpoint = ckpt_convert.load(folder / "converted")
    return DecoderTarget(checkpoint.config), checkpoint.params


def _in_memory(config, tensors):
    """The same without the disk."""
    family = hf_family(config)
    decoder = family.from_hf(config)
    infos = {name: TensorInfo(tensor.shape, "F32") for name, tensor in tensors.items()}
    placements, _ = plan(infos, family.hf_rules, IGNORED, decoder)
    params = place(tensors.__getitem__, placements, decoder, np.dtype(np.float32))
    return DecoderTarget(decoder), params


def _golden_model(name):
    config, shapes, expected = read_golden(name)
    return *_in_memory(config, weights(shapes)), expected


@functools.cache
def _forward(target):
    def forward(params, ids):
        return target(params, ids, None, target.init_cache(*ids.shape)).logits

    return jax.jit(forward)


def _logits(target, params, ids):
    logits = _forward(target)(params, jnp.asarray(ids, jnp.int32))
    return np.asarray(logits.astype(jnp.float32))


@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_the_golden_files(name, tmp_path):
    config, shapes, expected = read_golden(name)
    logits = _logits(*_on_disk(tmp_path, config, weights(shapes)), tokens())
    assert expected.std() > 0.5
    np.testing.assert_allclose(logits, expected, atol=TOLERANCE, rtol=0)


@pytest.mark.torch
@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_transformers(name):
    """Other weights and tokens than the golden files have."""
    model, shapes = transformers_model(name, seed=5)
    expected = transformers_logits(model, tokens(6))
    target, params = _in_memory(config_json(model), weights(shapes, seed=5))
    logits = _logits(target, params, tokens(6))
    np.testing.assert_allclose(logits, expected, atol=TOLERANCE, rtol=0)


@pytest.mark.torch
@pytest.mark.parametrize("name", MODELS)
def test_the_golden_files_are_what_transformers_says(name):
    config, shapes, expected = read_golden(name)
    model, now = transformers_model(name)
    assert now == shapes
    np.testing.assert_allclose(transformers_logits(model, tokens()), expected, atol=1e-5)
    assert config["architectures"] == [type(model).__name__]


@pytest.mark.parametrize("name", KINDS)
def test_blocks_through_the_cache_with_a_rollback_in_the_middle(name):
    """Unrolled, in blocks of which a part is wrong and dropped again, at each row's own pace."""
    target, params, expected = _golden_model(name)
    target, params = DecoderTarget(target.config, stacked=False), unstack(params)
    ids, rng, block = tokens(), np.random.default_rng(1), 16
    call = jax.jit(lambda params, ids, cache: target(params, ids, None, cache))
    cache = target.init_cache(ROWS, LENGTH + block)
    while (left := LENGTH - np.asarray(cache.length)).min() > 0:
        start = np.asarray(cache.length)
        kept = np.minimum(rng.integers(5, block + 1, ROWS), left)
        given = np.full((ROWS, block), 1)
        for row in range(ROWS):
            given[row, : kept[row]] = ids[row, start[row] : start[row] + kept[row]]
        out = call(params, jnp.asarray(given, jnp.int32), cache)
        for row in range(ROWS):
            np.testing.assert_allclose(
                out.logits[row, : kept[row]],
                expected[row, start[row] : start[row] + kept[row]],
                atol=TOLERANCE,
                rtol=0,
            )
        cache = out.cache.commit(None, jnp.full((ROWS,), block)).rollback(block - kept)


@pytest.mark.parametrize("name", KINDS)
def test_bfloat16_is_near_float32(name):
    """Root mean square over a position's logits, in their deviation; the median of positions.

    Where two experts are as likely, either format may take the other one.
    """
    target, params, expected = _golden_model(name)
    rounded = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.bfloat16), params)
    exact = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), rounded)
    logits = _logits(DecoderTarget(target.config, dtype="bfloat16"), rounded, tokens())
    wide = _logits(target, exact, tokens())
    off = np.sqrt(np.mean((logits - wide) ** 2, axis=-1)) / expected.std()
    assert 1e-4 < np.median(off) < HALF_TOLERANCE


YARN = read_golden("gpt_oss")[0]["rope_parameters"]
FULL = {"rope_type": "default", "rope_theta": 100_000.0}
LOCAL = {"rope_type": "default", "rope_theta": 1_000.0}


@pytest.mark.parametrize(
    ("name", "setting", "other"),
    [
        ("llama3", "rope_parameters", {"rope_type": "default", "rope_theta": 10_000.0}),
        ("smollm2", "rope_parameters", {"rope_type": "default", "rope_theta": 10_000.0}),
        ("mistral", "sliding_window", None),
        ("mixtral", "num_experts_per_tok", 1),
        ("qwen2", "max_window_layers", 2),
        ("qwen3", "rms_norm_eps", 0.1),
        ("qwen3_moe", "norm_topk_prob", False),
        ("gemma2", "attn_logit_softcapping", None),
        ("gemma2", "final_logit_softcapping", None),
        ("gemma2", "query_pre_attn_scalar", 16),
        ("gemma2", "sliding_window", 9),
        ("gemma3", "rope_parameters", {"full_attention": FULL, "sliding_attention": LOCAL}),
        ("gemma3", "rope_parameters", {"full_attention": FULL | {"factor": 4.0}}),
        ("gemma3", "layer_types", ["sliding_attention"] * 4),
        ("phi3", "sliding_window", None),
        ("phi3", "original_max_position_embeddings", 32),
        ("smollm3", "no_rope_layers", [1, 1, 1]),
        ("gpt2", "layer_norm_epsilon", 0.1),
        ("gpt_oss", "layer_types", ["sliding_attention"] * 3),
        ("gpt_oss", "rope_parameters", YARN | {"truncate": True}),
        ("gpt_oss", "swiglu_limit", 1.0),
    ],
)
def test_each_setting_is_seen_by_the_golden_files(name, setting, other):
    """With the setting changed the logits are off by far: a dropped one would not pass above."""
    config, shapes, expected = read_golden(name)
    changed = config | {setting: other}
    if setting == "original_max_position_embeddings":
        changed["rope_parameters"] = changed["rope_parameters"] | {setting: other}
    if name == "qwen2":
        changed.pop("layer_types")
    logits = _logits(*_in_memory(changed, weights(shapes)), tokens())
    assert np.abs(logits - expected).max() > 100 * TOLERANCE


@pytest.mark.parametrize("name", ["gemma3", "gpt2", "olmo2", "gpt_oss"])
def test_speculation_equals_plain_decoding(name):
    """A greedy row and a sampled one, to the last position that GPT-2 has.

    Plain decoding takes what is best after the tokens before, with the noise of its position.
    """
    target, params, _ = _golden_model(name)
    prompt = jnp.asarray(np.tile(tokens()[:, :8], 4), jnp.int32)
    keys, start = noise.row_keys(jax.random.key(3), ROWS), prompt.shape[1]
    fast = generate(
        target,
        params,
        prompt,
        keys,
        drafter=NGram(num_speculative_tokens=4, prompt_lookup_min=1),
        sampling=Sampling.create(ROWS, temperature=jnp.asarray([0.0, 0.5])),
        max_new_tokens=LENGTH - start,
        buffer=LENGTH,
        prefill_chunk=16,
        rule="coupled",
    )
    np.testing.assert_array_equal(fast.length, LENGTH)
    assert np.asarray(fast.stats.accepted).sum() > 0
    assert np.asarray(fast.stats.drafted).sum() > np.asarray(fast.stats.accepted).sum()
    logits = _logits(target, params, fast.tokens)[:, start - 1 : -1]
    places = jnp.arange(start, LENGTH)
    drawn = jax.vmap(lambda place: noise.token(keys[1], place, logits.shape[-1]))(places)
    best = [logits[0].argmax(axis=-1), (logits[1] / 0.5 + np.asarray(drawn)).argmax(axis=-1)]
    np.testing.assert_array_equal(fast.tokens[:, start:], best)


def test_more_tokens_than_learned_positions_are_refused():
    target, params, _ = _golden_model("gpt2")
    prompt = jnp.ones((1, 60), jnp.int32)
    with pytest.raises(ValueError, match="65 tokens long.*no more than 64 positions"):
        generate(target, params, prompt, jax.random.key(0), max_new_tokens=5)


def test_longrope_takes_its_short_factors_where_the_context_served_is_short():
    """Transformers' choice by the length of a text, ours by the longest that is served."""
    config, shapes, _ = read_golden("phi4")
    target, params = _in_memory(config, weights(shapes))
    short = target.within(32)
    assert short.within(64) == target.within(64)
    factors = config["rope_parameters"]["short_factor"]
    swapped = config | {
        "rope_parameters": config["rope_parameters"] | {"long_factor": factors},
    }
    other, _ = _in_memory(swapped, weights(shapes))
    ids = tokens()[:, :24]
    np.testing.assert_array_equal(_logits(short, params, ids), _logits(other, params, ids))
    assert np.abs(_logits(target, params, ids) - _logits(short, params, ids)).max() > 0.01


@pytest.mark.parametrize("stacked", [True, False])
@pytest.mark.parametrize("name", ["gemma3", "gpt2", "olmo2", "gpt_oss"])
def test_parameters_have_the_shapes_and_axes_declared(name, stacked):
    config = hf_family(read_golden(name)[0]).from_hf(read_golden(name)[0])
    target = DecoderTarget(config, stacked=stacked)
    declared = jax.tree.map(
        lambda names: tuple(config.axis_sizes[axis] for axis in names),
        target.parameter_axes(),
        is_leaf=lambda node: isinstance(node, tuple),
    )
    assert jax.tree.map(lambda leaf: tuple(leaf.shape), target.abstract_params()) == declared
    norm = initial(nnx.Rngs(0), "norm", ("embed",), config)[...]
    np.testing.assert_array_equal(norm, 0.0 if name == "gemma3" else 1.0)


@pytest.mark.parametrize("name", ["gpt2", "olmo2", "gpt_oss"])
def test_a_family_split_over_two_devices(name):
    """Learned positions, norms over all heads, sinks and experts with biases."""
    target, params, expected = _golden_model(name)
    mesh = make_mesh(data=1, model=2)
    placed = jax.device_put(params, parameter_shardings(mesh, target.parameter_axes(), params))
    layers = placed["layers"]
    split = {name for name, leaf in layers.items() if not leaf.sharding.is_fully_replicated}
    assert {"qkv", "out"} < split and split & {"up", "gate_up", "experts_gate_up"}
    np.testing.assert_allclose(_logits(target, placed, tokens()), expected, atol=TOLERANCE, rtol=0)


def test_the_longest_context_that_an_engine_serves_decides_a_longroped_models_factors():
    config, shapes, _ = read_golden("phi4")
    target, _ = _in_memory(config, weights(shapes))
    model = replace(tiny_model(), target=target)
    assert LLM(model, max_model_len=32).model.target == target.within(32)
    assert LLM(model).model.target == target
    assert LLM(tiny_model(), max_model_len=32).model == tiny_model()

"""Quantised weights: what they round to, what the decoder computes with them, and that no floats
of a whole stack are ever made.
"""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fixtures import TINY_CONFIG, decoder_oracle, random_params
from models.rounded import is_quantised, restored, restored_params

from specjax import Sampling
from specjax.draft import NGram
from specjax.generation import generate
from specjax.models import DecoderTarget, Rope
from specjax.models.decoder import parameter_axes, unstack
from specjax.models.linear import linear
from specjax.models.quantised import (
    CONTRACTED,
    SCHEMES,
    Quantised,
    held,
    quantise,
    refuse_faults,
)
from specjax.sharding import make_mesh, parameter_shardings

FAMILIES = {
    "windows": TINY_CONFIG,
    "tied head, llama3 RoPE": replace(
        TINY_CONFIG, tie_embeddings=True, rope=Rope(500.0, "llama3", 8.0, 1.0, 4.0, 32)
    ),
    "biases": replace(TINY_CONFIG, qkv_bias=True, num_kv_heads=1),
    "normed heads, two groups a head": replace(TINY_CONFIG, qk_norm=True, head_dim=128),
}
ROWS, LENGTH = 2, 12
TOKENS = np.random.default_rng(3).integers(0, TINY_CONFIG.vocab_size, (ROWS, LENGTH))
TOKENS = TOKENS.astype(np.int32)
# Root mean square of what quantisation moves the logits by, over their standard deviation.
MOVED = {"int8": (1e-3, 0.06), "int4": (1e-2, 0.6)}
LAYER_AXES = parameter_axes(TINY_CONFIG, stacked=True)["layers"]


def by_scheme(function):
    return pytest.mark.parametrize("scheme", SCHEMES)(function)


@functools.cache
def plain(config):
    return random_params(DecoderTarget(config), seed=1)


@functools.cache
def quantised(config, scheme):
    return quantise(plain(config), parameter_axes(config, stacked=True), scheme)


# The grid.


def one(weight: np.ndarray, name: str, scheme: str) -> Quantised:
    """A layer's parameter, quantised by NumPy."""
    axes = {"layers": {name: LAYER_AXES[name]}}
    return quantise({"layers": {name: weight}}, axes, scheme)["layers"][name]


def check_rounded(weight, name, scheme):
    """Every value is the nearest that its scale allows; a group's other extreme may be cut."""
    found = one(weight, name, scheme)
    axes = LAYER_AXES[name]
    back = restored(found, axes, CONTRACTED[name])
    ones = found.replace(values=np.ones_like(found.values))
    step = np.abs(restored(ones, axes, CONTRACTED[name]))
    values = np.asarray(found.values).reshape(weight.shape)
    low, high = (-127, 127) if scheme == "int8" else (-8, 7)
    assert values.min() >= low and values.max() <= high
    off = np.abs(back - weight)
    cut = (values == high) if scheme == "int4" else np.zeros_like(values, bool)
    assert (off <= np.where(cut, 1.01, 0.5 + 1e-4) * step).all()
    return found, back


SHAPES = {
    "qkv": (2, 96, 2, 3, 8),  # 96 inputs: two groups of 48
    "out": (2, 2, 1, 130, 5),  # 130 inputs a head: five groups of 26
    "gate_up": (1, 61, 2, 7),  # a prime: one group
    "down": (3, 192, 9),
}


@pytest.mark.fast
@by_scheme
@pytest.mark.parametrize("name", SHAPES)
def test_a_matrix_is_rounded_to_the_nearest(name, scheme):
    weight = np.random.default_rng(0).standard_normal(SHAPES[name]).astype(np.float32)
    found, back = check_rounded(weight, name, scheme)
    assert found.values.dtype == np.int8
    assert found.scales.dtype == (np.float32 if scheme == "int8" else jnp.bfloat16)
    off = np.sqrt(np.mean((back - weight) ** 2))
    assert off < (0.01 if scheme == "int8" else 0.11)


@pytest.mark.fast
@pytest.mark.parametrize(("scheme", "members"), [("int8", 192), ("int4", 64)])
def test_scales_are_a_channels_or_a_groups_own(scheme, members):
    """One large weight costs the others of its channel, or of its group, and nobody else."""
    weight = np.random.default_rng(1).standard_normal((1, 192, 3)).astype(np.float32)
    loud = weight.copy()
    loud[0, 70, 1] = 1000.0
    quiet_back = restored(one(weight, "down", scheme), LAYER_AXES["down"], ("mlp",))
    loud_back = restored(one(loud, "down", scheme), LAYER_AXES["down"], ("mlp",))
    changed = (quiet_back != loud_back)[0]
    assert not changed[:, [0, 2]].any()
    first = 0 if scheme == "int8" else 64
    assert changed[first : first + members, 1].mean() > 0.7
    changed[first : first + members, 1] = False
    assert not changed.any()


@pytest.mark.fast
@by_scheme
def test_weights_on_the_grid_stay(scheme):
    rng = np.random.default_rng(2)
    low, high, most = (-127, 128, 127) if scheme == "int8" else (-8, 8, -8)
    codes = rng.integers(low, high, (2, 128, 6))
    codes[:, ::64] = most
    steps = 2.0 ** rng.integers(-9, 3, (2, 1, 6)) * 1.5
    weight = (codes * steps).astype(np.float32)
    back = restored(one(weight, "down", scheme), LAYER_AXES["down"], ("mlp",))
    np.testing.assert_array_equal(back, weight)


@pytest.mark.fast
@by_scheme
@pytest.mark.parametrize(
    "weight",
    [
        np.zeros((1, 64, 2)),
        -np.abs(np.random.default_rng(3).standard_normal((1, 64, 2))) - 0.5,
        np.abs(np.random.default_rng(4).standard_normal((1, 64, 2))) + 0.5,
        np.full((1, 64, 2), 1e-42),
        np.full((1, 64, 2), 3e38),
    ],
    ids=["zeros", "negative", "positive", "vanishing", "huge"],
)
def test_unusual_channels(weight, scheme):
    weight = weight.astype(np.float32)
    weight[0, :, 1] *= 0.5
    if abs(weight).max() > 1e-30:
        check_rounded(weight, "down", scheme)
        return
    back = restored(one(weight, "down", scheme), LAYER_AXES["down"], ("mlp",))
    np.testing.assert_array_equal(back, 0)


@by_scheme
def test_the_host_and_a_device_round_alike(scheme):
    config = TINY_CONFIG
    axes = parameter_axes(config, stacked=True)
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), plain(config))
    there = jax.jit(lambda tree: quantise(tree, axes, scheme))(params)
    here = quantise(jax.tree.map(np.asarray, params), axes, scheme)
    assert jax.tree.structure(here) == jax.tree.structure(there)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.asarray(a), b), there, here)
    kept = [name for name, leaf in here["layers"].items() if not is_quantised(leaf)]
    assert kept == ["attention_norm", "mlp_norm"]


# What is refused.


@pytest.mark.fast
@by_scheme
@pytest.mark.parametrize("fault", [np.nan, np.inf, -np.inf])
def test_values_without_a_place_on_the_grid_are_refused_by_name(fault, scheme):
    weight = np.ones((2, 64, 3), np.float32)
    weight[1, 5, 2] = fault
    made = {"layers": {"down": one(weight, "down", scheme)}}
    with pytest.raises(ValueError, match="layers.down has NaN or infinite values.*mend the"):
        refuse_faults(made)


@pytest.mark.fast
def test_what_cannot_be_grouped_is_refused_by_name():
    with pytest.raises(ValueError, match="down cannot be .* int4: no group of 16 to 64 divides"):
        one(np.ones((1, 67, 2), np.float32), "down", "int4")
    one(np.ones((1, 67, 2), np.float32), "down", "int8")


def test_unknown_schemes_are_refused():
    with pytest.raises(ValueError, match="'fp8' is not known; choose int8, int4 or None"):
        DecoderTarget(TINY_CONFIG, quantization="fp8")


# The decoder.


@functools.cache
def forward(target: DecoderTarget):
    return jax.jit(lambda params, tokens, cache: target(params, tokens, None, cache))


def logits(target, params):
    cache = target.init_cache(ROWS, 16)
    return np.asarray(forward(target)(params, jnp.asarray(TOKENS), cache).logits)


@by_scheme
@pytest.mark.parametrize("config", FAMILIES.values(), ids=FAMILIES)
def test_the_decoder_computes_with_the_rounded_matrices(config, scheme):
    target, params = DecoderTarget(config, quantization=scheme), quantised(config, scheme)
    found = logits(target, params)
    expected = decoder_oracle(config, restored_params(params, config), TOKENS)
    np.testing.assert_allclose(found, expected, atol=1e-4, rtol=1e-4)
    true = decoder_oracle(config, plain(config), TOKENS)
    moved = np.sqrt(np.mean((found - true) ** 2)) / true.std()
    least, most = MOVED[scheme]
    assert least < moved < most


@by_scheme
def test_one_token_at_a_time_and_unrolled(scheme):
    config = FAMILIES["tied head, llama3 RoPE"]
    target, params = DecoderTarget(config, quantization=scheme), quantised(config, scheme)
    expected = logits(target, params)
    cache = target.init_cache(ROWS, 16)
    for place in range(3):
        out = forward(target)(params, jnp.asarray(TOKENS[:, place : place + 1]), cache)
        np.testing.assert_allclose(out.logits[:, 0], expected[:, place], atol=1e-4, rtol=1e-4)
        cache = out.cache.commit(None, jnp.ones((ROWS,), jnp.int32))
    unrolled = replace(target, stacked=False)
    layers = unstack(jax.tree.map(lambda leaf: leaf, params))
    np.testing.assert_allclose(logits(unrolled, layers), expected, atol=1e-4, rtol=1e-4)


@by_scheme
def test_first_layers_of_a_quantised_model(scheme):
    target = DecoderTarget(TINY_CONFIG, quantization=scheme).first_layers(1)
    params = quantised(TINY_CONFIG, scheme)
    expected = decoder_oracle(target.config, restored_params(params, TINY_CONFIG), TOKENS)
    np.testing.assert_allclose(logits(target, params), expected, atol=1e-4, rtol=1e-4)


@by_scheme
def test_bfloat16_is_near_float32(scheme):
    target = DecoderTarget(TINY_CONFIG, "bfloat16", quantization=scheme)
    rounded = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), plain(TINY_CONFIG))
    params = quantise(rounded, parameter_axes(TINY_CONFIG, stacked=True), scheme)
    found = logits(target, params)
    assert found.dtype == jnp.bfloat16
    expected = decoder_oracle(TINY_CONFIG, restored_params(params, TINY_CONFIG), TOKENS)
    off = np.sqrt(np.mean((found.astype(np.float64) - expected) ** 2)) / expected.std()
    assert 1e-4 < off < 0.03


@by_scheme
def test_one_token_in_bfloat16_is_multiplied_as_two_are(scheme):
    """A CPU gets such a token twice, so that it does not widen the weights."""
    weight = np.random.default_rng(6).standard_normal((1, 64, 24)).astype(np.float32)
    matrix = jax.tree.map(jnp.asarray, one(weight, "down", scheme))[0]
    x = jnp.asarray(np.random.default_rng(7).standard_normal((1, 2, 64)), jnp.bfloat16)
    together = linear(x, matrix).astype(np.float32)
    np.testing.assert_allclose(linear(x[:, :1], matrix), together[:, :1], rtol=0.02, atol=0.02)
    np.testing.assert_allclose(together[0], x[0].astype(np.float32) @ weight[0], rtol=0.1, atol=3.0)


@by_scheme
@pytest.mark.parametrize("stacked", [True, False])
def test_parameters_have_the_axes_declared(scheme, stacked):
    target = DecoderTarget(TINY_CONFIG, stacked=stacked, quantization=scheme)
    axes, params = target.parameter_axes(), target.abstract_params()

    def check(names, leaf):
        assert len(names) == len(leaf.shape)
        sizes = TINY_CONFIG.axis_sizes
        for name, size in zip(names, leaf.shape, strict=True):
            if name in ("layers", "vocab", "kv_heads", "gate_up"):
                assert size == sizes[name]

    jax.tree.map(check, axes, params, is_leaf=lambda node: type(node) is tuple)


def test_split_over_devices():
    scheme = "int4"
    config = replace(TINY_CONFIG, intermediate_size=256, vocab_size=64)
    target, params = DecoderTarget(config, quantization=scheme), quantised(config, scheme)
    placed = jax.device_put(
        params,
        parameter_shardings(make_mesh(model=2), target.parameter_axes(), params),
    )
    for name in ("qkv", "out", "gate_up", "down"):
        values = placed["layers"][name].values
        assert values.addressable_shards[0].data.size * 2 == values.size
    np.testing.assert_allclose(logits(target, placed), logits(target, params), atol=1e-4, rtol=1e-4)


def test_int4_is_packed_where_it_is_multiplied_packed():
    params = quantised(TINY_CONFIG, "int4")
    assert held(params, "cpu")["layers"]["qkv"].values.dtype == jnp.int8
    on_tpu = held(params, "tpu")
    assert on_tpu["layers"]["qkv"].values.dtype == jnp.int4
    assert on_tpu["embed"].values.dtype == jnp.int8
    target = DecoderTarget(TINY_CONFIG, quantization="int4")
    np.testing.assert_array_equal(logits(target, on_tpu), logits(target, params))


# Speculation.


@by_scheme
def test_speculation_on_a_quantised_target_is_plain_decoding_of_it(scheme):
    """A greedy row and a sampled one, token for token."""
    target, params = DecoderTarget(TINY_CONFIG, quantization=scheme), quantised(TINY_CONFIG, scheme)
    sampling = Sampling.create(ROWS, temperature=[0.0, 0.7])
    settings = {"sampling": sampling, "max_new_tokens": 40, "prefill_chunk": 8, "rule": "coupled"}
    plainly, drafted = (
        generate(
            target, params, jnp.asarray(TOKENS), jax.random.key(5), drafter=drafter, **settings
        )
        for drafter in (None, NGram(3, 1))
    )
    np.testing.assert_array_equal(drafted.tokens, plainly.tokens)
    assert np.asarray(drafted.stats.accepted).sum() > 0

"""Quantised experts: all ways through them, whole models, and speculation on these."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models.hugging_face import read_golden, tokens, weights
from models.rounded import restored, restored_params
from safetensors.numpy import save_file

import ckpt_convert
from ckpt_convert.families import IGNORED, hf_family
from ckpt_convert.tensors import TensorInfo, place, plan
from specjax import Sampling
from specjax.draft import NGram
from specjax.generation import generate
from specjax.models import DecoderTarget, experts
from specjax.models.decoder import parameter_axes
from specjax.models.experts import Experts, gated_by
from specjax.models.quantised import CONTRACTED, SCHEMES, quantise
from specjax.sharding import make_mesh, parameter_shardings

COUNT, CHOSEN, WIDTH, INNER = 5, 2, 96, 80
AXES = {
    "experts_gate_up": ("layers", "experts", "embed", "gate_up", "mlp"),
    "experts_down": ("layers", "experts", "mlp", "embed"),
}
SHAPES = {
    "experts_gate_up": (2, COUNT, WIDTH, 2, INNER),
    "experts_down": (2, COUNT, INNER, WIDTH),
}
WAYS = (experts.gathered, experts.sliced, experts.one_by_one, experts.grouped)
# A scheme each: the families differ in their routing.
MODELS = [("mixtral", "int8"), ("qwen3_moe", "int4")]


@functools.cache
def stacks(scheme):
    """Quantised, and the floats that these stand for."""
    rng = np.random.default_rng(0)
    plain = {name: rng.normal(size=shape).astype(np.float32) / 8 for name, shape in SHAPES.items()}
    made = quantise(plain, AXES, scheme)
    floats = {name: restored(made[name], AXES[name], CONTRACTED[name]) for name in plain}
    return made, jax.tree.map(np.float32, floats), plain


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_each_way_computes_with_the_rounded_experts(way, scheme):
    made, floats, _ = stacks(scheme)
    rng = np.random.default_rng(1)
    x = jnp.asarray(rng.normal(size=(6, WIDTH)), jnp.float32)
    share = jnp.asarray(rng.uniform(size=(6, CHOSEN)), jnp.float32)
    chosen = jnp.asarray([[0, 3], [3, 0], [1, 3], [3, 4], [0, 1], [4, 1]])  # nobody takes 2
    run, gate = jax.jit(way, static_argnums=4), gated_by(jax.nn.silu)
    found, expected = (
        run(x, share, chosen, Experts(own["experts_gate_up"], own["experts_down"], 1), gate)
        for own in (made, floats)
    )
    assert np.std(expected) > 0.3
    np.testing.assert_allclose(found, expected, atol=1e-4)


@pytest.mark.fast
@pytest.mark.parametrize("scheme", SCHEMES)
def test_an_expert_is_rounded_as_it_would_be_alone(scheme):
    made, floats, plain = stacks(scheme)
    for name, axes in AXES.items():
        alone = quantise({name: plain[name][1:, 3:4]}, {name: axes}, scheme)[name]
        own = jax.tree.map(lambda part: part[1:, 3:4], made[name])
        jax.tree.map(np.testing.assert_array_equal, own, alone)
        off = np.abs(floats[name] - plain[name]).max()
        assert off < (0.006 if scheme == "int8" else 0.08)
        assert made[name].values.ndim == len(axes) + (scheme == "int4")


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    """`converted(name, scheme)`: target and parameters of a tiny model, by way of the disk."""

    @functools.cache
    def made(name, scheme):
        config, shapes, _ = read_golden(name)
        source = tmp_path_factory.mktemp(name)
        (source / "config.json").write_text(json.dumps(config), encoding="utf-8")
        save_file(weights(shapes), source / "model.safetensors")
        folder = source.with_name(f"{source.name}-{scheme}")
        ckpt_convert.convert(source, folder, quantize=scheme)
        checkpoint = ckpt_convert.load(folder)
        return DecoderTarget(checkpoint.config, quantization=scheme), checkpoint.params

    return made


def in_floats(name):
    """The same without the disk, not quantised."""
    config, shapes, _ = read_golden(name)
    family, tensors = hf_family(config), weights(shapes)
    decoder = family.from_hf(config)
    infos = {name: TensorInfo(tensor.shape, "F32") for name, tensor in tensors.items()}
    placements, _ = plan(infos, family.hf_rules, IGNORED, decoder)
    params = place(tensors.__getitem__, placements, decoder, np.dtype(np.float32))
    return DecoderTarget(decoder), params


@functools.cache
def forward(target):
    def run(params, ids):
        return target(params, ids, None, target.init_cache(*ids.shape)).logits

    return jax.jit(run)


@pytest.mark.parametrize(("name", "scheme"), MODELS)
def test_a_quantised_checkpoint_is_the_rounded_model(name, scheme, converted):
    target, params = converted(name, scheme)
    plain, whole = in_floats(name)
    expected = quantise(whole, parameter_axes(plain.config, stacked=True), scheme)
    assert jax.tree.structure(params) == jax.tree.structure(expected)
    jax.tree.map(np.testing.assert_array_equal, params, expected)
    assert params["layers"]["router"].dtype == np.float32

    ids = jnp.asarray(tokens(), jnp.int32)
    found = forward(target)(params, ids)
    rounded = restored_params(params, target.config)
    rounded = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), rounded)
    np.testing.assert_allclose(found, forward(plain)(rounded, ids), atol=1e-3)
    moved = np.std(found - forward(plain)(whole, ids)) / np.std(found)
    assert 1e-3 < moved < (0.2 if scheme == "int8" else 1.0)


def test_split_over_devices(converted):
    target, params = converted(*MODELS[0])
    shardings = parameter_shardings(make_mesh(model=2), target.parameter_axes(), params)
    placed = jax.device_put(params, shardings)
    for name in AXES:
        values = placed["layers"][name].values
        assert values.addressable_shards[0].data.size * 2 == values.size
    ids = jnp.asarray(tokens(), jnp.int32)
    run = forward(target)
    np.testing.assert_allclose(run(placed, ids), run(params, ids), atol=1e-4)


def test_speculation_on_quantised_experts_is_plain_decoding_of_them(converted):
    """A greedy row and a sampled one, token for token."""
    target, params = converted("qwen3_moe", "int4")
    prompt = jnp.asarray(tokens()[:, :12], jnp.int32)
    sampling = Sampling.create(2, temperature=[0.0, 0.7])
    settings = {"sampling": sampling, "max_new_tokens": 40, "prefill_chunk": 8, "rule": "coupled"}
    plainly, drafted = (
        generate(target, params, prompt, jax.random.key(5), drafter=drafter, **settings)
        for drafter in (None, NGram(3, 1))
    )
    np.testing.assert_array_equal(drafted.tokens, plainly.tokens)
    assert np.asarray(drafted.stats.accepted).sum() > 0

"""Over any mesh the tokens are those of one device, and nothing moves between chunks of rounds."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fixtures import FULL_SCALE, random_params
from jax.sharding import AxisType, PartitionSpec
from sharding.subjects import (
    BUFFER,
    CHUNK,
    CONFIG,
    NEW_TOKENS,
    OPTIONS,
    SETTINGS,
    TARGET,
    built,
    greedy_and_sampled,
    output,
    params,
    prompts,
)

from specjax import noise
from specjax.accept import RULES
from specjax.generation import generate
from specjax.grammar import Grammar
from specjax.models import DecoderTarget
from specjax.programs import Programs
from specjax.sampling import Sampling
from specjax.sharding import (
    check_mesh,
    make_mesh,
    parameter_formats,
    parameter_shardings,
    sharding,
    tpu_layout,
)
from specjax.types import Generation, Request

MESHES = [(4, 1), (2, 2), (1, 4)]
# At reduced scale every mesh and every method, not every pair.
PAIRS = [(sizes, name) for sizes in MESHES for name in OPTIONS]
PAIRS = PAIRS if FULL_SCALE else [*PAIRS[:1], *PAIRS[3:6], *PAIRS[-1:]]
KEY = jax.random.key(5)


def run(method, *, target=TARGET, weights=None, mesh=None, sampling=None, key=KEY, **changes):
    weights = params() if weights is None else weights
    drafter, drafter_params = built(method, target, weights)
    prompt = prompts()
    return generate(
        target,
        weights,
        jnp.asarray(prompt.tokens),
        key,
        drafter=drafter,
        drafter_params=drafter_params,
        prompt_length=jnp.asarray(prompt.length),
        sampling=greedy_and_sampled() if sampling is None else sampling,
        mesh=mesh,
        **SETTINGS | changes,
    )


@functools.cache
def on_one_device(method) -> list[list[int]]:
    return output(run(method))


def placements(state) -> list:
    return [leaf.sharding for leaf in jax.tree.leaves(state)]


@pytest.mark.parametrize("sizes, method", PAIRS)
def test_a_mesh_changes_no_token_and_rounds_move_nothing(sizes, method):
    mesh = make_mesh(*sizes)
    drafter, drafter_params = built(method, TARGET, params())
    programs = Programs(TARGET, drafter, RULES["coupled"], CHUNK, mesh=mesh)
    weights, drafter_params = programs.place_all(params(), drafter_params)
    prompt = prompts()
    length = jnp.asarray(prompt.length)
    request = Request(
        prompt_length=length,
        limit=length + NEW_TOKENS,
        eos_ids=jnp.full((4, 1), -1),
        keys=noise.row_keys(KEY, 4),
        sampling=greedy_and_sampled(),
    )
    tokens = jnp.pad(prompt.tokens, ((0, 0), (0, BUFFER - prompt.tokens.shape[1])))

    state = programs.start(weights, drafter_params, request, tokens)
    placed = placements(state)
    rows, heads = (name if size > 1 else None for name, size in mesh.shape.items())
    assert state.cache.k.sharding.spec == PartitionSpec(None, rows, heads, None, None)
    chunks = 0
    while not np.all(state.done):
        state, _ = programs.advance(weights, drafter_params, request, state, 5)
        assert placements(state) == placed
        chunks += 1
    assert chunks > 1

    context = state.context
    result = Generation(context.tokens, context.length, length, state.finish, state.stats)
    assert output(result) == on_one_device(method)


def test_generate_takes_a_mesh_and_places_the_parameters_itself():
    assert output(run("ngram", mesh=make_mesh(2, 2))) == on_one_device("ngram")


def test_generate_takes_a_mesh_inside_a_callers_jit():
    mesh = make_mesh(2, 2)
    weights = jax.device_put(params(), parameter_shardings(mesh, TARGET.parameter_axes(), params()))

    @jax.jit
    def policy(weights, key):
        result = run("ngram", weights=weights, mesh=mesh, key=key)
        return result.tokens, result.length

    tokens, length = policy(weights, KEY)
    rows = [list(row[:size]) for row, size in zip(np.asarray(tokens), length, strict=True)]
    assert rows == on_one_device("ngram")


def test_kv_heads_that_do_not_divide_are_replicated_with_a_warning():
    target = DecoderTarget(replace(CONFIG, num_kv_heads=2))
    weights = random_params(target)
    mesh = make_mesh(1, 4)
    with pytest.warns(UserWarning, match="2 KV heads cannot be split over 4 devices"):
        sharded = output(run("none", target=target, weights=weights, mesh=mesh))
    assert sharded == output(run("none", target=target, weights=weights))
    with pytest.warns(UserWarning, match="they are replicated"):
        spec = sharding(mesh, ("rows", "kv_heads"), (4, 2)).spec
    assert spec == PartitionSpec(None, None)


def tied_params(first: int, second: int):
    """The largest logit is always that of two ids, and exactly the same."""
    weights = dict(params())
    weights["embed"] = weights["embed"].at[:, 0].set(1e4)
    weights["head"] = jnp.zeros_like(weights["head"]).at[jnp.array([first, second]), 0].set(1.0)
    weights["norm"] = jnp.ones_like(weights["norm"])
    return weights


@pytest.mark.parametrize("method", OPTIONS)
def test_g3_ties_across_vocabulary_shards_go_to_the_lowest_id(method):
    first, second = 19, 35
    mesh = make_mesh(1, 4)
    held = CONFIG.vocab_size // 4
    assert first // held != second // held
    sampling = Sampling.create(4, temperature=jnp.asarray([0.0, 1.0, 0.0, 1.0]), top_k=1)
    result = run(method, weights=tied_params(first, second), mesh=mesh, sampling=sampling)
    for row, prompt in zip(output(result), prompts().length, strict=True):
        assert row[prompt:] == [first] * NEW_TOKENS


def explicit_mesh():
    axes = (AxisType.Explicit, AxisType.Explicit)
    return jax.make_mesh((2, 2), ("data", "model"), axis_types=axes)


def strange_mesh():
    return jax.make_mesh((2, 2), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)


@pytest.mark.fast
@pytest.mark.parametrize(
    "mesh, fault", [(explicit_mesh, "not of type Auto"), (strange_mesh, "an axis 'tensor'")]
)
def test_a_mesh_that_is_not_ours_is_refused(mesh, fault):
    with pytest.raises(ValueError, match=fault):
        check_mesh(mesh())
    with pytest.raises(ValueError, match=fault):
        run("none", mesh=mesh())


@pytest.mark.fast
def test_a_mesh_of_more_devices_than_there_are_is_refused():
    with pytest.raises(ValueError, match="a 4x2 mesh needs 8 devices, 4 found"):
        make_mesh(4, 2)


@pytest.mark.fast
def test_parameters_that_lie_elsewhere_are_refused():
    programs = Programs(TARGET, built("none", TARGET, {}).drafter, RULES["coupled"], CHUNK)
    elsewhere = replace(programs, mesh=make_mesh(2, 2))
    with pytest.raises(ValueError, match="place them with Programs.place"):
        elsewhere.advance_program(params(), None, None, None)


@pytest.mark.fast
def test_fused_projections_come_before_the_axes_that_a_tpu_tiles():
    axes = TARGET.parameter_axes()
    orders = {
        name: [names[place] for place in layout.major_to_minor]
        for name, names in axes["layers"].items()
        if (layout := tpu_layout(names)) is not None
    }
    assert orders == {
        "qkv": ["layers", "kv_heads", "group_qkv", "embed", "head"],
        "gate_up": ["layers", "gate_up", "embed", "mlp"],
    }


@pytest.mark.fast
def test_elsewhere_than_on_tpu_memory_keeps_its_order():
    mesh, axes, shapes = make_mesh(2, 2), TARGET.parameter_axes(), TARGET.abstract_params()
    assert parameter_formats(mesh, axes, shapes) == parameter_shardings(mesh, axes, shapes)


@functools.cache
def everything() -> Sampling:
    """Every parameter that shapes the law; its vocabulary, 64, is split over the mesh too."""
    even = jnp.where(jnp.arange(64) % 2 == 0, 0, 1)
    # Of even and odd tokens no two of a kind in a row.
    alternating = Grammar(jnp.array([[1, 2], [-1, 2], [1, -1]]), even, jnp.int32(0))
    return Sampling.create(
        4,
        temperature=[0.0, 0.9, 0.0, 1.0],
        top_k=[0, 20, 0, 0],
        top_p=[1.0, 0.9, 1.0, 1.0],
        repetition_penalty=1.3,
        frequency_penalty=[0.0, 0.2, 0.0, 0.4],
        bias=np.where(np.arange(64) == 5, -np.inf, 0),
        min_tokens=9,
        ends=[7],
        bad_words=[[3, 4], [-1, 9]],
        grammar=alternating,
    )


def test_what_shapes_the_law_is_split_as_well():
    one = run("ngram", sampling=everything(), logprobs=2, eos_ids=(7,))
    split = run("ngram", sampling=everything(), logprobs=2, eos_ids=(7,), mesh=make_mesh(2, 2))
    assert output(split) == output(one)
    assert np.asarray(one.stats.accepted).sum() > 0
    for mine, theirs in zip(
        jax.tree.leaves(one.scores), jax.tree.leaves(split.scores), strict=True
    ):
        np.testing.assert_allclose(mine, theirs, atol=1e-4)

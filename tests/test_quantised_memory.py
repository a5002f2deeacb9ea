"""Quantised weights stay integers in memory: read off the compiled programs, for CPU and TPU."""

import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh

from specjax.models import DecoderConfig, DecoderTarget
from specjax.models.experts import Routing
from specjax.models.quantised import SCHEMES, held
from specjax.sharding import parameter_formats, replicated, row_shardings
from specjax.testing import hlo

CONFIG = DecoderConfig(
    vocab_size=8192,
    hidden_size=512,
    intermediate_size=1024,
    num_layers=8,
    num_heads=4,
    num_kv_heads=4,
    head_dim=128,
    max_position=1024,
)
FLOATS = 4 * CONFIG.num_layers * CONFIG.hidden_size * CONFIG.intermediate_size * 2
SLOTS = 64
# So large that a TPU keeps no layer's experts on the chip.
ROUTED = replace(
    CONFIG,
    vocab_size=512,
    hidden_size=1024,
    intermediate_size=2048,
    num_layers=2,
    experts=Routing(8, 2),
)
# One projection of all experts of a layer, in bfloat16.
ROUTED_FLOATS = 2 * 8 * ROUTED.hidden_size * ROUTED.intermediate_size


def rounds(target):
    """Several steps in a loop, in which a compiler could make floats of the weights once."""

    def program(params, cache, tokens, steps):
        def step(carry):
            done, cache, tokens = carry
            out = target(params, tokens, None, cache)
            cache = out.cache.commit(None, jnp.ones((1,), jnp.int32))
            return done + 1, cache, jnp.argmax(out.logits, -1).astype(jnp.int32)

        return lax.while_loop(lambda carry: carry[0] < steps, step, (0, cache, tokens))

    return jax.jit(program, donate_argnums=1)


def arguments(target, width):
    params = jax.eval_shape(lambda: held(target.init_params(jax.random.key(0)), "cpu"))
    return (
        params,
        jax.eval_shape(lambda: target.init_cache(1, SLOTS)),
        jax.ShapeDtypeStruct((1, width), jnp.int32),
        jax.ShapeDtypeStruct((), jnp.int32),
    )


def test_on_a_cpu_single_experts_become_floats():
    target = DecoderTarget(ROUTED, quantization="int4")
    compiled = rounds(target).lower(*arguments(target, 6)).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < ROUTED_FLOATS


@pytest.mark.parametrize("scheme", SCHEMES)
def test_on_a_cpu_no_floats_of_a_stack_are_made(scheme):
    target = DecoderTarget(CONFIG, quantization=scheme)
    compiled = rounds(target).lower(*arguments(target, 6)).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < FLOATS / 2
    assert not big_floats(compiled)


def test_unrolled_they_would_be():
    """Why quantised weights stay stacked: a CPU turns all of them to floats before the loop."""
    target = DecoderTarget(CONFIG, stacked=False, quantization="int8")
    compiled = rounds(target).lower(*arguments(target, 6)).compile()
    assert compiled.memory_analysis().temp_size_in_bytes > FLOATS


def big_floats(compiled) -> list[str]:
    """Float arrays of the size of a stack or of the head, wherever they are made."""
    module = hlo.read(compiled)
    return [
        one.type
        for _, _, one in module.instructions()
        if one.opcode not in ("parameter", "get-tuple-element", "tuple", "while", "conditional")
        and re.match(r"(f32|bf16)\[", one.type)
        and hlo.num_bytes(one.type) >= CONFIG.vocab_size * CONFIG.hidden_size * 2
    ]


def on_a_tpu(target, width, devices):
    """The program compiled for one of these, with parameters laid out as they would be."""
    mesh = Mesh(
        np.array(devices[:1]).reshape(1, 1),
        ("data", "model"),
        axis_types=(AxisType.Auto, AxisType.Auto),
    )
    params, cache, tokens, steps = arguments(target, width)
    params = jax.eval_shape(lambda params: held(params, "tpu"), params)
    cache_places = row_shardings(mesh, cache)
    placed = jax.tree.map(
        lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place),
        (params, cache, tokens, steps),
        (
            parameter_formats(mesh, target.parameter_axes(), params),
            cache_places,
            replicated(mesh),
            replicated(mesh),
        ),
    )
    return rounds(target).trace(*placed).lower(lowering_platforms=("tpu",)).compile()


@pytest.mark.parametrize(("width", "scheme"), [(1, None), (6, "int4")])
def test_a_tpu_lays_no_stack_of_experts_out_anew(width, scheme, absent_tpu):
    """A few tokens take slices; for many, floats of one layer are made."""
    target = DecoderTarget(ROUTED, dtype="bfloat16", quantization=scheme)
    compiled = on_a_tpu(target, width, absent_tpu("v5e:2x2"))
    assert compiled.memory_analysis().temp_size_in_bytes < 2**21
    assert [str(moved) for moved in hlo.read(compiled).moves(2.0**20, 0)] == []


@pytest.mark.parametrize("width", [1, 6])
def test_a_tpu_reads_int4_from_memory_and_int8_for_the_head(width, absent_tpu):
    taken = {}
    for scheme in (None, "int4"):
        target = DecoderTarget(CONFIG, dtype="bfloat16", quantization=scheme)
        compiled = on_a_tpu(target, width, absent_tpu("v5e:2x2"))
        taken[scheme] = compiled.memory_analysis().argument_size_in_bytes
        if scheme is not None:
            assert compiled.memory_analysis().temp_size_in_bytes < 2**20
            assert [str(moved) for moved in hlo.read(compiled).moves(2.0**20, 0)] == []
            assert not big_floats(compiled)
    ends = 2 * CONFIG.vocab_size * CONFIG.hidden_size
    layers = taken[None] - 2 * ends
    assert taken["int4"] < 1.1 * (ends + layers * 4.25 / 16)

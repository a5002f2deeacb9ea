"""The loop with the shapes of Llama-3.1-8B, compiled for eight TPU v5e chips that are not there."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

from specjax import loop
from specjax.accept import RULES
from specjax.draft import NGram
from specjax.models import DecoderConfig, DecoderTarget, Rope
from specjax.programs import Programs
from specjax.sampling import Sampling
from specjax.sharding import parameter_formats, row_shardings
from specjax.testing import hlo
from specjax.types import Request

CHIP_MEMORY = 15.75 * 2**30
ROWS, BUFFER, CHUNK = 8, 4096, 64
LLAMA_3_1_8B = DecoderConfig(
    vocab_size=128_256,
    hidden_size=4096,
    intermediate_size=14_336,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    max_position=131_072,
    rope=Rope(500_000.0, "llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0),
)
TARGET = DecoderTarget(LLAMA_3_1_8B, dtype="bfloat16")
DRAFTER, RULE = NGram(5), RULES["matching"]


def placed(shapes, where):
    return jax.tree.map(
        lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), shapes, where
    )


def abstract_request() -> Request:
    def ids(*sizes):
        return jax.ShapeDtypeStruct(sizes, jnp.int32)

    return Request(
        prompt_length=ids(ROWS),
        limit=ids(ROWS),
        eos_ids=ids(ROWS, 4),
        keys=jax.eval_shape(lambda: jax.random.split(jax.random.key(0), ROWS)),
        sampling=jax.eval_shape(lambda: Sampling.create(ROWS, top_p=1.0)),
    )


def abstract_state(params, request):
    def start(params, request, tokens):
        return loop.start(TARGET, params, DRAFTER, None, RULE, request, tokens, chunk=CHUNK)

    return jax.eval_shape(start, params, request, jax.ShapeDtypeStruct((ROWS, BUFFER), jnp.int32))


@pytest.mark.parametrize("sizes", [(1, 8), (2, 4)], ids=["1x8", "2x4"])
def test_llama_8b_fits_and_its_rounds_stay_on_the_chips(
    sizes, absent_tpu: Callable[[str], list[jax.Device]]
):
    devices = np.array(absent_tpu("v5e:2x4")).reshape(sizes)
    mesh = Mesh(devices, ("data", "model"), axis_types=(AxisType.Auto, AxisType.Auto))
    params = TARGET.abstract_params()
    params = placed(params, parameter_formats(mesh, TARGET.parameter_axes(), params))
    request = abstract_request()
    state = abstract_state(params, request)
    arguments = (
        params,
        None,
        placed(request, row_shardings(mesh, request)),
        placed(state, row_shardings(mesh, state)),
    )
    program = Programs(TARGET, DRAFTER, RULE, CHUNK, mesh=mesh).advance_program(*arguments)
    rounds = jax.ShapeDtypeStruct((), jnp.int32)
    halt = jax.ShapeDtypeStruct((ROWS,), bool)
    lowered = program.trace(*arguments, rounds, halt).lower(lowering_platforms=("tpu",))
    compiled = lowered.compile()

    memory = compiled.memory_analysis()
    needed = (
        memory.argument_size_in_bytes
        + memory.output_size_in_bytes
        - memory.alias_size_in_bytes
        + memory.temp_size_in_bytes
    )
    assert needed < CHIP_MEMORY
    side = state.cache.k.size * 2 // devices.size
    assert memory.alias_size_in_bytes >= 2 * side
    assert memory.temp_size_in_bytes < side

    module = hlo.read(compiled)
    assert {"state.cache.k", "state.cache.v"} <= module.aliased_arguments()
    assert module.host_transfers() == []
    layer = side // LLAMA_3_1_8B.num_layers
    # Depth 1 is a round, 2 a verify width, 3 the layers.
    assert [str(moved) for moved in module.moves(0.9 * layer, least_depth=2)] == []
    in_rounds = module.moves(0.9 * layer)
    assert [str(moved) for moved in in_rounds] == []
    # Weights stay where they are: what travels is activations, logits' maxima and, where rows are
    # truncated, the most likely tokens of every part of the vocabulary.
    for opcode, size, source in module.collectives():
        gathers_heads = opcode == "all-gather" and source.endswith("top_k")
        assert opcode == "all-reduce" or gathers_heads, source
        assert size <= ROWS * DRAFTER.num_nodes * LLAMA_3_1_8B.hidden_size * 4, source

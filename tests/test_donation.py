"""The cache is updated in place: read from the compiled programs, with programs in which it isn't.

On the CPU for both layer loops, and for a TPU that is not there.
"""

import functools
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import SingleDeviceSharding

from specjax import cache as cache_module
from specjax import loop
from specjax.accept import RULES
from specjax.cache import KVCache
from specjax.draft import NGram
from specjax.models import DecoderConfig, DecoderTarget
from specjax.programs import Programs
from specjax.sampling import Sampling
from specjax.testing import hlo
from specjax.types import Request, TargetOutput

ROWS, BUFFER, CHUNK = 2, 1000, 24
# On a TPU a smaller cache would be kept in its vector memory as a whole.
TPU_ROWS, TPU_BUFFER = 8, 8168
CACHE = ("state.cache.k", "state.cache.v")
# Its cache outweighs all else that a round touches: 2 MiB a side in float32, of 4 layers.
CONFIG = DecoderConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=64,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    max_position=2048,
)
TPU_CONFIG = replace(
    CONFIG, num_layers=8, head_dim=128, hidden_size=256, intermediate_size=512, vocab_size=256
)
DRAFTER = NGram(5)


@functools.cache
def abstract_arguments(target, device=None) -> tuple:
    """(params, drafter_params, request, state, rounds, halt) of `advance`, as shapes."""

    rows, buffer = (ROWS, BUFFER) if device is None else (TPU_ROWS, TPU_BUFFER)

    def shape(*sizes, dtype=jnp.int32):
        return jax.ShapeDtypeStruct(sizes, dtype)

    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), rows))
    request = Request(
        prompt_length=shape(rows),
        limit=shape(rows),
        eos_ids=shape(rows, 1),
        keys=keys,
        sampling=jax.eval_shape(lambda: Sampling.create(rows)),
    )
    params = target.abstract_params()
    begin = functools.partial(loop.start, chunk=CHUNK)
    state = jax.eval_shape(
        lambda params, request, tokens: begin(
            target, params, DRAFTER, None, RULES["coupled"], request, tokens
        ),
        params,
        request,
        shape(rows, buffer),
    )
    arguments = (params, None, request, state, shape(), shape(rows, dtype=bool))
    if device is None:
        return arguments
    place = SingleDeviceSharding(device)
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), arguments)


def compiled(target, device=None, donate=True):
    """`Programs.advance`, compiled; without donation the same rounds in a jit of our own."""
    arguments = abstract_arguments(target, device)
    programs = Programs(target, DRAFTER, RULES["coupled"], CHUNK)
    program = programs.advance_program(*arguments[:4])
    if not donate:

        def rounds(params, drafter_params, request, state, rounds, halt):
            return loop.run(target, params, DRAFTER, None, RULES["coupled"], request, state, rounds)

        program = jax.jit(rounds)
    platform = "cpu" if device is None else "tpu"
    return program.trace(*arguments).lower(lowering_platforms=(platform,)).compile()


def faults(target, device=None, donate=True) -> list[str]:
    """What is wrong with the cache in `advance`.

    On a CPU attention reads one layer's keys transposed, so there only whole arrays count.
    """
    cache = abstract_arguments(target, device)[3].cache
    side = cache.k.size * cache.k.dtype.itemsize
    smallest = side if device is None else side // cache.k.shape[0]
    return hlo.cache_faults(
        compiled(target, device, donate),
        CACHE,
        2 * side,
        at_least=0.9 * smallest,
        temporaries=0.9 * side,
    )


FORMS = {
    "scanned layers": DecoderTarget(CONFIG),
    "unrolled layers": DecoderTarget(CONFIG, stacked=False),
}


@pytest.mark.parametrize("form", FORMS)
def test_the_cache_is_updated_in_place_on_a_cpu(form):
    assert faults(FORMS[form]) == []


def test_the_cache_is_updated_in_place_where_rows_are_written_in_a_loop():
    with mock.patch.object(cache_module, "UNROLLED_ROWS", ROWS - 1):
        assert faults(Renamed(FORMS["unrolled layers"])) == []


def test_the_cache_is_updated_in_place_on_a_tpu(absent_tpu):
    device = absent_tpu("v5e:2x4")[0]
    assert faults(DecoderTarget(TPU_CONFIG, dtype="bfloat16"), device) == []


def test_a_layer_that_is_taken_out_and_put_back_is_found_on_a_tpu(absent_tpu):
    device = absent_tpu("v5e:2x4")[0]
    target = DecoderTarget(TPU_CONFIG, dtype="bfloat16")
    with mock.patch.object(cache_module, "_write_scattered", cache_module._write_taken_out):
        # The rounds of a jit that was never traced: nothing of the right program is reused.
        found = faults(Renamed(target), device)
    assert any("dynamic-update-slice" in fault for fault in found)


def test_a_cache_that_is_not_donated_is_found():
    found = faults(FORMS["scanned layers"], donate=False)
    assert any("state.cache.k is not donated" in fault for fault in found)
    assert any("bytes are aliased" in fault for fault in found)


def test_a_cache_that_is_selected_for_done_rows_is_found():
    found = faults(Keeping(FORMS["scanned layers"]))
    assert any("loop depth" in fault for fault in found), found


def test_a_cache_that_goes_through_the_layer_loop_as_inputs_and_outputs_is_found():
    found = faults(LayersAsInputs())
    assert any("loop depth" in fault for fault in found), found


@dataclass(frozen=True)
class Renamed:
    """A target that equals no other."""

    target: DecoderTarget

    def abstract_params(self):
        return self.target.abstract_params()

    def init_cache(self, batch, slots):
        return self.target.init_cache(batch, slots)

    def __call__(self, params, tokens, parents, cache, *, logits_at=None, taps=()):
        return self.target(params, tokens, parents, cache, logits_at=logits_at, taps=taps)


@dataclass(frozen=True)
class Keeping:
    """Keeps the old cache of rows that have no room left, as a `where` on every slot."""

    target: DecoderTarget

    def abstract_params(self):
        return self.target.abstract_params()

    def init_cache(self, batch, slots):
        return self.target.init_cache(batch, slots)

    def __call__(self, params, tokens, parents, cache, *, logits_at=None, taps=()):
        out = self.target(params, tokens, parents, cache, logits_at=logits_at, taps=taps)
        full = (cache.length >= BUFFER)[None, :, None, None, None]
        kept = replace(
            out.cache,
            k=jnp.where(full, cache.k, out.cache.k),
            v=jnp.where(full, cache.v, out.cache.v),
        )
        return replace(out, cache=kept)


@dataclass(frozen=True)
class LayersAsInputs:
    """One head-wise average a layer, the cache a scan's input and output instead of its carry."""

    layers: int = 4
    width: int = 32

    def abstract_params(self) -> Any:
        return {"embed": jax.ShapeDtypeStruct((64, self.width), jnp.float32)}

    def init_cache(self, batch, slots):
        return KVCache.empty(self.layers, batch, 2, slots, self.width)

    def __call__(self, params, tokens, parents, cache, *, logits_at=None, taps=()):
        x = params["embed"][tokens]
        place = jax.vmap(lambda row, new, at: lax.dynamic_update_slice(row, new, (0, at, 0)))

        def layer(x, kv):
            block = jnp.broadcast_to(x[:, None], (x.shape[0], 2, *x.shape[1:]))
            k, v = place(kv[0], block, cache.length), place(kv[1], -block, cache.length)
            return x + jnp.mean(k * v, axis=(1, 2))[:, None], (k, v)

        x, (k, v) = lax.scan(layer, x, (cache.k, cache.v))
        if logits_at is not None:
            x = jnp.take_along_axis(x, logits_at[:, None, None], axis=1)
        return TargetOutput(x @ params["embed"].T, replace(cache, k=k, v=v), None)


@pytest.mark.fast
def test_what_is_no_compiled_program_is_refused():
    with pytest.raises(ValueError, match="no entry computation"):
        hlo.read("HloModule nothing")


@pytest.mark.fast
def test_work_for_the_host_inside_a_loop_is_found():
    def rounds(x):
        def body(_, x):
            jax.debug.callback(lambda value: None, x[0])
            return x + 1

        return lax.fori_loop(0, 3, body, x)

    quiet = jax.jit(lambda x: lax.fori_loop(0, x[0].astype(int), lambda _, x: x + 1, x))
    shape = jax.ShapeDtypeStruct((4,), np.float32)
    assert hlo.read(jax.jit(rounds).lower(shape).compile()).host_transfers()
    assert not hlo.read(quiet.lower(shape).compile()).host_transfers()

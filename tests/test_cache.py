"""Writing into the cache: every row at its own slot, however many rows there are."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from llm.engines import CONFIG

from specjax.cache import UNROLLED_ROWS, KVCache
from specjax.models import DecoderTarget

LAYERS, HEADS, SLOTS, WIDTH, BLOCK = 2, 2, 9, 4, 3
ROWS = (1, UNROLLED_ROWS, UNROLLED_ROWS + 1)


@pytest.mark.fast
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("is_traced", [False, True], ids=["known layer", "traced layer"])
def test_each_row_is_written_at_its_own_slot(rows, is_traced):
    rng = np.random.default_rng(0)
    length = rng.integers(SLOTS - BLOCK, size=rows)
    block = rng.standard_normal((rows, HEADS, BLOCK, WIDTH)).astype(np.float32)
    cache = KVCache.empty(LAYERS, rows, HEADS, SLOTS, WIDTH, "float32")
    cache = cache.replace(length=jnp.asarray(length, jnp.int32))
    write = jax.jit(KVCache.write, static_argnums=() if is_traced else 1)
    written = write(cache, 1, jnp.asarray(block), jnp.asarray(-block))
    expected = np.zeros((LAYERS, rows, HEADS, SLOTS, WIDTH), np.float32)
    for row, start in enumerate(length):
        expected[1, row, :, start : start + BLOCK] = block[row]
    np.testing.assert_array_equal(written.k, expected)
    np.testing.assert_array_equal(written.v, -expected)


@pytest.mark.fast
def test_a_program_is_no_longer_for_more_rows():
    """A write for each row of each layer took minutes and gigabytes to compile for 64 rows."""
    target = DecoderTarget(CONFIG, stacked=False)
    params = target.abstract_params()

    def length(rows):
        cache = jax.eval_shape(lambda: target.init_cache(rows, 16))
        tokens = jax.ShapeDtypeStruct((rows, 2), jnp.int32)
        forward = jax.make_jaxpr(lambda *given: target(*given[:2], None, given[2]).logits)
        return str(forward(params, tokens, cache)).count(" = ")

    assert length(UNROLLED_ROWS + 1) == length(64)

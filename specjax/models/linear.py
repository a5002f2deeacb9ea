"""Matrix products in the precision that each dtype needs."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from specjax.models.quantised import Quantised

# The contracted axes of a head's product.
HEAD = ((2,), (1,))
# Rows of a quantised head that a CPU turns to floats at a time: they stay in its cache.
HEAD_BLOCK = 2048


def precision_of(dtype) -> lax.Precision:
    """float32 means float32 on every backend; a 16-bit model takes the hardware's default."""
    return lax.Precision.HIGHEST if dtype == jnp.float32 else lax.Precision.DEFAULT


def linear(
    x: Float[Array, "B T *inputs"],
    weight: Float[Array, "*inputs_outputs"] | Quantised,
    inputs: int = 1,
) -> Float[Array, "B T *outputs"]:
    """Contracts the last ``inputs`` axes of x with the first of ``weight``, stored (in, out)."""
    contract = (tuple(range(x.ndim - inputs, x.ndim)), tuple(range(inputs)))
    return _dot(x, weight, contract)


def each(
    x: Float[Array, "M *k I"], weights: Float[Array, "M k I *outputs"] | Quantised
) -> Float[Array, "M k *outputs"]:
    """Contracts the last axis of x; every token has matrices of its own, and may have a vector for
    each.
    """
    own = tuple(range(x.ndim - 1))
    return _product(x, weights, ((x.ndim - 1,), (2,)), (own, own))


def ragged(
    x: Float[Array, "M I"],
    weights: Float[Array, "X I *outputs"] | Quantised,
    sizes: Int[Array, " X"],
    which: Int[Array, " M"],
) -> Float[Array, "M *outputs"]:
    """Contracts the last axis of x: the first ``sizes[0]`` rows with the first matrix, and so on.

    ``which`` says the same row by row.
    """
    # Else a TPU lays the whole stack that these come from out anew.
    weights, scales = lax.optimization_barrier(weights), None
    if isinstance(weights, Quantised):
        weights, scales = weights.ungrouped(1, x.dtype)
    outputs = weights.shape[2:]
    product = lax.ragged_dot(
        x,
        weights.reshape(*weights.shape[:2], -1),
        group_sizes=sizes,
        precision=precision_of(x.dtype),
        preferred_element_type=jnp.float32,
    ).reshape(-1, *outputs)
    if scales is not None:
        product = product * scales[which]
    return product.astype(x.dtype)


def embedding(
    matrix: Float[Array, "V E"] | Quantised, tokens: Int[Array, "B T"]
) -> Float[Array, "B T E"]:
    """One row a token; ids out of range are cut to the nearest."""
    if isinstance(matrix, Quantised):
        return matrix.rows(tokens)
    return jnp.take(matrix, tokens, axis=0, mode="clip")


def head(
    x: Float[Array, "B T E"], matrix: Float[Array, "V E"] | Quantised
) -> Float[Array, "B T V"]:
    """Logits; the matrix is stored like the embedding's, which it may be.

    The other way round a TPU copies it whole to multiply a single row.
    """
    if isinstance(matrix, Quantised):
        return lax.platform_dependent(
            x, matrix, cpu=_head_in_blocks, default=lambda x, matrix: _dot(x, matrix, HEAD)
        )
    return _dot(x, matrix, HEAD)


def _head_in_blocks(x, matrix):
    """As a loop: XLA's CPU backend writes the whole matrix as floats to multiply it once."""
    size = min(HEAD_BLOCK, matrix.values.shape[0])

    def body(index, logits):
        # The last block is moved up to end with the matrix.
        start = jnp.minimum(index * size, matrix.values.shape[0] - size)
        block = jax.tree.map(lambda part: lax.dynamic_slice_in_dim(part, start, size), matrix)
        return lax.dynamic_update_slice_in_dim(logits, _dot(x, block, HEAD), start, axis=2)

    logits = jnp.zeros((*x.shape[:2], matrix.values.shape[0]), x.dtype)
    return lax.fori_loop(0, -(-matrix.values.shape[0] // size), body, logits)


def _dot(x, weight, contract):
    if x.shape[0] * x.shape[1] == 1 and x.dtype == jnp.bfloat16:
        # For one row XLA's CPU backend converts the whole weight to float32; for two it does not.
        # Accelerators pad a row to a tile anyway.
        doubled = jnp.concatenate([x, x], axis=1)
        return _dot(doubled, weight, contract)[:, :1]
    return _product(x, weight, contract, ((), ()))


def _product(x, weight, contract, batch):
    scales = None
    if isinstance(weight, Quantised):
        x, weight, contract, scales = weight.operands(x, contract)
    # Accumulated and handed out in float32: asked for 16 bits, a CPU would widen the weights.
    product = lax.dot_general(
        x,
        weight,
        (contract, batch),
        precision=precision_of(x.dtype),
        preferred_element_type=jnp.float32,
    )
    if scales is not None:
        product = product * scales
    return product.astype(x.dtype)

"""Matrix products and norms in the precision that each dtype needs."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float


def precision_of(dtype) -> lax.Precision:
    """float32 means float32 on every backend; a 16-bit model takes the hardware's default."""
    return lax.Precision.HIGHEST if dtype == jnp.float32 else lax.Precision.DEFAULT


def linear(
    x: Float[Array, "B T *inputs"], weight: Float[Array, "*inputs_outputs"], inputs: int = 1
) -> Float[Array, "B T *outputs"]:
    """Contracts the last ``inputs`` axes of x with the first of ``weight``, stored (in, out)."""
    contract = (tuple(range(x.ndim - inputs, x.ndim)), tuple(range(inputs)))
    return _dot(x, weight, contract)


def head(x: Float[Array, "B T E"], matrix: Float[Array, "V E"]) -> Float[Array, "B T V"]:
    """Logits; the matrix is stored like the embedding's, which it may be.

    The other way round a TPU copies it whole to multiply a single row.
    """
    return _dot(x, matrix, ((2,), (1,)))


def _dot(x, weight, contract):
    if x.shape[0] * x.shape[1] == 1 and x.dtype == jnp.bfloat16:
        # For one row XLA's CPU backend converts the whole weight to float32; for two it does not.
        # Accelerators pad a row to a tile anyway.
        doubled = jnp.concatenate([x, x], axis=1)
        return _dot(doubled, weight, contract)[:, :1]
    # Accumulated and handed out in float32: asked for 16 bits, a CPU would widen the weights.
    product = lax.dot_general(
        x,
        weight,
        (contract, ((), ())),
        precision=precision_of(x.dtype),
        preferred_element_type=jnp.float32,
    )
    return product.astype(x.dtype)


def rms_norm(
    x: Float[Array, "*B E"], weight: Float[Array, " E"], eps: float
) -> Float[Array, "*B E"]:
    """x / rms(x) * weight (Zhang and Sennrich, arXiv 1910.07467), the statistics in float32."""
    wide = x.astype(jnp.float32)
    wide = wide * lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + eps)
    return wide.astype(x.dtype) * weight

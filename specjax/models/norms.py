"""The kinds of norm, each a function of (x, weight, bias, eps); statistics in float32."""

from collections.abc import Callable

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

Norm = Callable[..., Float[Array, "*B E"]]


def _rms(x, weight, bias, eps):
    return _unit(x, eps).astype(x.dtype) * weight


def _rms_float32(x, weight, bias, eps):
    return (_unit(x, eps) * weight.astype(jnp.float32)).astype(x.dtype)


def _rms_plus_one(x, weight, bias, eps):
    return (_unit(x, eps) * (1.0 + weight.astype(jnp.float32))).astype(x.dtype)


def _layer(x, weight, bias, eps):
    wide = x.astype(jnp.float32)
    unit = _unit(wide - jnp.mean(wide, axis=-1, keepdims=True), eps)
    return (unit * weight.astype(jnp.float32) + bias.astype(jnp.float32)).astype(x.dtype)


def _unit(x, eps):
    wide = x.astype(jnp.float32)
    return wide * lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + eps)


# "rms" (RMSNorm, Zhang and Sennrich, arXiv 1910.07467) multiplies by the weight in the model's
# dtype, "rms_float32" before rounding to it; "rms_plus_one" is Gemma's, whose stored weight is one
# less; "layer" is LayerNorm (Ba et al., arXiv 1607.06450), with a bias.
NORMS: dict[str, Norm] = {
    "rms": _rms,
    "rms_float32": _rms_float32,
    "rms_plus_one": _rms_plus_one,
    "layer": _layer,
}

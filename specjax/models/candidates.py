"""DFlash 2's additions: a short convolution whose kernel depends on the token, and a re-scorer.

The block's slots draft independently of each other; both parts let a slot hear from the one before.
"""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from specjax.models.linear import linear, precision_of


@dataclass(frozen=True)
class ConvolutionConfig:
    """``kernel_size`` taps; ``group_size`` channels share the part that depends on the token."""

    kernel_size: int
    group_size: int


def kernels(
    config: ConvolutionConfig, weights: dict[str, Any], x: Float[Array, "B T E"]
) -> tuple[Float[Array, "B T taps groups"], Float[Array, "B T taps groups"]]:
    """What each token adds to the kernels before and after the sublayer that x enters."""
    added = linear(x, weights["projection"])
    return added[:, :, 0], added[:, :, 1]


def convolve(
    x: Float[Array, "B T E"],
    base: Float[Array, "taps E"],
    added: Float[Array, "B T taps groups"],
) -> Float[Array, "B T E"]:
    """Sum over taps d of (base[d] + added[t, d, group]) x[t - d]; zeros before the block."""
    mixed = jnp.zeros_like(x)
    width = x.shape[-1] // added.shape[-1]
    for tap in range(base.shape[0]):
        shifted = jnp.pad(x, ((0, 0), (tap, 0), (0, 0)))[:, : x.shape[1]]
        kernel = base[tap] + jnp.repeat(added[:, :, tap], width, axis=-1)
        mixed = mixed + kernel * shifted
    return mixed


def candidate_scores(
    params: dict[str, Any],
    hidden: Float[Array, "B E"],
    logits: Float[Array, "B candidates"],
    candidates: Int[Array, "B candidates"],
    previous: Int[Array, " B"],
) -> Float[Array, "B candidates"]:
    """Scores of one slot's candidates, its largest logits, given the token chosen before it."""
    selector, precision = params["selector"], precision_of(hidden.dtype)
    query = linear(hidden[:, None], selector["hidden"])[:, 0]
    query = query * jnp.take(selector["predecessor"], previous, axis=0, mode="clip")
    rows = jnp.take(selector["successor"], candidates, axis=0, mode="clip")
    return logits + jnp.einsum("br,bcr->bc", query, rows, precision=precision)

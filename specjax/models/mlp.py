"""The MLP of a layer: gated (Shazeer, arXiv 2002.05202) or plain."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from specjax.models.activations import Activation
from specjax.models.linear import linear
from specjax.models.quantised import Quantised


def gated_mlp(
    x: Float[Array, "B T D"],
    gate_up: Float[Array, "D 2 F"] | Quantised,
    down: Float[Array, "F D"] | Quantised,
    activation: Activation,
) -> Float[Array, "B T D"]:
    """(activation(x gate) * (x up)) down."""
    gate, up = jnp.moveaxis(linear(x, gate_up), 2, 0)
    return linear(activation(gate) * up, down)


def plain_mlp(
    x: Float[Array, "B T D"],
    up: Float[Array, "D F"] | Quantised,
    up_bias: Float[Array, " F"] | None,
    down: Float[Array, "F D"] | Quantised,
    activation: Activation,
) -> Float[Array, "B T D"]:
    """activation(x up + bias) down."""
    inner = linear(x, up)
    return linear(activation(inner if up_bias is None else inner + up_bias), down)

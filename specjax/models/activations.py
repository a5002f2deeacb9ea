"""The activations of an MLP, by name."""

from collections.abc import Callable

import jax

Activation = Callable[[jax.Array], jax.Array]


def _gelu_tanh(x: jax.Array) -> jax.Array:
    return jax.nn.gelu(x, approximate=True)


def _gelu_sigmoid(x: jax.Array) -> jax.Array:
    return x * jax.nn.sigmoid(1.702 * x)


# "gelu_sigmoid" is the approximation by a sigmoid (Hendrycks and Gimpel, arXiv 1606.08415),
# "gelu_tanh" is the approximation by tanh, which other programs call gelu_new too.
ACTIVATIONS: dict[str, Activation] = {
    "silu": jax.nn.silu,
    "gelu_sigmoid": _gelu_sigmoid,
    "gelu_tanh": _gelu_tanh,
}

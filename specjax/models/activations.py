"""The activations of an MLP, by name."""

from collections.abc import Callable

import jax

Activation = Callable[[jax.Array], jax.Array]


def _gelu_tanh(x: jax.Array) -> jax.Array:
    return jax.nn.gelu(x, approximate=True)


# "gelu_tanh" is the approximation by tanh, which other programs call gelu_new too.
ACTIVATIONS: dict[str, Activation] = {"silu": jax.nn.silu, "gelu_tanh": _gelu_tanh}

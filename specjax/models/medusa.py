"""Medusa heads: each guesses one token further from the same hidden state.

Cai et al., arXiv 2401.10774.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from specjax.models.linear import precision_of


@dataclass(frozen=True)
class MedusaConfig:
    """``num_heads`` heads of ``num_layers`` residual blocks each, over ``draft_vocab_size`` ids.

    Where ``reduced``, the parameters hold ``draft_to_target``, the target's id of each draft id.
    """

    vocab_size: int
    draft_vocab_size: int
    hidden_size: int
    num_heads: int
    num_layers: int = 1
    bias: bool = True

    @property
    def reduced(self) -> bool:
        return self.draft_vocab_size < self.vocab_size


def medusa_logits(
    config: MedusaConfig, params: dict[str, Any], hidden: Float[Array, "B T E"]
) -> Float[Array, "B T heads Vd"]:
    """Head i's logits of the token i + 2 places on, from the target's state after its last norm."""
    precision = precision_of(hidden.dtype)
    x = jnp.repeat(hidden[:, :, None], config.num_heads, axis=2)
    for index in range(config.num_layers):
        inner = jnp.einsum("bthe,heo->btho", x, params["blocks"][:, index], precision=precision)
        if config.bias:
            inner = inner + params["bias"][:, index]
        x = x + jax.nn.silu(inner)
    return jnp.einsum("bthe,hve->bthv", x, params["head"], precision=precision)

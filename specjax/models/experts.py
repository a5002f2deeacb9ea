"""A mixture of routed experts (Shazeer et al., arXiv 1701.06538): each token takes its top k.

A few tokens gather the weights of the experts they chose and read no others. Many are sorted by
expert into one grouped product; a CPU, which has none, goes from expert to expert.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from specjax.models.linear import linear, precision_of


@dataclass(frozen=True)
class Routing:
    """``count`` experts, of which each token takes ``chosen``.

    ``renormalise``: the chosen probabilities are divided by their sum.
    """

    count: int
    chosen: int
    renormalise: bool = True


def route(
    x: Float[Array, "B T D"], router: Float[Array, "D X"], routing: Routing
) -> tuple[Float[Array, "M k"], Int[Array, "M k"]]:
    """Weights, float32, and experts of each of the M = B T tokens."""
    logits = linear(x, router).astype(jnp.float32)
    share, experts = lax.top_k(jax.nn.softmax(logits), routing.chosen)
    if routing.renormalise:
        share = share / jnp.sum(share, axis=-1, keepdims=True)
    return share.reshape(-1, routing.chosen), experts.reshape(-1, routing.chosen)


def mix_experts(
    x: Float[Array, "B T D"],
    router: Float[Array, "D X"],
    gate_up: Float[Array, "X D 2 F"],
    down: Float[Array, "X F D"],
    routing: Routing,
    activation,
) -> Float[Array, "B T D"]:
    """The weighted sum of the chosen experts' gated MLPs."""
    share, experts = route(x, router, routing)
    tokens = x.reshape(-1, x.shape[-1])
    parts = (tokens, share, experts, gate_up, down)
    if experts.size <= routing.count:
        mixed = gathered(*parts, activation)
    else:
        mixed = lax.platform_dependent(
            *parts,
            cpu=lambda *parts: one_by_one(*parts, activation),
            default=lambda *parts: grouped(*parts, activation),
        )
    return mixed.reshape(x.shape).astype(x.dtype)


def gathered(
    tokens: Float[Array, "M D"],
    share: Float[Array, "M k"],
    experts: Int[Array, "M k"],
    gate_up: Float[Array, "X D 2 F"],
    down: Float[Array, "X F D"],
    activation,
) -> Float[Array, "M D"]:
    """Each token with copies of its own experts' weights."""
    how = {"precision": precision_of(tokens.dtype), "preferred_element_type": jnp.float32}
    inner = jnp.einsum("md,mkdpf->mkpf", tokens, gate_up[experts], **how).astype(tokens.dtype)
    hidden = activation(inner[:, :, 0]) * inner[:, :, 1]
    out = jnp.einsum("mkf,mkfd->mkd", hidden, down[experts], **how).astype(tokens.dtype)
    return jnp.sum(out * share[..., None], axis=1)


def one_by_one(
    tokens: Float[Array, "M D"],
    share: Float[Array, "M k"],
    experts: Int[Array, "M k"],
    gate_up: Float[Array, "X D 2 F"],
    down: Float[Array, "X F D"],
    activation,
) -> Float[Array, "M D"]:
    """All tokens through every expert, with weight 0 where it was not chosen."""

    def add(expert, total):
        weight = jnp.sum(jnp.where(experts == expert, share, 0.0), axis=1)
        gate, up = jnp.moveaxis(linear(tokens[None], gate_up[expert])[0], 1, 0)
        out = linear((activation(gate) * up)[None], down[expert])[0]
        return total + out * weight[:, None]

    return lax.fori_loop(0, gate_up.shape[0], add, jnp.zeros(tokens.shape, jnp.float32))


def grouped(
    tokens: Float[Array, "M D"],
    share: Float[Array, "M k"],
    experts: Int[Array, "M k"],
    gate_up: Float[Array, "X D 2 F"],
    down: Float[Array, "X F D"],
    activation,
) -> Float[Array, "M D"]:
    """Tokens sorted by expert, one ragged product a projection."""
    count, width, _, inner = gate_up.shape
    chosen = experts.shape[1]
    order = jnp.argsort(experts.reshape(-1), stable=True)
    sizes = jnp.bincount(experts.reshape(-1), length=count).astype(jnp.int32)
    how = {"precision": precision_of(tokens.dtype), "preferred_element_type": jnp.float32}
    flat = gate_up.reshape(count, width, 2 * inner)
    projected = lax.ragged_dot(tokens[order // chosen], flat, sizes, **how).astype(tokens.dtype)
    gate, up = projected[:, :inner], projected[:, inner:]
    out = lax.ragged_dot(activation(gate) * up, down, sizes, **how).astype(tokens.dtype)
    weighed = out * share.reshape(-1)[order][:, None]
    return jax.ops.segment_sum(weighed, order // chosen, num_segments=tokens.shape[0])

"""A mixture of routed experts (Shazeer et al., arXiv 1701.06538): each token takes its top k.

On accelerators a few tokens gather the weights of the experts that they chose, and many are sorted
by expert into one grouped product. A TPU, which lays the whole stack out anew to gather from it,
takes slices one after the other instead. A CPU, which has no grouped product and gathers slowly,
goes from expert to expert. Experts that nobody chose are not read in any case. Of quantised experts
the grouped product makes floats of one layer, all others of single experts.
"""

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from specjax.models.activations import Activation
from specjax.models.linear import each, linear, ragged
from specjax.models.quantised import Quantised


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
    gate_up: Float[Array, "Y X D 2 F"] | Quantised,
    down: Float[Array, "Y X F D"] | Quantised,
    layer: Int[Array, ""] | int,
    routing: Routing,
    activation: Activation,
) -> Float[Array, "B T D"]:
    """The weighted sum of the chosen experts' gated MLPs, in one layer of a stack.

    The stack comes whole: a layer taken out would be read whole for the few experts chosen of it.
    """
    share, experts = route(x, router, routing)
    tokens = x.reshape(-1, x.shape[-1])
    # A gathered weight is read, written and read again.
    few = 2 * experts.size <= routing.count
    mixed = lax.platform_dependent(
        tokens,
        share,
        experts,
        gate_up,
        down,
        layer,
        cpu=functools.partial(one_by_one, activation=activation),
        tpu=functools.partial(sliced if few else grouped, activation=activation),
        default=functools.partial(gathered if few else grouped, activation=activation),
    )
    return mixed.reshape(x.shape).astype(x.dtype)


def gathered(
    tokens: Float[Array, "M D"],
    share: Float[Array, "M k"],
    experts: Int[Array, "M k"],
    gate_up: Float[Array, "Y X D 2 F"] | Quantised,
    down: Float[Array, "Y X F D"] | Quantised,
    layer: Int[Array, ""] | int,
    activation: Activation,
) -> Float[Array, "M D"]:
    """Each token with copies of its own experts' weights."""
    inner = each(tokens, gate_up[layer, experts])
    hidden = activation(inner[:, :, 0]) * inner[:, :, 1]
    out = each(hidden, down[layer, experts])
    return jnp.sum(out * share[..., None], axis=1)


def sliced(
    tokens: Float[Array, "M D"],
    share: Float[Array, "M k"],
    experts: Int[Array, "M k"],
    gate_up: Float[Array, "Y X D 2 F"] | Quantised,
    down: Float[Array, "Y X F D"] | Quantised,
    layer: Int[Array, ""] | int,
    activation: Activation,
) -> Float[Array, "M D"]:
    """Each token through its own experts, one after the other."""
    chosen = experts.shape[1]

    def add(index, total):
        token, place = index // chosen, index % chosen
        expert, x = experts[token, place], tokens[token][None, None]
        gate, up = jnp.moveaxis(linear(x, gate_up[layer, expert])[0], 1, 0)
        out = linear((activation(gate) * up)[None], down[layer, expert])[0, 0]
        return total.at[token].add(out * share[token, place])

    return lax.fori_loop(0, experts.size, add, jnp.zeros(tokens.shape, jnp.float32))


def one_by_one(
    tokens: Float[Array, "M D"],
    share: Float[Array, "M k"],
    experts: Int[Array, "M k"],
    gate_up: Float[Array, "Y X D 2 F"] | Quantised,
    down: Float[Array, "Y X F D"] | Quantised,
    layer: Int[Array, ""] | int,
    activation: Activation,
) -> Float[Array, "M D"]:
    """All tokens through every expert that any of them chose, with weight 0 for the others."""

    def add(expert, total):
        is_own = experts == expert
        weight = jnp.sum(jnp.where(is_own, share, 0.0), axis=1)
        gate, up = jnp.moveaxis(linear(tokens[None], gate_up[layer, expert])[0], 1, 0)
        out = linear((activation(gate) * up)[None], down[layer, expert])[0]
        # What another token's expert makes of a token may be infinite.
        return total + jnp.where(jnp.any(is_own, axis=1)[:, None], out * weight[:, None], 0.0)

    def add_chosen(expert, total):
        is_chosen = jnp.any(experts == expert)
        return lax.cond(is_chosen, add, lambda expert, total: total, expert, total)

    return lax.fori_loop(0, _count(gate_up), add_chosen, jnp.zeros(tokens.shape, jnp.float32))


def grouped(
    tokens: Float[Array, "M D"],
    share: Float[Array, "M k"],
    experts: Int[Array, "M k"],
    gate_up: Float[Array, "Y X D 2 F"] | Quantised,
    down: Float[Array, "Y X F D"] | Quantised,
    layer: Int[Array, ""] | int,
    activation: Activation,
) -> Float[Array, "M D"]:
    """Tokens sorted by expert, one ragged product a projection."""
    chosen = experts.shape[1]
    order = jnp.argsort(experts.reshape(-1), stable=True)
    which = experts.reshape(-1)[order]
    sizes = jnp.bincount(which, length=_count(gate_up)).astype(jnp.int32)
    gate, up = (
        ragged(tokens[order // chosen], gate_up[layer][..., half, :], sizes, which)
        for half in (0, 1)
    )
    out = ragged(activation(gate) * up, down[layer], sizes, which)
    weighed = out * share.reshape(-1)[order][:, None]
    return jax.ops.segment_sum(weighed, order // chosen, num_segments=tokens.shape[0])


def _count(stack: Array | Quantised) -> int:
    return jax.tree.leaves(stack)[0].shape[1]

"""A mixture of routed experts (Shazeer et al., arXiv 1701.06538): each token takes its top k.

On accelerators a few tokens gather the weights of the experts that they chose, and many are sorted
by expert into one grouped product. A TPU, which lays the whole stack out anew to gather from it,
takes slices one after the other instead. A CPU, which has no grouped product and gathers slowly,
goes from expert to expert. Experts that nobody chose are not read in any case. Of quantised experts
the grouped product makes floats of one layer, all others of single experts.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from specjax.models.activations import Activation
from specjax.models.linear import each, linear, ragged
from specjax.models.quantised import Quantised
from specjax.models.settings import check_numbers


@dataclass(frozen=True)
class Routing:
    """``count`` experts, of which each token takes ``chosen``.

    ``renormalise``: the chosen probabilities are divided by their sum. ``biased``: there are
    `Biases`. ``limit`` bounds what goes into an expert's activation from above and its factor from
    both sides, and the factor counts from -1 (gpt-oss, arXiv 2508.10925).
    """

    count: int
    chosen: int
    renormalise: bool = True
    biased: bool = False
    limit: float | None = None

    def __post_init__(self):
        check_numbers(self)
        if self.chosen > self.count:
            raise ValueError(f"{self.chosen} experts cannot be taken out of {self.count}")


class Biases(NamedTuple):
    """What is added to the router's product, and to the two of each expert of each layer."""

    router: Float[Array, " X"] | None = None
    gate_up: Float[Array, "Y X 2 F"] | None = None
    down: Float[Array, "Y X D"] | None = None


UNBIASED = Biases()


class Experts(NamedTuple):
    """All experts of all layers, and the number of the layer that is meant.

    They come whole: a layer taken out would be read whole for the few experts chosen of it.
    """

    gate_up: Float[Array, "Y X D 2 F"] | Quantised
    down: Float[Array, "Y X F D"] | Quantised
    layer: Int[Array, ""] | int
    biases: Biases = UNBIASED


# What an expert's second projection takes, of the two halves of what its first one gives.
Gate = Callable[[Array, Array], Array]


def gated_by(activation: Activation, limit: float | None = None) -> Gate:
    """activation(gate) up, with a `Routing`'s ``limit`` if there is one."""

    def hidden(gate, up):
        if limit is None:
            return activation(gate) * up
        return activation(jnp.minimum(gate, limit)) * (jnp.clip(up, -limit, limit) + 1)

    return hidden


def route(
    x: Float[Array, "B T D"],
    router: Float[Array, "D X"],
    routing: Routing,
    bias: Float[Array, " X"] | None = None,
) -> tuple[Float[Array, "M k"], Int[Array, "M k"]]:
    """Weights, float32, and experts of each of the M = B T tokens."""
    logits = linear(x, router).astype(jnp.float32)
    if bias is not None:
        logits = logits + bias
    share, experts = lax.top_k(jax.nn.softmax(logits), routing.chosen)
    if routing.renormalise:
        share = share / jnp.sum(share, axis=-1, keepdims=True)
    return share.reshape(-1, routing.chosen), experts.reshape(-1, routing.chosen)


def mix_experts(
    x: Float[Array, "B T D"],
    router: Float[Array, "D X"],
    experts: Experts,
    routing: Routing,
    activation: Activation,
) -> Float[Array, "B T D"]:
    """The weighted sum of the chosen experts' gated MLPs, in one layer of a stack."""
    share, chosen = route(x, router, routing, experts.biases.router)
    tokens = x.reshape(-1, x.shape[-1])
    # A gathered weight is read, written and read again.
    few = 2 * chosen.size <= routing.count
    gate = gated_by(activation, routing.limit)
    mixed = lax.platform_dependent(
        tokens,
        share,
        chosen,
        experts,
        cpu=functools.partial(one_by_one, gate=gate),
        tpu=functools.partial(sliced if few else grouped, gate=gate),
        default=functools.partial(gathered if few else grouped, gate=gate),
    )
    return mixed.reshape(x.shape).astype(x.dtype)


def gathered(
    tokens: Float[Array, "M D"],
    share: Float[Array, "M k"],
    chosen: Int[Array, "M k"],
    experts: Experts,
    gate: Gate,
) -> Float[Array, "M D"]:
    """Each token with copies of its own experts' weights."""
    gate_up, down, layer, biases = experts
    inner = _biased(each(tokens, gate_up[layer, chosen]), biases.gate_up, layer, chosen)
    hidden = gate(inner[:, :, 0], inner[:, :, 1])
    out = _biased(each(hidden, down[layer, chosen]), biases.down, layer, chosen)
    return jnp.sum(out * share[..., None], axis=1)


def sliced(
    tokens: Float[Array, "M D"],
    share: Float[Array, "M k"],
    chosen: Int[Array, "M k"],
    experts: Experts,
    gate: Gate,
) -> Float[Array, "M D"]:
    """Each token through its own experts, one after the other."""
    of_each = chosen.shape[1]

    def add(index, total):
        token, place = index // of_each, index % of_each
        out = _through(chosen[token, place], tokens[token][None], experts, gate)[0]
        return total.at[token].add(out * share[token, place])

    return lax.fori_loop(0, chosen.size, add, jnp.zeros(tokens.shape, jnp.float32))


def one_by_one(
    tokens: Float[Array, "M D"],
    share: Float[Array, "M k"],
    chosen: Int[Array, "M k"],
    experts: Experts,
    gate: Gate,
) -> Float[Array, "M D"]:
    """All tokens through every expert that any of them chose, with weight 0 for the others."""

    def add(expert, total):
        is_own = chosen == expert
        weight = jnp.sum(jnp.where(is_own, share, 0.0), axis=1)
        out = _through(expert, tokens, experts, gate)
        # What another token's expert makes of a token may be infinite.
        return total + jnp.where(jnp.any(is_own, axis=1)[:, None], out * weight[:, None], 0.0)

    def add_chosen(expert, total):
        is_chosen = jnp.any(chosen == expert)
        return lax.cond(is_chosen, add, lambda expert, total: total, expert, total)

    return lax.fori_loop(0, _count(experts), add_chosen, jnp.zeros(tokens.shape, jnp.float32))


def grouped(
    tokens: Float[Array, "M D"],
    share: Float[Array, "M k"],
    chosen: Int[Array, "M k"],
    experts: Experts,
    gate: Gate,
) -> Float[Array, "M D"]:
    """Tokens sorted by expert, one ragged product a projection."""
    gate_up, down, layer, biases = experts
    of_each = chosen.shape[1]
    order = jnp.argsort(chosen.reshape(-1), stable=True)
    which = chosen.reshape(-1)[order]
    sizes = jnp.bincount(which, length=_count(experts)).astype(jnp.int32)

    def projected(half):
        product = ragged(tokens[order // of_each], gate_up[layer][..., half, :], sizes, which)
        added = None if biases.gate_up is None else biases.gate_up[:, :, half]
        return _biased(product, added, layer, which)

    hidden = gate(projected(0), projected(1))
    out = _biased(ragged(hidden, down[layer], sizes, which), biases.down, layer, which)
    weighed = out * share.reshape(-1)[order][:, None]
    return jax.ops.segment_sum(weighed, order // of_each, num_segments=tokens.shape[0])


def _through(
    expert: Int[Array, ""], x: Float[Array, "M D"], experts: Experts, gate: Gate
) -> Float[Array, "M D"]:
    """All of ``x`` through one expert."""
    gate_up, down, layer, biases = experts
    inner = _biased(linear(x[None], gate_up[layer, expert])[0], biases.gate_up, layer, expert)
    hidden = gate(*jnp.moveaxis(inner, 1, 0))
    return _biased(linear(hidden[None], down[layer, expert])[0], biases.down, layer, expert)


def _biased(product: Array, biases: Array | None, layer, experts) -> Array:
    return product if biases is None else product + biases[layer, experts]


def _count(experts: Experts) -> int:
    return jax.tree.leaves(experts.gate_up)[0].shape[1]

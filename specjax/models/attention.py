"""Grouped-query attention of a block of queries over the cache's slots."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

HIDDEN = -1e30


def attend(
    q: Float[Array, "B T K G W"],
    k: Float[Array, "B K S W"],
    v: Float[Array, "B K S W"],
    seen: Bool[Array, "B T S"],
    precision: lax.Precision,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Float[Array, "K G"] | None = None,
) -> Float[Array, "B T K G W"]:
    """softmax(q k scale) v over the slots that each query may see; softmax in float32.

    ``scale`` None is 1 / sqrt(W). ``softcap`` bounds the scores by softcap * tanh(score / softcap).
    ``sinks`` are scores of one more slot that every query sees and that holds nothing, so that a
    query may look at less than one slot in all (gpt-oss, arXiv 2508.10925).
    """
    scores = jnp.einsum(
        "btkgw,bksw->bktgs", q, k, precision=precision, preferred_element_type=jnp.float32
    )
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    scores = jnp.where(seen[:, None, :, None, :], _capped(scores * factor, softcap), HIDDEN)
    highest = jnp.max(scores, axis=-1, keepdims=True)
    if sinks is not None:
        sink = sinks.astype(jnp.float32)[:, None, :, None]
        highest = jnp.maximum(highest, sink)
    weights = jnp.exp(scores - highest)
    mixed = jnp.einsum("bktgs,bksw->bktgw", weights.astype(v.dtype), v, precision=precision)
    # Normalised after mixing: W numbers a query to divide instead of S.
    total = jnp.sum(weights, axis=-1, keepdims=True)
    if sinks is not None:
        total = total + jnp.exp(sink - highest)
    mixed = mixed / total
    return mixed.astype(q.dtype).transpose(0, 2, 1, 3, 4)


def _capped(scores, softcap):
    return scores if softcap is None else softcap * jnp.tanh(scores / softcap)

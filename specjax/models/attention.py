"""Grouped-query attention of a block of queries over the cache's slots."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float


def attend(
    q: Float[Array, "B T K G W"],
    k: Float[Array, "B K S W"],
    v: Float[Array, "B K S W"],
    seen: Bool[Array, "B T S"],
    precision: lax.Precision,
) -> Float[Array, "B T K G W"]:
    """softmax(q k / sqrt(W)) v over the slots that each query may see; softmax in float32."""
    scores = jnp.einsum(
        "btkgw,bksw->bktgs", q, k, precision=precision, preferred_element_type=jnp.float32
    )
    scores = scores * q.shape[-1] ** -0.5
    weights = jax.nn.softmax(jnp.where(seen[:, None, :, None, :], scores, -1e30), axis=-1)
    mixed = jnp.einsum("bktgs,bksw->bktgw", weights.astype(v.dtype), v, precision=precision)
    return mixed.transpose(0, 2, 1, 3, 4)

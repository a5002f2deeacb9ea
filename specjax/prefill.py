"""Forwarding prompts into a cache, in chunks of a fixed size: no trace knows their length."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from specjax.types import Cache, Context, Target


class Prefilled(NamedTuple):
    """A cache that holds the prompts, the logits after each, the tapped features of all tokens."""

    cache: Cache
    logits: Float[Array, "B V"]
    features: Float[Array, "B L F E"] | None


def prefill(
    target: Target,
    params: Any,
    prompt: Context,
    cache: Any,
    *,
    chunk: int,
    taps: tuple[int, ...] = (),
) -> Prefilled:
    """Forwards right-padded prompts of different lengths and commits them.

    Logits are computed for the last token of each row only. The cache needs ``chunk`` slots
    beyond the longest prompt: a row that is through goes on writing behind its end.
    """
    batch, buffer = prompt.tokens.shape
    tokens = jnp.pad(prompt.tokens, ((0, 0), (0, -buffer % chunk)))

    def forward(start, cache):
        block = lax.dynamic_slice_in_dim(tokens, start, chunk, axis=1)
        last = jnp.clip(prompt.length - 1 - start, 0, chunk - 1)
        return target(params, block, None, cache, logits_at=last, taps=taps)

    def ends_in(start):
        return (prompt.length > start) & (prompt.length <= start + chunk)

    def body(carry):
        start, cache, logits, features = carry
        out = forward(start, cache)
        count = jnp.clip(prompt.length - start, 0, chunk)
        logits = jnp.where(ends_in(start)[:, None], out.logits[:, 0], logits)
        if out.features is not None:
            features = lax.dynamic_update_slice_in_dim(features, out.features, start, axis=1)
        return start + chunk, out.cache.commit(None, count), logits, features

    shapes = jax.eval_shape(forward, jnp.int32(0), cache)
    logits = jnp.zeros((batch, shapes.logits.shape[-1]), shapes.logits.dtype)
    features = None
    if taps:
        wide = (batch, tokens.shape[1], *shapes.features.shape[2:])
        features = jnp.zeros(wide, shapes.features.dtype)
    longest = jnp.max(prompt.length)
    carry = (jnp.int32(0), cache, logits, features)
    _, cache, logits, features = lax.while_loop(lambda carry: carry[0] < longest, body, carry)
    return Prefilled(cache, logits, None if features is None else features[:, :buffer])

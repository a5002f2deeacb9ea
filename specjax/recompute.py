"""A target for models without a cache: the whole context is forwarded every round.

Slow and simple: the oracle that cached models are tested against, and the quickest way to
speculate with any function from tokens to logits.
"""

import typing
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Self

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Int

from specjax import tree
from specjax.types import TargetOutput


@typing.no_type_check
@struct.dataclass
class TokenCache:
    """The committed tokens themselves, in place of their KV."""

    tokens: Int[Array, "B S"]
    length: Int[Array, " B"]

    def write(self, tokens: Int[Array, "B T"]) -> Self:
        """Puts a block behind the committed tokens."""
        place = jax.vmap(lambda row, block, at: lax.dynamic_update_slice(row, block, (at,)))
        return replace(self, tokens=place(self.tokens, tokens, self.length))

    def commit(self, path: Int[Array, "B D"] | None, count: Int[Array, " B"]) -> Self:
        moved = self
        if path is not None:
            block = jnp.take_along_axis(self.tokens, self.length[:, None] + path, axis=1)
            moved = self.write(block)
        return replace(moved, length=self.length + count)

    def take(self, rows: Int[Array, " R"]) -> Self:
        return replace(self, tokens=self.tokens[rows], length=self.length[rows])

    def rollback(self, count: Int[ArrayLike, "*B"]) -> Self:
        return replace(self, length=jnp.maximum(self.length - count, 0))


@dataclass(frozen=True)
class Recompute:
    """A target from ``apply(params, tokens [B, S]) -> logits [B, S, V]``, causal, no cache.

    ``apply`` must be a module-level function or another hashable value: it is static under jit.
    """

    apply: Callable[[Any, Int[Array, "B S"]], Float[Array, "B S V"]]

    def init_cache(self, batch: int, slots: int) -> TokenCache:
        """No token committed, room for ``slots`` a row."""
        return TokenCache(
            tokens=jnp.zeros((batch, slots), jnp.int32), length=jnp.zeros((batch,), jnp.int32)
        )

    def __call__(self, params, tokens, parents, cache, *, logits_at=None, taps=()) -> TargetOutput:
        """See `specjax.types.Target`; has no layers to tap."""
        if taps:
            raise ValueError("Recompute has no layers to tap: use a target that hands out features")
        written = cache.write(tokens)
        forward = self._chain if parents is None else self._tree
        logits = forward(params, tokens, parents, written)
        if logits_at is not None:
            logits = jnp.take_along_axis(logits, logits_at[:, None, None], axis=1)
        return TargetOutput(logits, written, None)

    def _chain(self, params, tokens, parents, cache):
        logits = self.apply(params, cache.tokens)
        place = cache.length[:, None] + jnp.arange(tokens.shape[1])
        return jnp.take_along_axis(logits, place[:, :, None], axis=1)

    def _tree(self, params, tokens, parents, cache):
        nodes = tokens.shape[1]

        def lineage(node):
            path = jax.vmap(lambda row: tree.path_to(row, jnp.int32(node), nodes))(parents)
            context = cache.write(tree.take_path(tokens, path))
            logits = self.apply(params, context.tokens)
            place = cache.length + tree.depth(parents)[:, node]
            return jnp.take_along_axis(logits, place[:, None, None], axis=1)[:, 0]

        return jnp.stack([lineage(node) for node in range(nodes)], axis=1)

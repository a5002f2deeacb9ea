"""The static-shape KV cache, rolled back by masking.

Layout ``[Y, B, K, S, W]``, stacked over layers and carried: the one form that XLA copies nowhere
on TPU, GPU or CPU when it is donated and written in place at each row's own slot. The block being
verified lies at slots ``length .. length + T - 1``; it becomes history by a commit, and is
otherwise overwritten before anything could see it.
"""

import typing
from dataclasses import replace
from typing import Any, Self

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int

from specjax import tree


@typing.no_type_check
@struct.dataclass
class KVCache:
    """Keys and values of every layer, and the number of committed tokens of each row."""

    k: Float[Array, "Y B K S W"]
    v: Float[Array, "Y B K S W"]
    length: Int[Array, " B"]

    @classmethod
    def empty(
        cls, layers: int, batch: int, kv_heads: int, slots: int, width: int, dtype=jnp.float32
    ) -> Self:
        """No token committed, room for ``slots`` tokens a row."""
        shape = (layers, batch, kv_heads, slots, width)
        return cls(
            k=jnp.zeros(shape, dtype),
            v=jnp.zeros(shape, dtype),
            length=jnp.zeros((batch,), jnp.int32),
        )

    @property
    def slots(self) -> int:
        return self.k.shape[3]

    def axes(self) -> Any:
        """Logical axes of each array, for `specjax.sharding`: a KVCache of tuples of names."""
        kv: Any = ("layers", "rows", "kv_heads", "slots", "head")
        length: Any = ("rows",)
        return KVCache(k=kv, v=kv, length=length)

    def write(
        self, layer: Int[Array, ""] | int, k: Float[Array, "B K T W"], v: Float[Array, "B K T W"]
    ) -> Self:
        """Writes one layer's keys and values of a block behind the committed tokens."""
        return replace(
            self,
            k=_write_layer(self.k, layer, k, self.length),
            v=_write_layer(self.v, layer, v, self.length),
        )

    def layer(
        self, layer: Int[Array, ""] | int
    ) -> tuple[Float[Array, "B K S W"], Float[Array, "B K S W"]]:
        """All slots of one layer; `visible` tells which of them may be read."""
        return (
            lax.dynamic_index_in_dim(self.k, layer, 0, keepdims=False),
            lax.dynamic_index_in_dim(self.v, layer, 0, keepdims=False),
        )

    def commit(self, path: Int[Array, "B D"] | None, count: Int[Array, " B"]) -> Self:
        """Makes the first ``count`` nodes of ``path`` history; None is a chain, in place already.

        The nodes of a tree's path are moved to follow ``length``, a layer at a time: all layers
        at once would copy the whole cache every round.
        """
        moved = self if path is None else self._gather(self.length[:, None] + path)
        return replace(moved, length=self.length + count)

    def _gather(self, slots: Int[Array, "B D"]) -> Self:
        def move(cache, layer):
            k, v = cache.layer(layer)
            return cache.write(layer, _take_slots(k, slots), _take_slots(v, slots)), None

        return lax.scan(move, self, jnp.arange(self.k.shape[0]))[0]

    def take(self, rows: Int[Array, " R"]) -> Self:
        """The cache of other rows: row ``i`` goes on from what row ``rows[i]`` holds."""
        k, v = (jnp.take(part, rows, axis=1) for part in (self.k, self.v))
        return replace(self, k=k, v=v, length=self.length[rows])

    def rollback(self, count: Int[ArrayLike, "*B"]) -> Self:
        """Drops the last ``count`` tokens of each row, at most all of them."""
        return replace(self, length=jnp.maximum(self.length - count, 0))


# Writes of so many rows are written out one by one.
UNROLLED_ROWS = 8


def _write_layer(stacked, layer, block, start):
    """Puts a block [B, K, T, W] at each row's ``start``, in one layer of [Y, B, K, S, W].

    In each form XLA leaves the cache uncopied where that form is taken, and not elsewhere.
    """
    block = block.astype(stacked.dtype)
    if isinstance(layer, int):
        return _write_rows(stacked, layer, block, start)
    return lax.platform_dependent(
        stacked, layer, block, start, cpu=_write_taken_out, default=_write_scattered
    )


def _write_rows(stacked, layer, block, start):
    """Row by row: for a layer known while tracing, in an unrolled layer loop."""

    def write(row, stacked):
        place = (layer, row, 0, start[row], 0)
        return lax.dynamic_update_slice(stacked, block[row][None, None], place)

    rows = block.shape[0]
    # Each row written out is an operation a layer, which many rows make slow to compile.
    return lax.fori_loop(0, rows, write, stacked, unroll=rows <= UNROLLED_ROWS)


def _write_taken_out(stacked, layer, block, start):
    """Takes the layer out and puts it back: a CPU widens a 16-bit cache whole to scatter into."""
    rows = lax.dynamic_index_in_dim(stacked, layer, 0, keepdims=False)
    rows = jax.vmap(lambda row, new, at: lax.dynamic_update_slice(row, new, (0, at, 0)))(
        rows, block, start
    )
    return lax.dynamic_update_index_in_dim(stacked, rows, layer, 0)


def _write_scattered(stacked, layer, block, start):
    """Straight into the whole array: a layer taken out would be read and written whole.

    That doubles the time of a round on TPU. Heads are batch axes and no part of the window: with
    them inside, TPUs lay the cache out anew to write a single token.
    """
    start = jnp.broadcast_to(start[:, None], block.shape[:2])
    index = jnp.stack([jnp.broadcast_to(layer, start.shape), start], axis=-1)
    return lax.scatter(
        stacked,
        index,
        block,
        lax.ScatterDimensionNumbers(
            update_window_dims=(2, 3),
            inserted_window_dims=(0,),
            scatter_dims_to_operand_dims=(0, 3),
            operand_batching_dims=(1, 2),
            scatter_indices_batching_dims=(0, 1),
        ),
        indices_are_sorted=True,
        unique_indices=True,
        mode=lax.GatherScatterMode.CLIP,
    )


def _take_slots(rows: Float[Array, "B K S W"], slots: Int[Array, "B D"]) -> Float[Array, "B K D W"]:
    return jax.vmap(lambda row, at: jnp.take(row, at, axis=1))(rows, slots)


def positions(
    length: Int[Array, " B"], parents: Int[Array, "B T"] | None, block: int
) -> Int[Array, "B T"]:
    """Absolute position of each token of a block that follows ``length`` committed ones."""
    offset = jnp.arange(block)[None] if parents is None else tree.depth(parents)
    return length[:, None] + offset


def visible(
    length: Int[Array, " B"],
    parents: Int[Array, "B T"] | None,
    block: int,
    slots: int,
    window: Int[Array, ""] | int | None = None,
) -> Bool[Array, "B T S"]:
    """Which slots each token of a block may attend to.

    A token sees the committed slots and, inside the block, its ancestors and itself. With a
    ``window`` it sees only tokens less than ``window`` positions before its own.
    """
    slot = jnp.arange(slots)
    inside = slot[None] - length[:, None]
    if parents is None:
        seen = inside[:, None, :] <= jnp.arange(block)[None, :, None]
        slot_position = jnp.broadcast_to(slot[None], inside.shape)
    else:
        in_block = (inside >= 0) & (inside < block)
        node = jnp.clip(inside, 0, block - 1)
        lineage = jax.vmap(lambda reach, at: reach[:, at])(tree.ancestors(parents), node)
        seen = (inside < 0)[:, None, :] | (in_block[:, None, :] & lineage)
        node_depth = jnp.take_along_axis(tree.depth(parents), node, axis=1)
        slot_position = jnp.where(in_block, length[:, None] + node_depth, slot[None])
    if window is None:
        return seen
    query = positions(length, parents, block)
    return seen & (query[:, :, None] - slot_position[:, None, :] < window)

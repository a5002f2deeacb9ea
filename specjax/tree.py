"""Draft trees as parent indices: depth, ancestors, paths. A chain is the tree i -> i - 1."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from specjax.types import NO_PARENT, ROOT


def chain(batch: int, nodes: int) -> Int[Array, "{batch} {nodes}"]:
    """Parents of a full chain of ``nodes`` nodes with the root, for each of ``batch`` rows."""
    return jnp.broadcast_to(jnp.arange(nodes) - 1, (batch, nodes))


def padded_chain(drafted: Int[Array, " B"], nodes: int) -> Int[Array, "B {nodes}"]:
    """Parents of chains of which only the first ``drafted`` tokens below the root are real."""
    index = jnp.arange(nodes)
    return jnp.where(index[None] <= drafted[:, None], index[None] - 1, NO_PARENT)


def ancestors(parents: Int[Array, "*B N"]) -> Bool[Array, "*B N N"]:
    """Entry [i, j] says whether node j is node i or one of its ancestors."""
    nodes = parents.shape[-1]
    index = jnp.arange(nodes)
    reach = (parents[..., None] == index) | (index[:, None] == index)
    for _ in range(max(nodes - 1, 0).bit_length()):
        reach = jnp.any(reach[..., :, :, None] & reach[..., None, :, :], axis=-2)
    return reach


def reachable(parents: Int[Array, "*B N"]) -> Bool[Array, "*B N"]:
    """Which nodes a path from the root leads to; all others are padding."""
    return ancestors(parents)[..., ROOT]


def depth(parents: Int[Array, "*B N"]) -> Int[Array, "*B N"]:
    """Edges between each node and the top of its tree; the root's depth is 0."""
    return jnp.sum(ancestors(parents), axis=-1) - 1


def path_sum(reach: Bool[Array, "N N"], values: Array) -> Array:
    """For each node of one tree the sum of ``values`` [N] over its path, itself included.

    ``reach`` are the tree's `ancestors`.
    """
    return jnp.sum(jnp.where(reach, values[None, :], 0), axis=-1)


def siblings(parents: Int[Array, " N"]) -> Bool[Array, "N N"]:
    """Which nodes of one tree have the same parent; none where one of them has none."""
    return (parents[:, None] == parents) & (parents != NO_PARENT)


def has_child(parents: Int[Array, " N"]) -> Bool[Array, " N"]:
    """Which nodes of one tree are some node's parent."""
    return jnp.any(parents[:, None] == jnp.arange(parents.shape[0]), axis=0)


def path_to(parents: Int[Array, " N"], node: Int[Array, ""], size: int) -> Int[Array, " {size}"]:
    """The nodes from the root down to ``node``, padded with ``node`` to ``size`` entries."""
    reach = ancestors(parents)
    at_depth = reach[node] & ((jnp.sum(reach, axis=-1) - 1) == jnp.arange(size)[:, None])
    return jnp.where(jnp.any(at_depth, axis=-1), jnp.argmax(at_depth, axis=-1), node)


def longest_path(
    parents: Int[Array, " N"], stands: Bool[Array, " N"]
) -> tuple[Int[Array, ""], Int[Array, ""]]:
    """The deepest node all of whose path below the root ``stands``, and its depth.

    Siblings are distinct tokens, so at most one path of each depth can stand.
    """
    reach = ancestors(parents)
    stands = stands.at[ROOT].set(True)
    whole = reach[:, ROOT] & jnp.all(stands | ~reach, axis=-1)
    level = jnp.where(whole, jnp.sum(reach, axis=-1) - 1, -1)
    node = jnp.argmax(level)
    return node, level[node]


def take_path(values: Array, path: Int[Array, "B D"]) -> Array:
    """Picks the nodes of each row's path out of an array [B, N, ...]."""
    return jax.vmap(lambda row, nodes: row[nodes])(values, path)

"""Weights kept as small integers and scales, rounded to nearest; activations stay floats.

``int8``: -127 to 127, one scale an output channel (absmax, Dettmers et al., arXiv 2208.07339).
``int4``: -8 to 7, one scale for every group of inputs of an output channel (round-to-nearest by
groups, the baseline of Frantar et al., arXiv 2210.17323). The scale takes the sign that puts a
group's largest weight at -8: all sixteen codes are in use, which halves the loss of -7 to 7.
Embedding and head are int8 in both, one scale a token. What is not a matrix stays as it is.
"""

import functools
import math
import typing
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax
from jaxtyping import Array, Float, Int

from specjax.sharding import MESH_AXIS

SCHEMES = ("int8", "int4")
# Inputs that share a scale at most, 4.25 bits a weight with its 16. A TPU tiles int4 by 64 rows,
# and only groups that are whole tiles are turned to floats on their way to the matrix unit.
GROUP = 64
# The scales of much smaller groups would take more than they are worth.
SMALLEST_GROUP = 16

Contract = tuple[tuple[int, ...], tuple[int, ...]]

# Logical axes that a product sums over, for each parameter that is quantised.
CONTRACTED = {
    "embed": ("embed",),
    "head": ("embed",),
    "qkv": ("embed",),
    "out": ("kv_heads", "group", "head"),
    "gate_up": ("embed",),
    "up": ("embed",),
    "down": ("mlp",),
    "experts_gate_up": ("embed",),
    "experts_down": ("mlp",),
}
ENDS = ("embed", "head")


@typing.no_type_check
@struct.dataclass
class Quantised:
    """A matrix as ``values * scales``; a parameter that takes an array's place in the tree.

    By channels (int8): ``values`` has the matrix's shape, ``scales`` (float32) that of the outputs.
    ``grouped`` (int4): the last contracted axis of ``values`` is split into groups and members,
    and ``scales`` (bfloat16) has all these axes but the members'.
    """

    values: Int[Array, "*S"]
    scales: Float[Array, "*Z"]
    grouped: bool = struct.field(pytree_node=False, default=False)

    def __getitem__(self, index) -> "Quantised":
        """Of a stack: one layer's, or all of it with ``...``."""
        return jax.tree.map(lambda part: part[index], self)

    def __iter__(self) -> Iterator["Quantised"]:
        for values, scales in zip(self.values, self.scales, strict=True):
            yield replace(self, values=values, scales=scales)

    def operands(self, x: Array, contract: Contract) -> tuple[Array, Array, Contract, Any]:
        """What to multiply to get x times the matrix: (x, floats like x, contracted axes of both),
        and the scales of the product, or None.
        """
        if not self.grouped:
            return x, self.values.astype(x.dtype), contract, self.scales
        ours, its = contract
        groups, members = self.values.shape[its[-1] : its[-1] + 2]
        wide = self._wide(its[-1], x.dtype)
        x = x.reshape(*x.shape[:-1], groups, members)
        return x, wide, ((*ours, ours[-1] + 1), (*its, its[-1] + 1)), None

    def ungrouped(self, axis: int, dtype: Any) -> tuple[Array, Array | None]:
        """Floats in the matrix's own shape, of which ``axis`` is contracted last, and the scales of
        a product with them, or None.
        """
        if not self.grouped:
            return self.values.astype(dtype), self.scales
        wide = self._wide(axis, dtype)
        return wide.reshape(*wide.shape[:axis], -1, *wide.shape[axis + 2 :]), None

    def _wide(self, axis: int, dtype: Any) -> Array:
        scales = jnp.expand_dims(self.scales, axis + 1)
        return (self.values.astype(jnp.float32) * scales).astype(dtype)

    def rows(self, index: Int[Array, "B T"]) -> Float[Array, "B T E"]:
        """Rows of a matrix with one scale a row; ids out of range are cut to the nearest."""
        if index.size == 1:
            # A single row a TPU takes by a slice, and lays the whole matrix out anew for it.
            return self.rows(lax.optimization_barrier(jnp.tile(index, 2)))[:, :1]
        values, scales = (
            jnp.take(part, index, axis=0, mode="clip") for part in (self.values, self.scales)
        )
        return values * scales[..., None]


def check_scheme(quantization: str | None) -> None:
    """Raises ValueError for a name that is no scheme."""
    if quantization is not None and quantization not in SCHEMES:
        raise ValueError(
            f"quantization {quantization!r} is not known; choose {', '.join(SCHEMES)} or None"
        )


def quantised_axes(axes: Mapping[str, Any], quantization: str | None) -> dict[str, Any]:
    """Logical axes of the parameters once they are quantised, from those of the plain ones.

    Scales are split over devices as the matrix is. A group's members are called what their axis
    is, or ``member`` where that is split: its groups are, and no array is split twice one way.
    """

    def turn(name, own: Any, scheme):
        if scheme == "int8":
            outputs: Any = tuple(axis for axis in own if axis not in CONTRACTED[name])
            return Quantised(values=own, scales=outputs)
        place = own.index(CONTRACTED[name][-1]) + 1
        member = "member" if own[place - 1] in MESH_AXIS else own[place - 1]
        values: Any = (*own[:place], member, *own[place:])
        return Quantised(values=values, scales=own, grouped=True)

    return _turned(axes, axes, quantization, turn)


def quantise(
    params: Mapping[str, Any], axes: Mapping[str, Any], quantization: str | None
) -> dict[str, Any]:
    """Parameters with their matrices quantised; ``axes`` are the plain parameters' logical axes.

    NumPy arrays stay on the host, in blocks; anything else may be traced. Raises ValueError for an
    axis that cannot be grouped; faulty values are `refuse_faults`' to find.
    """

    def turn(name, own, scheme, weight):
        # Counted from the end, where no block is cut.
        contracted = tuple(own.index(axis) - len(own) for axis in CONTRACTED[name])
        if scheme == "int8":
            return _in_blocks(functools.partial(_by_channel, contracted), weight, contracted[0])
        grouped = contracted[-1]
        groups = _groups(name, weight.shape[grouped])
        return _in_blocks(functools.partial(_by_group, grouped, groups), weight, grouped)

    return _turned(params, axes, quantization, turn)


def refuse_faults(params: Mapping[str, Any]) -> None:
    """Raises ValueError that names the first matrix with a NaN or an infinite value."""
    leaves = jax.tree_util.tree_leaves_with_path(params, is_leaf=_is_quantised)
    for path, leaf in leaves:
        # A channel with such a value has the scale NaN.
        if _is_quantised(leaf) and not bool(_module_of(leaf.scales).isfinite(leaf.scales).all()):
            name = ".".join(str(step.key) for step in path)
            raise ValueError(
                f"{name} has NaN or infinite values, which have no place on an integer grid: use "
                "the model without quantization, or mend the checkpoint"
            )


def held(params: Mapping[str, Any], platform: str) -> dict[str, Any]:
    """Quantised parameters in the integers that this platform multiplies.

    Accelerators read int4 packed. A CPU keeps each in a byte, and XLA would first copy the whole
    stack to int8.
    """
    if platform == "cpu":
        return dict(params)

    def narrow(leaf):
        if not (_is_quantised(leaf) and leaf.grouped):
            return leaf
        return replace(leaf, values=leaf.values.astype(jnp.int4))

    return jax.tree.map(narrow, params, is_leaf=_is_quantised)


def _turned(tree, axes, quantization, turn):
    """``tree`` with ``turn(name, axes, scheme, leaf)`` in the place of every matrix."""
    if quantization is None:
        return dict(tree)
    turned = {}
    for name, own in axes.items():
        given = () if tree is axes else (tree[name],)
        if isinstance(own, Mapping):
            turned[name] = _turned(tree[name], own, quantization, turn)
        elif name in CONTRACTED:
            turned[name] = turn(name, own, "int8" if name in ENDS else quantization, *given)
        else:
            turned[name] = tree[name]
    return turned


def _groups(name: str, size: int) -> int:
    """The least number of equal groups of at most ``GROUP`` inputs."""
    for groups in range(math.ceil(size / GROUP), size // SMALLEST_GROUP + 1):
        if size % groups == 0:
            return groups
    if size <= GROUP:
        return 1
    raise ValueError(
        f"{name} cannot be quantised to int4: no group of {SMALLEST_GROUP} to {GROUP} divides its "
        f"{size} inputs; choose int8"
    )


def _by_channel(contracted, xp, weight) -> Quantised:
    wide = weight.astype(xp.float32)
    largest = xp.max(xp.abs(wide), axis=contracted, keepdims=True)
    scales = _marked(xp, wide, contracted, largest * xp.float32(1 / 127))
    scales, inverse = _inverse(xp, scales)
    values = xp.rint(wide * inverse).astype(xp.int8)
    return Quantised(values, xp.squeeze(scales, axis=contracted))


def _by_group(axis, groups, xp, weight) -> Quantised:
    shape, axis = weight.shape, axis % weight.ndim
    split = (*shape[:axis], groups, shape[axis] // groups, *shape[axis + 1 :])
    wide = weight.astype(xp.float32).reshape(split)
    low, high = (pick(wide, axis=axis + 1, keepdims=True) for pick in (xp.min, xp.max))
    largest = xp.where(high > -low, high, low)
    scales = _marked(xp, wide, axis + 1, largest / xp.float32(-8)).astype(jnp.bfloat16)
    scales, inverse = _inverse(xp, scales)
    values = xp.clip(xp.rint(wide * inverse), -8, 7).astype(xp.int8)
    return Quantised(values, xp.squeeze(scales, axis=axis + 1), grouped=True)


def _marked(xp, wide, axis, scales):
    """NaN for a channel with a NaN or an infinite value: a compiler's maximum may pass by it."""
    sound = xp.all(xp.isfinite(wide), axis=axis, keepdims=True)
    return xp.where(sound, scales, xp.float32(np.nan))


def _inverse(xp, scales):
    """Scales, 0 where their inverse has no float, and these inverses, any there.

    Multiplied and not divided by: a compiler would do so itself, and NumPy not, for other values.
    """
    wide = scales.astype(xp.float32)
    vanishing = xp.abs(wide) < np.finfo(np.float32).tiny
    inverse = xp.float32(1) / xp.where(vanishing, xp.float32(1), wide)
    return xp.where(vanishing, xp.zeros_like(scales), scales), inverse


def _in_blocks(quantised, weight, first, most: int = 1 << 20) -> Quantised:
    """On the host some entries of the axes before ``first`` at a time, so that no float copy of all
    is made; a compiler sees to that itself.
    """
    if not isinstance(weight, np.ndarray):
        return quantised(jnp, weight)
    before, own = weight.shape[:first], weight.shape[first:]
    flat = weight.reshape(-1, *own)
    step = max(1, most // max(1, math.prod(own)))
    with np.errstate(invalid="ignore"):  # `refuse_faults` says it by name
        blocks = [quantised(np, flat[start : start + step]) for start in range(0, len(flat), step)]
    return jax.tree.map(
        lambda *parts: np.concatenate(parts).reshape(*before, *parts[0].shape[1:]), *blocks
    )


def _module_of(array):
    return np if isinstance(array, np.ndarray) else jnp


def _is_quantised(node) -> bool:
    return isinstance(node, Quantised)

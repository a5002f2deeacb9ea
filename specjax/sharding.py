"""From logical axes to a device mesh: where parameters, cache and loop state live.

Every array names its axes once (`KVCache.axes`, `DecoderTarget.parameter_axes`); the table below
says which mesh axis each one is split over. Rows go to ``data``; vocabulary, KV heads and MLP
columns to ``model``.
"""

import warnings
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

MESH_AXIS = {"rows": "data", "vocab": "model", "kv_heads": "model", "mlp": "model"}


def make_mesh(data: int = 1, model: int = 1) -> Mesh:
    """A mesh of ``data`` x ``model`` devices, with automatic sharding propagation."""
    available = len(jax.devices())
    if data * model > available:
        raise ValueError(f"a {data}x{model} mesh needs {data * model} devices, {available} found")
    devices = jax.devices()[: data * model]
    types = (AxisType.Auto, AxisType.Auto)
    return jax.make_mesh((data, model), ("data", "model"), axis_types=types, devices=devices)


def sharding(mesh: Mesh, axes: tuple[str, ...], shape: tuple[int, ...]) -> NamedSharding:
    """Where an array with these logical axes lives.

    An axis that its mesh axis does not divide is replicated; for KV heads, whose replicas cost
    memory on every device, with a warning.
    """
    parts = []
    for axis, size in zip(axes, shape, strict=False):
        name = MESH_AXIS.get(axis)
        ways = dict(mesh.shape).get(name, 1)
        if ways > 1 and size % ways == 0:
            parts.append(name)
            continue
        if axis == "kv_heads" and ways > 1:
            warnings.warn(
                f"{size} KV heads cannot be split over {ways} devices of the mesh axis 'model': "
                "they are replicated. Use a 'model' axis that divides them to save memory.",
                stacklevel=2,
            )
        parts.append(None)
    return NamedSharding(mesh, PartitionSpec(*parts))


def parameter_shardings(mesh: Mesh, axes: Any, params: Any) -> Any:
    """Shardings of a parameter tree from the logical axes of its leaves."""
    return jax.tree.map(
        lambda names, leaf: sharding(mesh, names, leaf.shape), axes, params, is_leaf=_is_axes
    )


def row_shardings(mesh: Mesh, tree: Any) -> Any:
    """Shardings of anything with a row a leading entry: state, request, tokens.

    A subtree that declares its own logical axes with ``axes()`` (a cache) is placed by those.
    """

    def place(node):
        if not hasattr(node, "axes"):
            return sharding(mesh, ("rows",), node.shape)
        return jax.tree.map(
            lambda names, leaf: sharding(mesh, names, leaf.shape),
            node.axes(),
            node,
            is_leaf=_is_axes,
        )

    return jax.tree.map(place, tree, is_leaf=lambda node: hasattr(node, "axes"))


def _is_axes(node) -> bool:
    return isinstance(node, tuple) and all(isinstance(name, str) for name in node)

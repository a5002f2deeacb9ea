"""From logical axes to a device mesh: where parameters, cache and loop state live.

Every array names its axes once (`KVCache.axes`, `DecoderTarget.parameter_axes`); the table below
says which mesh axis each one is split over. Rows go to ``data``; vocabulary, KV heads and MLP
columns to ``model``. Experts are split like an MLP, by their columns: every device has a part of
each, so that no token has to travel.
"""

import warnings
from typing import Any

import jax
from jax.experimental.layout import Format, Layout
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from specjax.sampling_params import require_integer

MESH_AXES = ("data", "model")
MESH_AXIS = {"rows": "data", "vocab": "model", "kv_heads": "model", "mlp": "model"}


def make_mesh(data: int = 1, model: int = 1) -> Mesh:
    """A mesh of ``data`` x ``model`` devices, with automatic sharding propagation."""
    for name, size in (("data", data), ("model", model)):
        require_integer(name, size, at_least=1)
    available = len(jax.devices())
    if data * model > available:
        raise ValueError(f"a {data}x{model} mesh needs {data * model} devices, {available} found")
    devices = jax.devices()[: data * model]
    types = (AxisType.Auto, AxisType.Auto)
    return jax.make_mesh((data, model), MESH_AXES, axis_types=types, devices=devices)


def check_mesh(mesh: Mesh) -> None:
    """Refuses a mesh over which nothing would be split, or not as this package does it."""
    if not isinstance(mesh, Mesh | AbstractMesh):
        raise ValueError(f"mesh is {mesh!r}: make one with specjax.sharding.make_mesh(data, model)")
    unknown = [name for name in mesh.axis_names if name not in MESH_AXES and mesh.shape[name] > 1]
    if unknown:
        raise ValueError(
            f"the mesh has an axis {unknown[0]!r}: rows are split over 'data', heads and "
            "vocabulary over 'model'; make it with specjax.sharding.make_mesh(data, model)"
        )
    if any(kind != AxisType.Auto for kind in mesh.axis_types):
        raise ValueError(
            "the mesh's axes are not of type Auto, jax.make_mesh's default: make it with "
            "specjax.sharding.make_mesh(data, model)"
        )


def sharding(
    mesh: Mesh | AbstractMesh, axes: tuple[str, ...], shape: tuple[int, ...]
) -> NamedSharding:
    """Where an array with these logical axes lives; axes that are not named are not split.

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


def replicated(mesh: Mesh) -> NamedSharding:
    """A whole copy on every device."""
    return NamedSharding(mesh, PartitionSpec())


def parameter_shardings(mesh: Mesh | AbstractMesh, axes: Any, params: Any) -> Any:
    """Shardings of a parameter tree from the logical axes of its leaves."""
    return jax.tree.map(
        lambda names, leaf: sharding(mesh, names, leaf.shape), axes, params, is_leaf=_is_axes
    )


def parameter_formats(mesh: Mesh, axes: Any, params: Any) -> Any:
    """Shardings of a parameter tree, on TPU with the layout in memory that its matrix unit reads.

    Programs take the layout of the parameters they are given; from another one they would make a
    copy of their own at every call.
    """
    if mesh.devices.flat[0].platform != "tpu":
        return parameter_shardings(mesh, axes, params)
    return jax.tree.map(
        lambda names, leaf: Format(tpu_layout(names), sharding(mesh, names, leaf.shape)),
        axes,
        params,
        is_leaf=_is_axes,
    )


def tpu_layout(axes: tuple[str, ...]) -> Layout | None:
    """Order in memory of an array with these logical axes, None for whatever XLA takes.

    A TPU tiles the last two axes, which should be long: the contracted one and the last. Fused
    projections, which stand between these, come before both. Groups of int4 weights it multiplies
    side by side, their members before them; not so experts', of which it takes slices.
    """
    if "member" in axes and "experts" in axes:
        return Layout(tuple(range(len(axes))))
    if "member" in axes:
        member = axes.index("member")
        return Layout((*range(member - 1), member, member - 1, *range(member + 1, len(axes))))
    if "embed" not in axes[:-2]:
        return None
    order = sorted(range(len(axes) - 1), key=lambda place: axes[place] == "embed")
    return Layout((*order, len(axes) - 1))


def row_shardings(mesh: Mesh, tree: Any) -> Any:
    """Shardings of anything with a row a leading entry: state, request, tokens.

    A subtree that declares its own logical axes with ``axes()`` (a cache) is placed by those.
    """

    def place(node):
        if not hasattr(node, "axes"):
            return sharding(mesh, ("rows",), node.shape)
        return parameter_shardings(mesh, node.axes(), node)

    return jax.tree.map(place, tree, is_leaf=lambda node: hasattr(node, "axes"))


def _is_axes(node) -> bool:
    return isinstance(node, tuple) and all(isinstance(name, str) for name in node)

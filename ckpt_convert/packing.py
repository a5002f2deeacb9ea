"""Quantised parameters at rest: plain dicts of arrays, two int4 in a byte.

The two are the same place of two layers that follow each other: the layers' axis is the one that
every quantised matrix of a layer has and that is never split over devices.
"""

import functools
import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ckpt_convert.errors import ConversionError
from ckpt_convert.tensors import Placement, place
from specjax.models.decoder import DecoderConfig, parameter_axes
from specjax.models.quantised import Quantised, quantise, refuse_faults

PARTS = {"values", "scales"}


def place_quantised(
    read: Callable[[str], np.ndarray],
    placements: Iterable[Placement],
    config: DecoderConfig,
    dtype: np.dtype,
    scheme: str,
) -> dict[str, Any]:
    """`tensors.place` for one parameter at a time, quantised and packed before the next is read.

    Parameters of ``dtype`` come in `by_parameter`'s order. Raises ``ConversionError`` for weights
    that cannot be quantised.
    """
    axes = parameter_axes(config, stacked=True)
    made: dict[str, Any] = {}
    for path, group in itertools.groupby(placements, key=lambda one: one.rule.path):
        # What is allocated and not filled takes no memory.
        plain = _alone(place(read, group, config, dtype), path)
        try:
            turned = quantise(plain, _alone(axes, path), scheme)
            refuse_faults(turned)
        except ValueError as fault:
            raise ConversionError(str(fault)) from None
        _add(made, at_rest(turned))
    return made


def by_parameter(placements: Iterable[Placement]) -> list[Placement]:
    """All tensors of a parameter after each other."""
    return sorted(placements, key=lambda one: one.rule.path)


def _alone(tree: Any, path: tuple[str, ...]) -> Any:
    return {path[0]: _alone(tree[path[0]], path[1:])} if path else tree


def _add(tree: dict[str, Any], other: Mapping[str, Any]) -> None:
    for name, inner in other.items():
        if isinstance(inner, Mapping) and name in tree:
            _add(tree[name], inner)
        else:
            tree[name] = inner


def stored_shapes(abstract: Any, config: DecoderConfig, scheme: str | None) -> Any:
    """Shapes and types at rest of parameters with these shapes and types when plain."""
    axes = parameter_axes(config, stacked=True)
    return jax.eval_shape(lambda plain: at_rest(quantise(plain, axes, scheme)), abstract)


def at_rest(params: Any) -> Any:
    """Quantised parameters as dicts, those by groups (int4) packed."""

    def pack(leaf):
        if not (isinstance(leaf, Quantised) and leaf.grouped):
            return leaf
        return replace(leaf, values=_packed(leaf.values))

    return as_dicts(jax.tree.map(pack, params, is_leaf=_is_quantised))


def as_dicts(tree: Any) -> Any:
    """A tree with a dict in the place of every quantised parameter."""
    return jax.tree.map(
        lambda leaf: (
            {"values": leaf.values, "scales": leaf.scales} if isinstance(leaf, Quantised) else leaf
        ),
        tree,
        is_leaf=_is_quantised,
    )


def in_use(tree: Any, layers: int) -> Any:
    """What `at_rest` was made from."""
    if not isinstance(tree, Mapping):
        return tree
    if set(tree) == PARTS:
        values, scales = tree["values"], tree["scales"]
        if values.dtype == jnp.uint8:
            return Quantised(_unpacked(values, layers), scales, grouped=True)
        return Quantised(values, scales)
    return {name: in_use(inner, layers) for name, inner in tree.items()}


def _packed(values: Any) -> Any:
    xp = np if isinstance(values, np.ndarray) else jnp
    if len(values) % 2:
        values = xp.concatenate([values, xp.zeros_like(values[:1])])
    low, high = (values[start::2].astype(xp.uint8) & xp.uint8(15) for start in (0, 1))
    return low | (high << xp.uint8(4))


@functools.partial(jax.jit, static_argnums=1)
def _unpacked(packed: jax.Array, layers: int) -> jax.Array:
    both = jax.lax.bitcast_convert_type(packed, jnp.int8)
    # Shifted to the right as signed integers, which brings the sign along.
    pairs = jnp.stack([(both << 4) >> 4, both >> 4], axis=1)
    return pairs.reshape(-1, *packed.shape[1:])[:layers]


def _is_quantised(node: Any) -> bool:
    return isinstance(node, Quantised)

"""Quantised parameters at rest: plain dicts of arrays, two int4 in a byte.

The two are the same place of two layers that follow each other: the layers' axis is the one that
every quantised matrix of a layer has and that is never split over devices.
"""

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ckpt_convert.errors import ConversionError
from ckpt_convert.tensors import Placement, fill_all, leaf, parameter_shapes
from specjax.models.decoder import DecoderConfig, parameter_axes
from specjax.models.quantised import Quantised, quantise, refuse_faults

PARTS = {"values", "scales"}
# Rows of an embedding or a head that are read and quantised at a time.
ROWS = 1024


def place_quantised(
    read: Callable[..., np.ndarray],
    placements: Iterable[Placement],
    config: DecoderConfig,
    dtype: np.dtype,
    scheme: str,
) -> dict[str, Any]:
    """`tensors.place`, but quantised and packed piece by piece: no parameter is whole in floats.

    ``read`` takes a tensor's name and, of one that is read in pieces, its rows. Placements come in
    `by_parameter`'s order; floats are rounded to ``dtype`` first. Raises ``ConversionError`` for
    weights that cannot be quantised.
    """
    axes, shapes = parameter_axes(config, stacked=True), parameter_shapes(config)
    made: dict[str, Any] = {}
    for path, group in itertools.groupby(placements, key=lambda one: one.rule.path):
        own, shape = leaf(axes, path), leaf(shapes, path)
        for start, plain in _pieces(read, group, config, shape, dtype):
            try:
                turned = quantise(_nested(path, plain), _nested(path, own), scheme)
                refuse_faults(turned)
            except ValueError as fault:
                raise ConversionError(str(fault)) from None
            _put(made, at_rest(turned), start, shape[0])
    return made


def by_parameter(placements: Iterable[Placement]) -> list[Placement]:
    """All tensors of a parameter after each other, layer by layer."""
    return sorted(placements, key=lambda one: (one.rule.path, one.index[:1]))


def _pieces(
    read: Callable[..., np.ndarray],
    placements: Iterable[Placement],
    config: DecoderConfig,
    shape: tuple[int, ...],
    dtype: np.dtype,
) -> Iterator[tuple[int, np.ndarray]]:
    """Parts of a parameter's first axis, with their start: two layers, or some of an end's rows."""
    for pair, group in itertools.groupby(placements, key=_pair):
        if pair is None:
            for one in group:
                yield from _rows(read, one, config, shape, dtype)
            continue
        start = 2 * pair
        plain = np.empty((min(2, shape[0] - start), *shape[1:]), dtype)

        def target(one, plain=plain, start=start):
            return plain[(one.index[0] - start, *one.index[1:])]

        fill_all(read, group, config, target)
        yield start, plain


def _pair(one: Placement) -> int | None:
    """Which two layers it belongs to, None where it is no layer's."""
    return one.index[0] // 2 if one.index else None


def _rows(
    read: Callable[..., np.ndarray],
    one: Placement,
    config: DecoderConfig,
    shape: tuple[int, ...],
    dtype: np.dtype,
) -> Iterator[tuple[int, np.ndarray]]:
    for start in range(0, shape[0], ROWS):
        rows = slice(start, min(start + ROWS, shape[0]))
        plain = np.empty((rows.stop - start, *shape[1:]), dtype)
        fill_all(functools.partial(read, rows=rows), [one], config, lambda _, plain=plain: plain)
        yield start, plain


def _nested(path: tuple[str, ...], value: Any) -> Any:
    return {path[0]: _nested(path[1:], value)} if path else value


def _put(made: dict[str, Any], piece: Mapping[str, Any], start: int, length: int) -> None:
    """Write a piece into the whole arrays, which are made where it is the first."""
    for name, part in piece.items():
        if isinstance(part, Mapping):
            _put(made.setdefault(name, {}), part, start, length)
            continue
        together = 2 if part.dtype == np.uint8 else 1  # layers that share a byte
        if name not in made:
            made[name] = np.empty((-(-length // together), *part.shape[1:]), part.dtype)
        made[name][start // together :][: len(part)] = part


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

"""The floats that quantised weights stand for."""

import functools

import jax
import numpy as np

from specjax.models.decoder import parameter_axes
from specjax.models.quantised import CONTRACTED, Quantised


def is_quantised(node) -> bool:
    return isinstance(node, Quantised)


def restored(weight, axes: tuple[str, ...], contracted: tuple[str, ...]) -> np.ndarray:
    """The matrix that is computed with, in its own shape."""
    places = [axes.index(axis) for axis in contracted]
    values, scales = (np.asarray(part, np.float64) for part in (weight.values, weight.scales))
    if not weight.grouped:
        return values * np.expand_dims(scales, places)
    last = places[-1]
    shape = (*values.shape[:last], -1, *values.shape[last + 2 :])
    return (values * np.expand_dims(scales, last + 1)).reshape(shape)


def restored_params(params, config):
    axes = parameter_axes(config, stacked=True)

    def restore(path, leaf):
        if not is_quantised(leaf):
            return leaf
        own = functools.reduce(lambda tree, step: tree[step.key], path, axes)
        return restored(leaf, own, CONTRACTED[path[-1].key])

    return jax.tree_util.tree_map_with_path(restore, params, is_leaf=is_quantised)

"""Values that a user gives for rows, as arrays; what does not fit is refused by its name.

Types and shapes are looked at under a caller's ``jit`` too, values only where they are `known`.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Float, Int

from specjax.types import NO_TOKEN

INT32_MAX = np.iinfo(np.int32).max


def integers(name: str, value: Any) -> Int[Array, "..."]:
    """``value`` as int32; raises ValueError unless it is of integers that fit there."""
    found = _array(name, value)
    if found.size and not jnp.issubdtype(found.dtype, jnp.integer):
        raise ValueError(f"{name} is of type {found.dtype}: give integers")
    fits = np.can_cast(found.dtype, np.int32)
    if not fits and (abs(known(found).astype(np.float64)) > INT32_MAX).any():
        raise ValueError(f"{name} is of numbers beyond 32 bits: give at most {INT32_MAX}")
    return jnp.asarray(found, jnp.int32)


def numbers(name: str, value: Any) -> Float[Array, "..."]:
    """``value`` as float32; raises ValueError unless it is of numbers."""
    found = _array(name, value)
    kinds = (jnp.integer, jnp.floating)
    if not any(jnp.issubdtype(found.dtype, kind) for kind in kinds):
        raise ValueError(f"{name} is of type {found.dtype}: give numbers")
    return jnp.asarray(found, jnp.float32)


def of_rows(name: str, value: Array, rows: int, axes: str = "") -> Array:
    """``value`` for each row, from one for all or one a row; ``axes`` names those of one row."""
    own = axes.split()
    leading = value.shape[: value.ndim - len(own)]
    if value.ndim < len(own) or leading not in ((), (1,), (rows,)):
        wanted = f"[{', '.join(own)}]" if own else "one value"
        each = f"[{', '.join([str(rows), *own])}]"
        raise ValueError(
            f"{name} has the shape {list(value.shape)}: give {wanted} for all rows, or {each}"
        )
    return jnp.broadcast_to(value, (rows, *value.shape[len(leading) :]))


def known(value: Any) -> np.ndarray:
    """The values on the host: none, so that no check fails, where they are traced or elsewhere."""
    if isinstance(value, Tracer) or not getattr(value, "is_fully_addressable", True):
        return np.empty((0, *value.shape[1:]), value.dtype)
    return np.asarray(value)


def check_ids(name: str, ids: Any, vocabulary: int, lowest: int = 0) -> None:
    """Raises ValueError for an id that the vocabulary lacks; ``lowest`` is -1 where that pads."""
    ids = known(ids)
    wrong = ids[(ids < lowest) | (ids >= vocabulary)]
    if wrong.size:
        padding = ", and -1 pads" if lowest == NO_TOKEN else ""
        raise ValueError(
            f"{name} has the id {wrong[0]}: the vocabulary has {vocabulary}, 0 to "
            f"{vocabulary - 1}{padding}"
        )


def _array(name, value):
    if isinstance(value, jax.Array):
        return value
    traced = any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(value))
    try:
        return jnp.asarray(value) if traced else np.asarray(value)
    except ValueError:
        raise ValueError(f"{name} has parts of different lengths: pad them to one") from None

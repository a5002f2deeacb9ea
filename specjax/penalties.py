"""Repetition, presence and frequency penalties.

Keskar et al., "CTRL", arXiv 1909.05858, for the first; the other two as OpenAI's completions
define them. Repetition looks at prompt and output, the others at the output alone, like vLLM.
"""

import typing
from typing import Self

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float

from specjax.row_values import numbers, of_rows
from specjax.types import NO_TOKEN


@typing.no_type_check
@struct.dataclass
class Penalties:
    """Strengths, a row each; 1, 0 and 0 leave the logits as they are."""

    repetition: Float[Array, " B"]
    presence: Float[Array, " B"]
    frequency: Float[Array, " B"]

    @classmethod
    def create(cls, batch: int, *, repetition=1.0, presence=0.0, frequency=0.0) -> Self:
        """Penalties for ``batch`` rows, from scalars or one value a row."""

        def rows(name, value):
            return of_rows(name, numbers(name, value), batch)

        return cls(
            rows("repetition_penalty", repetition),
            rows("presence_penalty", presence),
            rows("frequency_penalty", frequency),
        )


def penalise(penalties: Penalties, logits: Float[Array, "B N V"], history) -> Float[Array, "B N V"]:
    """Logits after the penalties for what each node's `specjax.history.History` holds."""
    counts, prompted = history.seen.counts[:, None], history.seen.prompted[:, None]
    strength = [part.astype(logits.dtype)[:, None, None] for part in _parts(penalties)]
    committed = _penalised(strength, logits, counts, prompted)
    path = history.path
    if path.shape[-1] == 0:
        return committed
    return _on_path(strength, logits, committed, counts, prompted, path)


def _on_path(strength, logits, committed, counts, prompted, path):
    """The values at the tokens of each node's own path once more, with these counted too."""
    batch, nodes, _ = path.shape
    vocabulary = logits.shape[-1]
    drafted = path != NO_TOKEN
    ids = jnp.where(drafted, path, 0)
    own = jnp.sum((path[..., :, None] == path[..., None, :]) & drafted[..., None, :], axis=-1)

    def at_ids(values):
        wide = jnp.broadcast_to(values, (batch, nodes, vocabulary))
        return jnp.take_along_axis(wide, ids, axis=-1)

    row = jnp.arange(batch)[:, None, None]
    counted = counts[row, 0, ids] + own
    value = _penalised(strength, at_ids(logits), counted, prompted[row, 0, ids])
    column = jnp.where(drafted, path, vocabulary)
    return committed.at[row, jnp.arange(nodes)[None, :, None], column].set(value, mode="drop")


def _parts(penalties):
    return penalties.repetition, penalties.presence, penalties.frequency


def _penalised(strength, logits, counts, prompted):
    repetition, presence, frequency = strength
    scaled = jnp.where(logits > 0, logits / repetition, logits * repetition)
    logits = jnp.where((counts > 0) | prompted, scaled, logits)
    return logits - frequency * counts - jnp.where(counts > 0, presence, 0.0)

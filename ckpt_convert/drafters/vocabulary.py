"""A reduced draft vocabulary: which of the target's ids each draft id stands for."""

import numpy as np

from ckpt_convert.errors import ConversionError

OFFSETS, MASK = "d2t", "t2d"


def draft_to_target(
    offsets: np.ndarray | None, mask: np.ndarray | None, draft_vocab_size: int, vocab_size: int
) -> np.ndarray | None:
    """The target's id of each draft id [Vd], int32; None where both vocabularies are the same.

    ``offsets`` [Vd] is what is added to a draft id (0 everywhere: the same ids), ``mask`` [V] marks
    the target's ids that have a draft id. Raises ``ConversionError`` where they are missing,
    misshapen or contradict each other.
    """
    if offsets is None:
        if draft_vocab_size == vocab_size:
            return None
        raise ConversionError(
            f"the draft vocabulary has {draft_vocab_size} of the target's {vocab_size} ids and "
            f"{OFFSETS}, which says which ones, is missing; fetch the complete checkpoint"
        )
    if offsets.shape != (draft_vocab_size,):
        raise ConversionError(
            f"{OFFSETS} is of shape {list(offsets.shape)}, expected [{draft_vocab_size}]"
        )
    ids = np.arange(draft_vocab_size) + offsets.astype(np.int64)
    if ids.min(initial=0) < 0 or ids.max(initial=0) >= vocab_size:
        raise ConversionError(
            f"{OFFSETS} leads to the id {int(ids[(ids < 0) | (ids >= vocab_size)][0])} of a "
            f"vocabulary of {vocab_size}; it must hold offsets from the draft ids, not target ids"
        )
    if len(np.unique(ids)) < draft_vocab_size:
        raise ConversionError(
            f"{OFFSETS} leads to the same target id twice; it must hold offsets from the draft ids"
        )
    if mask is not None:
        _compare(ids, mask, vocab_size)
    if draft_vocab_size == vocab_size:
        if offsets.any():
            raise ConversionError(
                f"{OFFSETS} permutes a vocabulary that is not reduced; not supported"
            )
        return None
    return ids.astype(np.int32)


def _compare(ids: np.ndarray, mask: np.ndarray, vocab_size: int) -> None:
    if mask.shape != (vocab_size,):
        raise ConversionError(f"{MASK} is of shape {list(mask.shape)}, expected [{vocab_size}]")
    marked = np.flatnonzero(mask)
    if not np.array_equal(np.sort(ids), marked):
        raise ConversionError(
            f"{OFFSETS}, read as offsets, leads to other target ids than {MASK} marks "
            f"(first: {_first_difference(ids, marked)}); the checkpoint contradicts itself"
        )


def _first_difference(ids: np.ndarray, marked: np.ndarray) -> int:
    return int(np.setxor1d(ids, marked)[0])

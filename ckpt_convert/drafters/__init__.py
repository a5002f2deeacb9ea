"""The formats of drafters that can be converted; a new one is a file and a line here."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from ckpt_convert.drafters import checkpoint, conversion
from ckpt_convert.drafters.checkpoint import DrafterCheckpoint as DrafterCheckpoint
from ckpt_convert.drafters.checkpoint import DrafterManifest as DrafterManifest
from ckpt_convert.drafters.conversion import DrafterConversion as DrafterConversion
from ckpt_convert.drafters.conversion import DrafterFinding as DrafterFinding
from ckpt_convert.drafters.dflash import DFLASH
from ckpt_convert.drafters.eagle import EAGLE
from ckpt_convert.drafters.eagle3 import EAGLE3
from ckpt_convert.drafters.medusa import MEDUSA
from ckpt_convert.drafters.mtp import GLM_MTP, MIMO_MTP, QWEN_MTP, SPECULATORS_MTP
from ckpt_convert.drafters.source import UNSAID, open_folder
from ckpt_convert.drafters.source import Choices as Choices
from ckpt_convert.errors import ConversionError
from ckpt_convert.safetensors_source import refuse_pickles, understood

ALONE = (MEDUSA, EAGLE, EAGLE3, DFLASH, SPECULATORS_MTP)
# Modules that lie in their target's own checkpoint: asked for, never found by surprise.
INSIDE = (QWEN_MTP, MIMO_MTP, GLM_MTP)
DRAFTERS = (*ALONE, *INSIDE)

_BY_NAME = {form.name: form for form in DRAFTERS}


def is_drafter(folder: Path) -> bool:
    """True for a folder that holds a drafter rather than a model, going by its tensors' names.

    Raises ``ConversionError`` for one that holds pickles only, of whatever they are.
    """
    if not any(folder.glob("*.safetensors")):
        refuse_pickles(folder)
        return False
    try:
        found, _ = open_folder(folder)
        known = functools.partial(conversion.recognised, formats=ALONE)
        return understood(known, found, folder / "config.json") is not None
    except (ConversionError, OSError):
        return False  # said again by whoever reads it as a model


def convert_drafter(
    source: str | Path,
    destination: str | Path,
    choices: Choices = UNSAID,
    *,
    dtype: np.dtype | None = None,
    overwrite: bool = False,
    found: Callable[[DrafterFinding], None] = lambda finding: None,
) -> DrafterConversion:
    """Convert a published drafter into a checkpoint folder.

    ``choices`` says what no flag in the source settles. ``dtype=None`` keeps the source's.
    ``found`` is told what the source holds before any tensor is read. Raises ``ConversionError``
    for a source that is of no known format, cannot be read in full or asks for what its network
    here cannot do; nothing is written then.
    """
    return conversion.convert(
        Path(source),
        Path(destination),
        DRAFTERS,
        choices,
        dtype=dtype,
        overwrite=overwrite,
        found=found,
    )


def inspect_drafter(
    source: str | Path, choices: Choices = UNSAID, *, dtype: np.dtype | None = None
) -> DrafterFinding:
    """What a published drafter is; raises as ``convert_drafter`` does, and writes nothing."""
    return conversion.look(Path(source), DRAFTERS, choices, dtype)


def load_drafter(
    path: str | Path, *, dtype: Any = None, shardings: Any = None
) -> DrafterCheckpoint:
    """Read a drafter's checkpoint folder straight into JAX arrays.

    ``dtype`` and ``shardings`` are those of `ckpt_convert.load`; ids stay integers. Where the draft
    vocabulary is reduced, ``params["draft_to_target"]`` [Vd] holds each draft id's target id.
    Raises ``ConversionError`` for a folder that is no drafter's, is incomplete or is damaged.
    """
    return checkpoint.load_drafter(path, _BY_NAME, dtype=dtype, shardings=shardings)


def read_drafter_manifest(path: str | Path) -> DrafterManifest:
    """What a drafter's checkpoint folder says of itself; no array is read."""
    return checkpoint.read_drafter_manifest(path, _BY_NAME)

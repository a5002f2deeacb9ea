"""Checkpoints of other formats into Orbax: Hugging Face safetensors and GGUF, without PyTorch.

``resolve`` turns a name, a folder or a file into a checkpoint folder, ``load`` reads one into JAX
arrays, ``inspect`` says what a source holds, ``export`` writes a checkpoint back as a Hugging Face
folder, and ``python -m ckpt_convert SRC DST`` converts by hand.
"""

from typing import TYPE_CHECKING

from ckpt_convert.errors import ConversionError as ConversionError

if TYPE_CHECKING:
    from ckpt_convert.conversion import Conversion as Conversion
    from ckpt_convert.conversion import convert as convert
    from ckpt_convert.conversion import inspect as inspect
    from ckpt_convert.drafters import Choices as Choices
    from ckpt_convert.drafters import DrafterCheckpoint as DrafterCheckpoint
    from ckpt_convert.drafters import DrafterFinding as DrafterFinding
    from ckpt_convert.drafters import load_drafter as load_drafter
    from ckpt_convert.fetch import resolve as resolve
    from ckpt_convert.fetch import smollm2 as smollm2
    from ckpt_convert.hf_export import export as export
    from ckpt_convert.inspection import Finding as Finding
    from ckpt_convert.store import Checkpoint as Checkpoint
    from ckpt_convert.store import Manifest as Manifest
    from ckpt_convert.store import load as load
    from ckpt_convert.store import load_config as load_config
    from ckpt_convert.store import read_manifest as read_manifest

_HOMES = {
    "Choices": "drafters",
    "DrafterCheckpoint": "drafters",
    "DrafterFinding": "drafters",
    "load_drafter": "drafters",
    "Conversion": "conversion",
    "Finding": "inspection",
    "convert": "conversion",
    "export": "hf_export",
    "inspect": "conversion",
    "resolve": "fetch",
    "smollm2": "fetch",
    "Checkpoint": "store",
    "Manifest": "store",
    "load": "store",
    "load_config": "store",
    "read_manifest": "store",
}


def __getattr__(name):
    # Lazy: ``python -m ckpt_convert`` must choose JAX's platform before anything imports jax, and
    # resolving a converted folder needs none of the readers.
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)

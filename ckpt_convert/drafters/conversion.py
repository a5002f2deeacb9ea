"""From a published drafter to a checkpoint folder."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from ckpt_convert import store
from ckpt_convert.drafters.checkpoint import MAP, DrafterManifest, describe, shapes
from ckpt_convert.drafters.drafter import Format
from ckpt_convert.drafters.rules import place, plan
from ckpt_convert.drafters.source import Choices, Found, open_folder
from ckpt_convert.drafters.speculators import flattened
from ckpt_convert.errors import ConversionError
from ckpt_convert.safetensors_source import sha256


@dataclass(frozen=True)
class DrafterConversion:
    """What a conversion found and wrote."""

    destination: Path
    method: str
    config: Any
    target: str | None
    dtype: str
    parameters: int
    tensors: int
    ignored: Mapping[str, str]

    def __str__(self) -> str:
        return "\n".join(
            [
                *describe(self),
                f"parameters  {self.parameters / 1e6:,.1f} million, {self.dtype}",
                f"tensors     {self.tensors}",
                *(f"ignored     {name}: {reason}" for name, reason in self.ignored.items()),
                f"written     {self.destination}",
            ]
        )


def recognised(found: Found, formats: Iterable[Format]) -> tuple[Format, Found] | None:
    """The format of what was found, under the names of that format's rules."""
    for form in formats:
        named = form.named(found)
        if form.recognises(named):
            return form, named
    return None


def convert_drafter(
    source: Path,
    destination: Path,
    formats: Iterable[Format],
    choices: Choices,
    *,
    dtype: np.dtype | None = None,
    overwrite: bool = False,
) -> DrafterConversion:
    """See `ckpt_convert.convert_drafter`."""
    store.refuse_existing(destination, overwrite)
    found, files = open_folder(source)
    found = flattened(replace(found, choices=choices))
    form, found = _known(source, recognised(found, formats))
    _refuse_unused(choices, form)
    config = form.read_config(found)
    rules, sizes = form.rules(config), form.sizes(config)
    placements, ignored = plan(found.tensors, rules, form.ignored, sizes)
    ids = form.map_of(found, config) if form.map_of else None
    stored = dtype or found.dtype
    params = place(found.read, placements, shapes(form, config), sizes, stored)
    if ids is not None:
        params[MAP] = ids
    manifest = DrafterManifest(
        method=form.name,
        config=config,
        dtype=stored.name,
        source=source.name,
        source_sha256=sha256(files),
        target=_target(found.config),
    )
    store.save(destination, params, manifest, {}, overwrite=overwrite)
    return DrafterConversion(
        destination=destination,
        method=form.name,
        config=config,
        target=manifest.target,
        dtype=stored.name,
        parameters=sum(int(np.size(leaf)) for leaf in jax.tree.leaves(params)),
        tensors=len(placements),
        ignored=ignored,
    )


def _known(source: Path, recognition: tuple[Format, Found] | None) -> tuple[Format, Found]:
    if recognition is None:
        raise ConversionError(f"{source} holds no drafter of a format that is known")
    return recognition


def _refuse_unused(choices: Choices, form: Format) -> None:
    for entry in fields(choices):
        if getattr(choices, entry.name) is not None and entry.name not in form.choices:
            raise ConversionError(
                f"{entry.name} was chosen, which makes no difference to a drafter of the format "
                f"{form.name}; leave it out"
            )


def _target(config: Mapping[str, Any]) -> str | None:
    """The target's name, where the source has one."""
    verifier = (config.get("speculators_config") or {}).get("verifier") or {}
    return verifier.get("name_or_path") or config.get("base_model_name_or_path")

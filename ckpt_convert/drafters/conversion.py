"""From a published drafter to a checkpoint folder."""

import functools
import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from ckpt_convert import arrays, store
from ckpt_convert.drafters.checkpoint import MAP, DrafterManifest, abstract, describe
from ckpt_convert.drafters.drafter import Format
from ckpt_convert.drafters.rules import Placement, place, plan
from ckpt_convert.drafters.source import Choices, Found, open_folder
from ckpt_convert.drafters.speculators import flattened
from ckpt_convert.errors import ConversionError
from ckpt_convert.safetensors_source import sha256, understood


@dataclass(frozen=True)
class DrafterFinding:
    """A published drafter, looked at: nothing has been converted or written.

    ``target`` is the name that the source gives the model it drafts for, if it does. What stands
    against a conversion has been raised: ``faults`` is empty.
    """

    source: Path
    files: list[Path]
    form: Format
    found: Found
    config: Any
    target: str | None
    dtype: np.dtype
    placements: list[Placement]
    ignored: Mapping[str, str]
    draft_to_target: np.ndarray | None
    faults: tuple[str, ...] = ()

    @property
    def method(self) -> str:
        return self.form.name

    @property
    def parameters(self) -> int:
        tree = abstract(self.form, self.config, self.dtype)
        return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(tree))

    def __str__(self) -> str:
        lines = [
            *describe(self),
            f"parameters  {self.parameters / 1e6:,.1f} million",
            f"tensors     {len({placement.name for placement in self.placements})}",
            *(f"ignored     {name}: {reason}" for name, reason in self.ignored.items()),
        ]
        return "\n".join(lines)

    def as_json(self) -> dict[str, Any]:
        """The same for programs."""
        return {
            "kind": store.DRAFTER,
            "method": self.method,
            "target": self.target,
            "dtype": self.dtype.name,
            "parameters": self.parameters,
            "config": asdict(self.config),
            "ignored": dict(self.ignored),
            "faults": list(self.faults),
        }


@dataclass(frozen=True)
class DrafterConversion:
    """What a conversion wrote; ``nbytes`` of parameters, in ``seconds``."""

    destination: Path
    method: str
    config: Any
    dtype: str
    parameters: int
    nbytes: int
    seconds: float

    def __str__(self) -> str:
        size = f"{self.nbytes / 1e6:,.1f} MB of {self.dtype}"
        return f"written     {self.destination}: {size} in {self.seconds:.1f} s"


def recognised(found: Found, formats: Iterable[Format]) -> tuple[Format, Found] | None:
    """The format of what was found, and the same under the names of that format's rules."""
    for form in formats:
        named = form.named(found)
        if form.recognises(named):
            return form, named
    return None


def look(
    source: Path, formats: Iterable[Format], choices: Choices, dtype: np.dtype | None
) -> DrafterFinding:
    """What ``source`` holds; raises ``ConversionError`` with what stands against converting it."""
    try:
        found, files = open_folder(source)
    except OSError as fault:
        raise ConversionError(
            f"{fault.filename or source} cannot be read: {fault.strerror}; check the file and its "
            "permissions"
        ) from None
    read = functools.partial(_read, source, tuple(formats))
    found = replace(found, choices=choices)
    form, found, config, target = understood(read, found, source / "config.json")
    placements, ignored = plan(found.tensors, form.rules(config), form.ignored, form.sizes(config))
    return DrafterFinding(
        source=source,
        files=files,
        form=form,
        found=found,
        config=config,
        target=target,
        dtype=found.dtype if dtype is None else dtype,
        placements=placements,
        ignored=ignored,
        draft_to_target=form.map_of(found, config) if form.map_of else None,
    )


def _read(
    source: Path, formats: tuple[Format, ...], found: Found
) -> tuple[Format, Found, Any, str | None]:
    """All that the configuration is asked for: it may hold anything."""
    found = flattened(found)
    recognition = recognised(found, formats)
    if recognition is None:
        raise ConversionError(
            f"{source} holds no drafter of a format that is known (known: "
            f"{', '.join(dict.fromkeys(form.name for form in formats))})"
        )
    form, found = recognition
    _refuse_unused(found.choices, form)
    return form, found, form.read_config(found), _target(found.config)


def write(finding: DrafterFinding, destination: Path, *, overwrite: bool) -> DrafterConversion:
    """Read what was found and write it as a checkpoint folder."""
    began = time.perf_counter()
    form, config = finding.form, finding.config
    tree = abstract(form, config, finding.dtype)
    params = place(finding.found.read, finding.placements, tree, form.sizes(config))
    if finding.draft_to_target is not None:
        params[MAP] = finding.draft_to_target
    manifest = DrafterManifest(
        method=form.name,
        config=config,
        dtype=finding.dtype.name,
        source=finding.source.name,
        source_sha256=sha256(finding.files),
        target=finding.target,
    )
    store.save(destination, params, manifest, {}, overwrite=overwrite)
    return DrafterConversion(
        destination=destination,
        method=form.name,
        config=config,
        dtype=finding.dtype.name,
        parameters=finding.parameters,
        nbytes=arrays.nbytes(params),
        seconds=time.perf_counter() - began,
    )


def convert(
    source: Path,
    destination: Path,
    formats: Iterable[Format],
    choices: Choices,
    *,
    dtype: np.dtype | None,
    overwrite: bool,
    found: Callable[[DrafterFinding], None],
) -> DrafterConversion:
    """See `ckpt_convert.drafters.convert_drafter`."""
    store.refuse_existing(destination, overwrite)
    finding = look(source, formats, choices, dtype)
    found(finding)
    return write(finding, destination, overwrite=overwrite)


def _refuse_unused(choices: Choices, form: Format) -> None:
    for name in choices.said():
        if name not in form.choices:
            raise ConversionError(
                f"{name} was chosen, which makes no difference to a drafter of the format "
                f"{form.name}; leave it out"
            )


def _target(config: Mapping[str, Any]) -> str | None:
    """The target's name, where the source has one."""
    verifier = (config.get("speculators_config") or {}).get("verifier") or {}
    target = verifier.get("name_or_path") or config.get("base_model_name_or_path")
    return target if isinstance(target, str) else None

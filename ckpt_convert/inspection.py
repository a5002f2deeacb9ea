"""What a checkpoint of another format holds, and everything that stands against converting it."""

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from ckpt_convert import vocabulary
from ckpt_convert.errors import ConversionError
from ckpt_convert.source import Source
from ckpt_convert.tensors import Placement, parameter_shapes, plan
from ckpt_convert.vocabulary import Vocabulary
from specjax.models.decoder import DecoderConfig


@dataclass(frozen=True)
class Finding:
    """One source, looked at: nothing has been converted or written.

    ``kinds`` counts the tensors to convert by their type; ``dtype`` is what they will be stored in;
    ``notes`` are worth knowing, any of ``faults`` keeps the source from being converted.
    """

    source: Path
    family: str
    config: DecoderConfig
    dtype: np.dtype
    parameters: int
    placements: list[Placement]
    kinds: dict[str, int]
    ignored: dict[str, str]
    vocabulary: Vocabulary
    tokenizer: dict[str, bytes]
    eos_ids: tuple[int, ...]
    bos_id: int | None
    notes: tuple[str, ...]
    faults: tuple[str, ...]

    def refuse_faults(self) -> None:
        """Raise ``ConversionError`` with all faults in one sentence, if there are any."""
        if self.faults:
            raise ConversionError("; ".join(self.faults))

    def __str__(self) -> str:
        windowed = sum(window is not None for window in self.config.windows)
        tokens = f", {self.vocabulary.size:,} of them tokens" if self.vocabulary.size else ""
        lines = [
            f"family      {self.family}",
            f"parameters  {self.parameters / 1e6:,.1f} million",
            f"vocabulary  {self.config.vocab_size:,}{tokens}",
            f"context     {self.config.max_position:,}"
            + (f", {windowed} layers with a sliding window" if windowed else ""),
            f"tensors     {sum(self.kinds.values())}: {_counted(self.kinds)}",
            f"stored as   {self.dtype.name}",
            f"ends with   {', '.join(map(self._token, self.eos_ids)) or 'nothing but the limit'}",
            "tokenizer   " + (", ".join(self.tokenizer) or "none: token ids only"),
            *(f"ignored     {line}" for line in _grouped(self.ignored)),
            *(f"note        {note}" for note in self.notes),
            *(f"fault       {fault}" for fault in self.faults),
        ]
        return "\n".join(lines)

    def as_json(self) -> dict[str, Any]:
        """The same for programs."""
        return {
            "source": str(self.source),
            "family": self.family,
            "config": dataclasses.asdict(self.config),
            "parameters": self.parameters,
            "vocabulary": self.config.vocab_size,
            "tokens": self.vocabulary.size,
            "context": self.config.max_position,
            "tensors": self.kinds,
            "dtype": self.dtype.name,
            "eos_ids": self.eos_ids,
            "bos_id": self.bos_id,
            "tokenizer": list(self.tokenizer),
            "ignored": self.ignored,
            "notes": self.notes,
            "faults": self.faults,
        }

    def _token(self, id: int) -> str:
        token = self.vocabulary.tokens.get(id)
        return str(id) if token is None else f"{id} {token}"


def look(reader: Source, path: Path, dtype: np.dtype | None) -> Finding:
    """Everything that can be known before a tensor is read. ``dtype`` None is the source's own."""
    faults = []
    placements, ignored = [], {}
    try:
        placements, ignored = plan(reader.tensors, reader.rules, reader.ignored, reader.config)
    except ConversionError as fault:
        faults.append(str(fault))
    names = list(dict.fromkeys(placement.name for placement in placements))
    faults += [fault for name in names if (fault := reader.fault_of(name)) is not None]
    tokenizer: dict[str, bytes] = {}
    tokens = Vocabulary({})
    try:
        tokenizer = reader.tokenizer_files()
        tokens = vocabulary.read(tokenizer)
    except ConversionError as fault:
        faults.append(str(fault))
    except OSError as fault:
        faults.append(
            f"{fault.filename or 'the tokenizer'} cannot be read: {fault.strerror}; check the file"
        )
    if tokens.fault:
        faults.append(tokens.fault)
    stored = reader.dtype if dtype is None else dtype
    kinds = Counter(reader.tensors[name].dtype for name in names)
    return Finding(
        source=path,
        family=reader.family.name,
        config=reader.config,
        dtype=stored,
        parameters=_parameters(reader.config),
        placements=placements,
        kinds=dict(kinds.most_common()),
        ignored=ignored,
        vocabulary=tokens,
        tokenizer=tokenizer,
        eos_ids=reader.eos_ids,
        bos_id=reader.bos_id,
        notes=tuple(_notes(reader, tokens, names, stored if dtype is None else None)),
        faults=tuple(faults),
    )


def _parameters(config: DecoderConfig) -> int:
    shapes = jax.tree.leaves(parameter_shapes(config), is_leaf=lambda node: isinstance(node, tuple))
    return sum(math.prod(shape) for shape in shapes)


def _notes(
    reader: Source, tokens: Vocabulary, names: list[str], own: np.dtype | None
) -> Iterator[str]:
    if tokens.note:
        yield tokens.note
    rows = reader.config.vocab_size
    beyond = [id for id in sorted(tokens.tokens) if id >= rows]
    if beyond:
        first = tokens.tokens[beyond[0]]
        yield f"{len(beyond)} tokens from {beyond[0]} ({first}) on have no row: they can't be used"
    named = [*reader.eos_ids, *([] if reader.bos_id is None else [reader.bos_id])]
    for id in dict.fromkeys(named):
        if not 0 <= id < rows:
            yield f"the id {id} that ends or begins a text is beyond the vocabulary: it never comes"
    wider = [name for name in names if own is not None and _is_wider(reader, name, own)]
    if wider:
        yield f"{len(wider)} tensors such as {wider[0]} are rounded to {own}"


def _is_wider(reader: Source, name: str, stored: np.dtype) -> bool:
    return stored.itemsize == 2 and reader.tensors[name].dtype in ("F32", "F64")


def _counted(kinds: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in kinds.items()) or "none fits"


def _grouped(ignored: Mapping[str, str]) -> Iterable[str]:
    """One line a reason, with the first of the names that it holds for."""
    reasons: dict[str, list[str]] = {}
    for name, reason in ignored.items():
        reasons.setdefault(reason, []).append(name)
    for reason, names in reasons.items():
        others = f" and {len(names) - 1} more" if len(names) > 1 else ""
        yield f"{names[0]}{others}: {reason}"

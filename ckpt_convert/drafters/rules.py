"""Where a drafter's tensors go: rules are data, and the parameters' shapes follow from them."""

import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from ckpt_convert.errors import ConversionError
from ckpt_convert.quantised_source import FP8
from ckpt_convert.safetensors_source import DTYPES
from ckpt_convert.tensors import Ignored, TensorInfo, fill, leaf, matched, parse_turn, turn

Sizes = Mapping[str, int]
_HOLE = re.compile(r"\{(\w+)(?:\+(\d+))?\}")
_SLOT = re.compile(r"(\d+)/(\d+)")
_SLOT_LETTER = "SLOT"
_SUM = re.compile(r"[\w.]+(?:\+[\w.]+)+")
_SUM_LETTER = "SUM"


@dataclass(frozen=True)
class Rule:
    """One kind of source tensor: its name, the parameter it belongs to, and how it is turned.

    ``name`` may hold counters, ``{layer}`` or, starting at one, ``{layer+1}``; the parameter has an
    axis in front for each. ``turn`` reads as in `ckpt_convert.tensors`, and ``1/2`` in it is an
    axis of length 2 of which this tensor is entry 1: of the parameter when it stands on the right,
    of the source when on the left. ``A+B.C`` on the left is an axis of A numbers and B times C
    behind them, of which the rule takes the part whose letters stand on the right. ``wide`` numbers
    stay float32, whatever the others are.
    """

    name: str
    path: tuple[str, ...]
    turn: str
    wide: bool = False

    def counters(self, sizes: Sizes) -> tuple[int, ...]:
        return tuple(sizes[counter] for counter, _ in _HOLE.findall(self.name))

    def placements(self, sizes: Sizes) -> Iterator["Placement"]:
        """Every tensor that the rule wants, and where it goes."""
        starts = [int(start or 0) for _, start in _HOLE.findall(self.name)]
        for index in itertools.product(*map(range, self.counters(sizes))):
            numbers = iter(start + count for start, count in zip(starts, index, strict=True))
            name = _HOLE.sub(lambda _, numbers=numbers: str(next(numbers)), self.name)
            yield Placement(name, self, index)

    def source_shape(self, sizes: Sizes) -> tuple[int, ...]:
        """The shape that the source's tensor must have."""
        pattern, lengths = _summed(self.turn, sizes)
        pattern, slot = _selecting(pattern)
        lengths = {**lengths, _SLOT_LETTER: slot[1]}
        return tuple(_product(lengths, group) for group in parse_turn(pattern)[0])

    def parameter_shape(self, sizes: Sizes) -> tuple[int, ...]:
        right = self.turn.split("->")[1]
        groups = parse_turn(f"-> {_SLOT.sub(_SLOT_LETTER, right)}")[1]
        lengths = {**sizes, _SLOT_LETTER: _slot(right)[1]}
        return (*self.counters(sizes), *(_product(lengths, group) for group in groups))

    def part(self, index: tuple[int, ...]) -> tuple[Any, ...]:
        """The slice of the parameter that one tensor fills."""
        right = self.turn.split("->")[1]
        groups = parse_turn(f"-> {_SLOT.sub(_SLOT_LETTER, right)}")[1]
        axes = [_slot(right)[0] if _SLOT_LETTER in group else slice(None) for group in groups]
        return (*index, *axes)

    def apply(self, tensor: np.ndarray, sizes: Sizes) -> np.ndarray:
        tensor, pattern = _cut(tensor, self.turn, sizes)
        pattern, slot = _selecting(pattern)
        if _SLOT_LETTER not in pattern:
            return turn(tensor, pattern, sizes)
        return turn(tensor, pattern, {**sizes, _SLOT_LETTER: slot[1]})[slot[0]]


@dataclass(frozen=True)
class Placement:
    """One tensor of the source, bound for one slice of one parameter."""

    name: str
    rule: Rule
    index: tuple[int, ...]


def _product(sizes: Sizes, letters: Iterable[str]) -> int:
    return math.prod(sizes[letter] for letter in letters)


def _slot(side: str) -> tuple[int, int]:
    found = _SLOT.search(side)
    return (int(found[1]), int(found[2])) if found else (0, 1)


def _selecting(pattern: str) -> tuple[str, tuple[int, int]]:
    """``pattern`` without slots on the right, and with one on the left brought to the front."""
    left, right = pattern.split("->")
    slot, right = _slot(left), _SLOT.sub("", right)
    if _SLOT.search(left):
        return f"{_SLOT.sub(_SLOT_LETTER, left)} -> {_SLOT_LETTER} {right}", slot
    return f"{left} -> {right}", slot


def _summed(pattern: str, sizes: Sizes) -> tuple[str, Sizes]:
    """``pattern`` with one letter in place of a sum, and the sizes with that letter's."""
    found = _SUM.search(pattern)
    if found is None:
        return pattern, sizes
    total = sum(_product(sizes, part.split(".")) for part in found[0].split("+"))
    return _SUM.sub(_SUM_LETTER, pattern), {**sizes, _SUM_LETTER: total}


def _cut(tensor: np.ndarray, pattern: str, sizes: Sizes) -> tuple[np.ndarray, str]:
    """The part of an axis that is a sum which the right side names, and the pattern for it."""
    found = _SUM.search(pattern)
    if found is None:
        return tensor, pattern
    whole, lengths = _summed(pattern, sizes)
    letters = [letter for group in parse_turn(whole)[0] for letter in group]
    wanted = set(re.findall(r"\w+", whole.split("->")[1]))
    parts = [part.split(".") for part in found[0].split("+")]
    taken = next(number for number, part in enumerate(parts) if wanted.issuperset(part))
    start = sum(_product(sizes, part) for part in parts[:taken])
    end = start + _product(sizes, parts[taken])
    split = tensor.reshape([lengths[letter] for letter in letters])
    before = (slice(None),) * letters.index(_SUM_LETTER)
    return split[*before, start:end], _SUM.sub(" ".join(parts[taken]), pattern)


def parameters(rules: Iterable[Rule], sizes: Sizes, dtype: Any) -> dict[str, Any]:
    """Shape and type of every parameter that the rules fill."""
    tree: dict[str, Any] = {}
    for rule in rules:
        node = tree
        for step in rule.path[:-1]:
            node = node.setdefault(step, {})
        kind = np.float32 if rule.wide else dtype
        node[rule.path[-1]] = jax.ShapeDtypeStruct(rule.parameter_shape(sizes), kind)
    return tree


def plan(
    tensors: Mapping[str, TensorInfo],
    rules: Iterable[Rule],
    ignored: Iterable[Ignored],
    sizes: Sizes,
) -> tuple[list[Placement], dict[str, str]]:
    """Bind every tensor to its place; returns the placements and the ignored names with reasons.

    Raises ``ConversionError`` with *every* missing, unmapped and misshapen tensor at once.
    """
    rules = tuple(rules)
    for rule in rules:
        count = math.prod(rule.counters(sizes))
        if count > len(tensors):  # and perhaps more than could ever be listed
            raise ConversionError(
                f"there should be {count} tensors like {rule.name}, and the checkpoint has "
                f"{len(tensors)} in all; fetch the complete checkpoint"
            )
    placements = [placement for rule in rules for placement in rule.placements(sizes)]
    wanted = dict.fromkeys(placement.name for placement in placements)
    misfits = dict.fromkeys(_misfitting(placements, tensors, sizes))
    return placements, matched(wanted, tensors, ignored, misfits)


def _misfitting(placements, tensors, sizes) -> Iterator[str]:
    for placement in placements:
        name, expected = placement.name, placement.rule.source_shape(sizes)
        if name not in tensors:
            continue
        if tensors[name].shape != expected:
            yield f"misshapen {name}: {list(tensors[name].shape)}, expected {list(expected)}"
        if tensors[name].dtype not in (*DTYPES, *FP8):
            yield f"{name} is of type {tensors[name].dtype}, which holds no weights"


def place(
    read: Callable[[str], np.ndarray],
    placements: Iterable[Placement],
    parameters: Mapping[str, Any],
    sizes: Sizes,
) -> dict[str, Any]:
    """Read the tensors one by one into preallocated ``parameters``."""
    params = jax.tree.map(lambda leaf: np.empty(leaf.shape, leaf.dtype), dict(parameters))
    for placement in placements:
        rule = placement.rule
        values = rule.apply(read(placement.name), sizes)
        fill(leaf(params, rule.path), rule.part(placement.index), values, placement.name)
    return params

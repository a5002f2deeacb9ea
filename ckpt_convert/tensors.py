"""Where a source's tensors go in the decoder's tree: rules are data, one engine applies them."""

import itertools
import math
import re
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ckpt_convert.errors import ConversionError
from specjax.models.decoder import DecoderConfig, parameter_axes

Index = tuple[int | slice | type(Ellipsis), ...]
Part = Callable[[DecoderConfig], Index]

# Trailing axes of one layer's fused parameters, after the layer index.
WHOLE: Part = lambda config: (...,)  # noqa: E731
QUERY: Part = lambda config: (..., slice(0, config.group), slice(None))  # noqa: E731
KEY: Part = lambda config: (..., config.group, slice(None))  # noqa: E731
VALUE: Part = lambda config: (..., config.group + 1, slice(None))  # noqa: E731
GATE: Part = lambda config: (..., 0, slice(None))  # noqa: E731
UP: Part = lambda config: (..., 1, slice(None))  # noqa: E731


@dataclass(frozen=True)
class TensorInfo:
    """What a source says of a tensor before it is read."""

    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class TensorRule:
    """One kind of source tensor: its name, the parameter that it belongs to, and how it is turned.

    ``name`` may hold ``{layer}`` and ``{expert}``; ``others`` are other spellings of it. ``turn``
    reads like einops, ``"(K G W) D -> D K G W"``: the left side is the source's shape, with letters
    V vocabulary, N positions, D width, I MLP width, X experts, K KV heads, G query heads per KV
    head, W head width, P = 2, R = W/2 for interleaved rotary pairs, and T = G + 2 for queries, keys
    and values. ``part`` is the slice of the parameter (of one layer and expert, where it has them)
    that it fills. ``blocks``: the source's first axis is several one after the other, and this rule
    takes number ``block``. ``add`` is added to the source's numbers.
    """

    name: str
    path: tuple[str, ...]
    turn: str
    part: Part = WHOLE
    others: tuple[str, ...] = ()
    blocks: tuple[str, ...] = ()
    block: int = 0
    add: float = 0.0

    def places(self, config: DecoderConfig) -> Iterator[tuple[tuple[str, ...], tuple[int, ...]]]:
        """Every source tensor that the rule wants: its spellings, and (layer, expert) as it has."""
        counted = {"{layer}": config.num_layers, "{expert}": config.axis_sizes["experts"]}
        fields = [field for field in counted if field in self.name]
        for index in itertools.product(*(range(counted[field]) for field in fields)):
            named = {field.strip("{}"): value for field, value in zip(fields, index, strict=True)}
            spelled = tuple(name.format(**named) for name in (self.name, *self.others))
            yield spelled, index

    def shape(self, config: DecoderConfig) -> tuple[int, ...]:
        """Of the whole source tensor."""
        sizes = letter_sizes(config)
        source, _ = parse_turn(self.turn)
        own = tuple(math.prod(sizes[letter] for letter in group) for group in source)
        return (sum(self._block_sizes(config)), *own[1:]) if self.blocks else own

    @property
    def is_straight(self) -> bool:
        """True where the parameter's rows are the source's, and some can be had without others."""
        left, right = parse_turn(self.turn)
        return left == right and not self.blocks

    def apply(self, tensor: np.ndarray, config: DecoderConfig) -> np.ndarray:
        """What the rule's part of the parameter holds, from the whole source tensor."""
        if self.blocks:
            sizes = self._block_sizes(config)
            start = sum(sizes[: self.block])
            tensor = tensor[start : start + sizes[self.block]]
        if self.add:
            tensor = tensor.astype(np.float32) + np.float32(self.add)
        return tensor if self.is_straight else turn(tensor, self.turn, letter_sizes(config))

    def undo(self, values: np.ndarray, config: DecoderConfig) -> np.ndarray:
        """The inverse of `apply`: of a fused source tensor, this rule's block."""
        left, right = self.turn.split("->")
        tensor = turn(values, f"{right} -> {left}", letter_sizes(config))
        return tensor - np.float32(self.add) if self.add else tensor

    def _block_sizes(self, config: DecoderConfig) -> list[int]:
        sizes = letter_sizes(config)
        return [math.prod(sizes[letter] for letter in block.split()) for block in self.blocks]


@dataclass(frozen=True)
class Ignored:
    """A source tensor that is left out on purpose, and why."""

    pattern: str
    reason: str


@dataclass(frozen=True)
class Placement:
    """A source tensor bound for a slice of a parameter, whose layer and expert ``index`` names."""

    name: str
    rule: TensorRule
    index: tuple[int, ...]


def letter_sizes(config: DecoderConfig) -> dict[str, int]:
    return {
        "V": config.vocab_size,
        "N": config.max_position,
        "D": config.hidden_size,
        "I": config.intermediate_size,
        "X": config.axis_sizes["experts"],
        "K": config.num_kv_heads,
        "G": config.group,
        "T": config.group + 2,
        "W": config.head_dim,
        "R": config.head_dim // 2,
        "P": 2,
    }


def parse_turn(pattern: str) -> tuple[list[list[str]], list[list[str]]]:
    """Split ``"(K W) D -> D K W"`` into the letters of each axis, left and right."""
    left, right = (
        [group.strip("()").split() for group in re.findall(r"\([^)]*\)|\w+", side)]
        for side in pattern.split("->")
    )
    return left, right


def turn(tensor: np.ndarray, pattern: str, sizes: Mapping[str, int]) -> np.ndarray:
    """Split, permute and join axes as ``pattern`` says; a view wherever NumPy has one."""
    left, right = parse_turn(pattern)
    letters = [letter for group in left for letter in group]
    order = [letters.index(letter) for group in right for letter in group]
    split = tensor.reshape([sizes[letter] for letter in letters]).transpose(order)
    return split.reshape([math.prod(sizes[letter] for letter in group) for group in right])


def parameter_shapes(config: DecoderConfig) -> dict[str, Any]:
    """Shape of every parameter of the decoder, layers stacked on axis 0."""
    sizes = config.axis_sizes

    def shape(axes: Any) -> Any:
        if isinstance(axes, dict):
            return {name: shape(inner) for name, inner in axes.items()}
        return tuple(sizes[axis] for axis in axes)

    return shape(parameter_axes(config, stacked=True))


def leaf(tree: Any, path: tuple[str, ...]) -> Any:
    """The leaf at ``path``, or None where the tree has none."""
    for name in path:
        if name not in tree:
            return None
        tree = tree[name]
    return tree


def plan(
    tensors: Mapping[str, TensorInfo],
    rules: Iterable[TensorRule],
    ignored: Iterable[Ignored],
    config: DecoderConfig,
) -> tuple[list[Placement], dict[str, str]]:
    """Bind every tensor to its place; returns the placements and the ignored names with reasons.

    Raises ``ConversionError`` with *every* missing, unmapped and misshapen tensor at once.
    """
    wanted = bind(rules, config, tensors)
    left_out = matched(wanted, tensors, ignored, _misshapen(wanted, tensors, config))
    found = [placement for name in tensors for placement in wanted.get(name, ())]
    return found, left_out


def matched(
    wanted: Collection[str],
    tensors: Collection[str],
    ignored: Iterable[Ignored],
    misfits: Iterable[str],
) -> dict[str, str]:
    """The tensors that are left out on purpose, with reasons.

    Raises ``ConversionError`` with every tensor that is missing or unmapped, and all ``misfits``.
    """
    left_out = {name: reason for name in tensors if (reason := _reason(name, ignored, wanted))}
    faults = [
        *(f"missing {name}" for name in wanted if name not in tensors),
        *(f"unmapped {name}" for name in tensors if name not in wanted and name not in left_out),
        *misfits,
    ]
    if faults:
        raise ConversionError("the tensors do not fit the configuration: " + "; ".join(faults))
    return left_out


def bind(
    rules: Iterable[TensorRule], config: DecoderConfig, present: Container[str] = ()
) -> dict[str, list[Placement]]:
    """Every tensor of a model with this configuration, and where its parts belong.

    Each has the first of its spellings that is ``present``, else the first.
    """
    shapes = parameter_shapes(config)
    wanted: dict[str, list[Placement]] = {}
    for rule in rules:
        if leaf(shapes, rule.path) is None:
            continue
        for spelled, index in rule.places(config):
            name = next((name for name in spelled if name in present), spelled[0])
            wanted.setdefault(name, []).append(Placement(name, rule, index))
    return wanted


def _reason(name: str, ignored: Iterable[Ignored], wanted: Collection[str]) -> str | None:
    if name in wanted:
        return None
    return next((entry.reason for entry in ignored if re.fullmatch(entry.pattern, name)), None)


def _misshapen(wanted, tensors, config) -> Iterator[str]:
    for name, placements in wanted.items():
        expected = placements[0].rule.shape(config)
        if name in tensors and tensors[name].shape != expected:
            yield f"misshapen {name}: {list(tensors[name].shape)}, expected {list(expected)}"


def place(
    read: Callable[[str], np.ndarray],
    placements: Iterable[Placement],
    config: DecoderConfig,
    dtype: np.dtype,
) -> dict[str, Any]:
    """Read the tensors one by one into preallocated parameters of ``dtype``.

    Raises ``ConversionError`` where a finite value would become infinite in ``dtype``.
    """
    params = _allocate(parameter_shapes(config), dtype)
    fill_all(read, placements, config, lambda one: leaf(params, one.rule.path)[one.index])
    return params


def fill_all(
    read: Callable[[str], np.ndarray],
    placements: Iterable[Placement],
    config: DecoderConfig,
    target: Callable[[Placement], np.ndarray],
) -> None:
    """Read the tensors one by one, each into the arrays that ``target`` has for its placements."""
    name, tensor = "", np.empty(0)
    for placement in placements:
        if placement.name != name:  # the parts of a fused one come one after the other
            del tensor
            name, tensor = placement.name, read(placement.name)
        rule = placement.rule
        fill(target(placement), rule.part(config), rule.apply(tensor, config), name)


def _allocate(shapes: Any, dtype: np.dtype) -> Any:
    if isinstance(shapes, dict):
        return {name: _allocate(inner, dtype) for name, inner in shapes.items()}
    return np.empty(shapes, dtype)


def fill(target: np.ndarray, part: Index, values: np.ndarray, name: str) -> None:
    with np.errstate(over="ignore"):  # reported below, by name
        target[part] = values
    if target.dtype.itemsize < values.dtype.itemsize or target.dtype == np.float16:
        overflowed = np.isinf(target[part]) & np.isfinite(values)
        if overflowed.any():
            raise ConversionError(
                f"{name} has values that {target.dtype} cannot hold; "
                "choose --dtype float32 or bfloat16"
            )

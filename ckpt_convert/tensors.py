"""Where a source's tensors go in the decoder's tree: rules are data, one engine applies them."""

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
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

    ``name`` may hold ``{layer}``. ``turn`` reads like einops, ``"(K G W) D -> D K G W"``: the left
    side is the source's shape, with letters V vocabulary, D width, I MLP width, K KV heads, G query
    heads per KV head, W head width, and P = 2, R = W/2 for interleaved rotary pairs. ``part``
    is the slice of the parameter (of one layer, where it has layers) that it fills.
    """

    name: str
    path: tuple[str, ...]
    turn: str
    part: Part = WHOLE

    def match(self, name: str) -> int | None:
        """Layer index (0 where the rule has none), or None where the name is another's."""
        pattern = re.escape(self.name).replace(re.escape("{layer}"), r"(\d+)")
        found = re.fullmatch(pattern, name)
        if found is None:
            return None
        return int(found[1]) if found.groups() else 0

    def names(self, config: DecoderConfig) -> list[str]:
        """Every source tensor that the rule wants of a model with this configuration."""
        if "{layer}" not in self.name:
            return [self.name]
        return [self.name.format(layer=layer) for layer in range(config.num_layers)]

    def shape(self, config: DecoderConfig) -> tuple[int, ...]:
        sizes = letter_sizes(config)
        source, _ = parse_turn(self.turn)
        return tuple(math.prod(sizes[letter] for letter in group) for group in source)

    def apply(self, tensor: np.ndarray, config: DecoderConfig) -> np.ndarray:
        return turn(tensor, self.turn, letter_sizes(config))


@dataclass(frozen=True)
class Ignored:
    """A source tensor that is left out on purpose, and why."""

    pattern: str
    reason: str


@dataclass(frozen=True)
class Placement:
    """One tensor of the source, bound for one slice of one parameter."""

    name: str
    rule: TensorRule
    layer: int


def letter_sizes(config: DecoderConfig) -> dict[str, int]:
    return {
        "V": config.vocab_size,
        "D": config.hidden_size,
        "I": config.intermediate_size,
        "K": config.num_kv_heads,
        "G": config.group,
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
    shapes = parameter_shapes(config)
    wanted = {
        name: Placement(name, rule, layer)
        for rule in rules
        if leaf(shapes, rule.path) is not None
        for layer, name in enumerate(rule.names(config))
    }
    left_out = {name: reason for name in tensors if (reason := _reason(name, ignored, wanted))}
    faults = [*_missing(wanted, tensors), *_unmapped(tensors, wanted, left_out)]
    faults += _misshapen(wanted, tensors, config)
    if faults:
        raise ConversionError("the tensors do not fit the configuration: " + "; ".join(faults))
    return [wanted[name] for name in tensors if name in wanted], left_out


def _reason(name: str, ignored: Iterable[Ignored], wanted: Mapping[str, Placement]) -> str | None:
    if name in wanted:
        return None
    return next((entry.reason for entry in ignored if re.fullmatch(entry.pattern, name)), None)


def _missing(wanted, tensors) -> list[str]:
    return [f"missing {name}" for name in wanted if name not in tensors]


def _unmapped(tensors, wanted, left_out) -> list[str]:
    return [f"unmapped {name}" for name in tensors if name not in wanted and name not in left_out]


def _misshapen(wanted, tensors, config) -> Iterator[str]:
    for name, placement in wanted.items():
        expected = placement.rule.shape(config)
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
    for placement in placements:
        rule = placement.rule
        target = leaf(params, rule.path)
        if rule.path[0] == "layers":
            target = target[placement.layer]
        _fill(target, rule.part(config), rule.apply(read(placement.name), config), placement.name)
    return params


def _allocate(shapes: Any, dtype: np.dtype) -> Any:
    if isinstance(shapes, dict):
        return {name: _allocate(inner, dtype) for name, inner in shapes.items()}
    return np.empty(shapes, dtype)


def _fill(target: np.ndarray, part: Index, values: np.ndarray, name: str) -> None:
    with np.errstate(over="ignore"):  # reported below, by name
        target[part] = values
    if target.dtype.itemsize < values.dtype.itemsize or target.dtype == np.float16:
        overflowed = np.isinf(target[part]) & np.isfinite(values)
        if overflowed.any():
            raise ConversionError(
                f"{name} has values that {target.dtype} cannot hold; "
                "choose --dtype float32 or bfloat16"
            )

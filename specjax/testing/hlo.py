"""What a compiled program does to its buffers, read from its optimised HLO.

Whether a cache is updated in place is decided by the compiler, not by the source: a donated
buffer may still be copied in every round. The text of the compiled program tells, on CPU, GPU and
TPU, and for a device that is not there.
"""

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

COLLECTIVES = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)
HOST_TRANSFERS = ("infeed", "outfeed", "send", "recv")
HOST_CALLBACK = re.compile(r'custom_call_target="[^"]*(callback|host_transfer|MoveToHost)[^"]*"')
HOST_MEMORY = "S(5)"
FAST_MEMORY = "S(1)"

_BYTES = {"pred": 1, "s4": 0.5, "u4": 0.5} | {
    kind + bits: int(bits) / 8 for kind in "suf" for bits in ("8", "16", "32", "64")
}
_SHAPE = re.compile(r"\b(pred|bf16|f8e\w+|[suf]\d+)\[([\d,]*)\](\{[^}]*\})?")
_HEADER = re.compile(r"(ENTRY )?%?([\w.\-]+) \(.*\{\s*$")
_INSTRUCTION = re.compile(r"(ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([a-z][a-z0-9\-]*)\((.*)")
_CALLED = re.compile(r"(calls|body|condition|to_apply|called_computations)=\{?%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_ALIAS = re.compile(r"\((\d+), \{[^}]*\}, (?:may|must)-alias\)")
_OP_NAME = re.compile(r'op_name="([^"]*)"')


@dataclass(frozen=True)
class Instruction:
    """One instruction: its name, the text of its result's type, and what follows the opcode."""

    name: str
    type: str
    opcode: str
    rest: str
    is_root: bool

    @property
    def base_opcode(self) -> str:
        """The opcode without the mark of an asynchronous start."""
        return self.opcode.removesuffix("-start")

    @property
    def operands(self) -> list[str]:
        arguments = self.rest.split("), ", 1)[0]
        return re.findall(r"%([\w.\-]+)", arguments)

    @property
    def source(self) -> str:
        """Where in the traced program it comes from."""
        found = _OP_NAME.search(self.rest)
        return found[1] if found else ""


@dataclass(frozen=True)
class Moved:
    """A large array written as a whole: how deep in loops, by what, and how many bytes."""

    depth: int
    opcode: str
    type: str
    bytes: int
    source: str

    def __str__(self):
        size = self.bytes / 2**20
        return f"{self.opcode} of {self.type} ({size:.2f} MiB), loop depth {self.depth}"


@dataclass
class Module:
    """A parsed program: its computations, and the loop depth of each one that it reaches.

    ``inside`` names the computations that are bodies of fusions or reductions: what happens there
    reaches memory only through the instruction that calls them.
    """

    computations: dict[str, list[Instruction]]
    entry: str
    aliased: frozenset[int]
    depth: dict[str, int] = field(default_factory=dict)
    inside: set[str] = field(default_factory=set)

    def __post_init__(self):
        self.depth[self.entry] = 0
        pending = [self.entry]
        while pending:
            caller = pending.pop()
            for instruction in self.computations.get(caller, ()):
                for callee, is_loop, is_control in _callees(instruction):
                    depth = self.depth[caller] + is_loop
                    if depth > self.depth.get(callee, -1):
                        self.depth[callee] = depth
                        pending.append(callee)
                    if not is_control or caller in self.inside:
                        self.inside.add(callee)

    def instructions(self, least_depth: int = 0) -> Iterator[tuple[int, str, Instruction]]:
        """(loop depth, computation, instruction) of all that is executed on its own."""
        for name, body in self.computations.items():
            if name in self.inside or self.depth.get(name, -1) < least_depth:
                continue
            for instruction in body:
                yield self.depth[name], name, instruction

    def aliased_arguments(self) -> set[str]:
        """Names of the arguments whose buffers the results take over, such as "state.cache.k"."""
        return {
            instruction.source
            for instruction in self.computations[self.entry]
            if instruction.opcode == "parameter"
            and int(instruction.rest.split(")", 1)[0]) in self.aliased
        }

    def moves(self, at_least: float, least_depth: int = 1) -> list[Moved]:
        """Arrays of ``at_least`` bytes that are copied, converted, selected or put back whole.

        Copies into a TPU's vector memory are prefetches, and left out.
        """
        found = []
        for depth, computation, instruction in self.instructions(least_depth):
            cause = self._cause(computation, instruction, at_least)
            if cause is not None:
                opcode, text = cause
                found.append(Moved(depth, opcode, text, num_bytes(text), instruction.source))
        return found

    def collectives(self, least_depth: int = 1) -> list[tuple[str, int, str]]:
        """(opcode, bytes, source) of all communication between devices."""
        return [
            (one.base_opcode, num_bytes(one.type), one.source)
            for _, _, one in self.instructions(least_depth)
            if one.base_opcode in COLLECTIVES
        ]

    def host_transfers(self, least_depth: int = 1) -> list[str]:
        """Instructions that wait for the host or move data to it."""
        return [
            f"{one.opcode} {one.name}"
            for _, _, one in self.instructions(least_depth)
            if one.opcode.removesuffix("-done") in HOST_TRANSFERS
            or HOST_CALLBACK.search(one.rest)
            or HOST_MEMORY in one.type
        ]

    def _cause(self, computation, instruction, at_least) -> tuple[str, str] | None:
        called = re.search(r"calls=%?([\w.\-]+)", instruction.rest)
        if instruction.opcode == "fusion" and called:
            if all(_is_small(text, at_least) for text in shapes(instruction.type)):
                return None
            body = self.computations.get(called[1], [])
            names = {one.name: one for one in body}
            for root in _roots(body, names):
                cause = _moved(root, names, at_least)
                if cause is not None:
                    return cause
            return None
        names = {one.name: one for one in self.computations[computation]}
        return _moved(instruction, names, at_least)


def read(program: Any) -> Module:
    """Parses a compiled program (`jax.stages.Compiled`) or the text of one.

    Raises:
        ValueError: where the text has no entry computation.
    """
    text = program if isinstance(program, str) else program.as_text()
    computations, entry, body = {}, None, None
    for line in text.splitlines():
        if line and not line[0].isspace():
            header = _HEADER.match(line)
            body = computations.setdefault(header[2], []) if header else None
            entry = header[2] if header and header[1] else entry
        elif body is not None:
            found = _INSTRUCTION.match(line.strip())
            if found:
                root, name, kind, opcode, rest = found.groups()
                body.append(Instruction(name, kind, opcode, rest, bool(root)))
    if entry is None:
        raise ValueError("no entry computation found: this is not the text of a compiled program")
    head = text.split("\n", 1)[0]
    return Module(computations, entry, frozenset(int(number) for number in _ALIAS.findall(head)))


def shapes(text: str) -> list[str]:
    """The array types in the text of a type, layouts included."""
    return [found[0] for found in _SHAPE.finditer(text)]


def num_bytes(text: str) -> int:
    """Bytes of the first array type in a text; 0 where there is none."""
    found = _SHAPE.search(text)
    if found is None:
        return 0
    width = _BYTES.get(found[1], 2 if found[1] == "bf16" else 1)
    return int(width * math.prod(int(size) for size in found[2].split(",") if size))


def cache_faults(
    compiled: Any,
    arguments: Iterable[str],
    cache_bytes: int,
    *,
    at_least: float,
    temporaries: float,
) -> list[str]:
    """Why a loop does not update its cache in place; empty where it does.

    Args:
        compiled: the compiled program.
        arguments: names of the cache's arrays among its arguments ("state.cache.k").
        cache_bytes: bytes of these on one device.
        at_least: bytes from which a copy inside a loop is a fault.
        temporaries: bytes of temporary memory from which that is a fault.
    """
    module, memory = read(compiled), compiled.memory_analysis()
    faults = [
        f"{name} is not donated: the results do not take over its buffer"
        for name in sorted(set(arguments) - module.aliased_arguments())
    ]
    if memory.alias_size_in_bytes < cache_bytes:
        faults.append(
            f"{memory.alias_size_in_bytes} bytes are aliased, the cache has {cache_bytes}"
        )
    if memory.temp_size_in_bytes > temporaries:
        faults.append(
            f"{memory.temp_size_in_bytes} bytes of temporaries, {temporaries:.0f} allowed"
        )
    return faults + [str(moved) for moved in module.moves(at_least)]


def _callees(instruction: Instruction) -> Iterator[tuple[str, bool, bool]]:
    """(computation, is it a loop's body, does it run on its own) for all that is called."""
    for attribute, name in _CALLED.findall(instruction.rest):
        loop = attribute in ("body", "condition")
        control = loop or instruction.opcode in ("call", "conditional", "async-start", "call-start")
        yield name, loop, control
    for branches in _BRANCHES.findall(instruction.rest):
        for name in re.findall(r"[\w.\-]+", branches):
            yield name, False, True


def _roots(body: list[Instruction], names: dict[str, Instruction]) -> Iterator[Instruction]:
    """What a fusion really writes: its roots, seen through changes of type and shape."""
    pending = [one for one in body if one.is_root]
    while pending:
        root = pending.pop()
        if root.opcode in ("tuple", "bitcast", "reshape"):
            pending += [names[name] for name in root.operands if name in names]
        else:
            yield root


def _moved(instruction, names, at_least) -> tuple[str, str] | None:
    """What makes an instruction write a large array as a whole, with that array's type."""
    written = shapes(instruction.type)[:1]
    if not written or _is_small(written[0], at_least):
        return None
    if instruction.base_opcode in ("copy", "transpose", "select", "convert", "all-gather"):
        return instruction.base_opcode, written[0]
    if instruction.opcode == "dynamic-update-slice":
        update = names.get(instruction.operands[1]) if len(instruction.operands) > 1 else None
        if update is not None and not _is_small(update.type, at_least):
            return "dynamic-update-slice", update.type
    return None


def _is_small(text: str, at_least: float) -> bool:
    return num_bytes(text) < at_least or FAST_MEMORY in text

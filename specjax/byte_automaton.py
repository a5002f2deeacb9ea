"""A regular expression as a deterministic automaton over bytes.

The Rust engine behind `outlines_core` does the compiling; it reads UTF-8 byte by byte, so a
character may be split wherever a tokenizer splits it.
"""

import re
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int

DEAD = -1
# The byte that the engine sees before and after every text. Texts may hold it.
_MARK = 0
_END_TOKEN = 256


class ByteAutomaton(NamedTuple):
    """States 0 to S - 1, 0 the start; -1 where no text that matches goes on with that byte."""

    next_state: Int[np.ndarray, "S 256"]
    accepting: Bool[np.ndarray, " S"]


def byte_automaton(pattern: str) -> ByteAutomaton:
    """The automaton of the texts that match ``pattern`` as a whole, first byte to last.

    The syntax is that of Rust's regex crate: Python's without lookaround and backreferences, with
    the classes of characters as Unicode has them. A leading ``^`` and a trailing ``$`` add nothing.
    Raises ValueError for a pattern that does not compile or that no text matches, ImportError where
    the extra `grammar` is not installed.
    """
    index = _compile(_whole(pattern), pattern)
    transitions, final = index.get_transitions(), index.get_final_states()
    begin = transitions.pop(index.get_initial_state())
    number = {begin[_MARK]: 0}
    for state in transitions:
        number.setdefault(state, len(number))
    next_state = np.full((len(number), 256), DEAD, np.int32)
    for state, row in transitions.items():
        row.pop(_END_TOKEN, None)
        next_state[number[state], list(row)] = [number[after] for after in row.values()]
    is_final = np.array([state in final for state in number] + [False])
    accepting = is_final[next_state[:, _MARK]]
    if not accepting.any():
        raise _empty(pattern)
    # All that the closing mark leads to, where no text holds that byte.
    over = ~accepting & np.all(next_state == DEAD, axis=1)
    next_state[np.append(over, False)[next_state]] = DEAD
    return ByteAutomaton(next_state, accepting)


def _whole(pattern: str) -> str:
    """The regex for the engine: ``pattern`` between marks, up to the end, or nothing at all.

    Asking for the end keeps every alternative alive, where the engine would be content with the
    first that fits. The empty alternative ends its search for matches that begin further on, which
    are of no use here and whose states grow exponentially with counted repetitions.
    """
    bare = pattern.removeprefix("^")
    ends = bare.endswith("$") and (len(bare) - len(bare[:-1].rstrip("\\"))) % 2 == 1
    return rf"(?:\x00(?:(?:{bare[:-1] if ends else bare})\x00)?\z|)"


def _compile(whole: str, pattern: str):
    try:
        import outlines_core
    except ImportError as fault:
        raise ImportError(
            "grammars are compiled by outlines_core, which is not installed: "
            "pip install 'specjax[grammar]'"
        ) from fault
    bytes_alone = {bytes([byte]): [byte] for byte in range(256)}
    try:
        return outlines_core.Index(whole, outlines_core.Vocabulary(_END_TOKEN, bytes_alone))
    except ValueError as fault:
        if "incompatible with the regex" in str(fault):
            raise _empty(pattern) from None
        raise ValueError(
            f"{_shown(pattern)} is no regex that compiles: {_reason(pattern)}"
        ) from None


def _reason(pattern: str) -> str:
    try:
        re.compile(pattern)
    except re.error as fault:
        return f"{fault}"
    return "lookaround, backreferences and Unicode \\b have no finite automaton; write it without"


def _empty(pattern: str) -> ValueError:
    return ValueError(f"no text matches {_shown(pattern)}: a ^ or $ inside it, or an empty class?")


def _shown(pattern: str) -> str:
    return f"the regex {pattern if len(pattern) <= 60 else pattern[:57] + '...'!r}"

"""Grammars: which tokens may come next, as a token-level automaton on the device.

Willard and Louf, "Efficient guided generation for large language models", arXiv 2307.09702: the
automaton of a regular expression, taken from characters to tokens ahead of time. Here tokens that
lead every state to the same state share a class, so the table stays small for any vocabulary.
"""

import typing
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Int

from specjax.byte_automaton import ByteAutomaton, byte_automaton
from specjax.json_schema import json_schema_regex
from specjax.token_bytes import token_bytes
from specjax.tokenizer import Tokenizer

DEAD = -1
MAX_STATES = 8192


@typing.no_type_check
@struct.dataclass
class Grammar:
    """``next_state[state, class]`` is -1 where tokens of the class are not allowed.

    Tokens that behave alike in every state share a class. State -1 allows nothing and stays.
    """

    next_state: Int[Array, "Q C"]
    token_class: Int[Array, " V"]
    start: Int[Array, ""]

    def axes(self) -> Any:
        """Logical axes of each array, for `specjax.sharding`: whole on every device."""
        axes: dict[str, Any] = {
            "next_state": ("states", "classes"),
            "token_class": ("ids",),
            "start": (),
        }
        return replace(self, **axes)


def allowed(grammar: Grammar, state: Int[Array, "*S"]) -> Bool[Array, "*S V"]:
    """Which tokens may come in each state."""
    possible = grammar.next_state[jnp.maximum(state, 0)] >= 0
    return possible[..., grammar.token_class] & (state >= 0)[..., None]


def advance(grammar: Grammar, state: Int[Array, "*S"], token: Int[Array, "*S"]) -> Int[Array, "*S"]:
    """The state after a token; a token of -1 leaves it."""
    column = grammar.token_class[jnp.maximum(token, 0)]
    after = grammar.next_state[jnp.maximum(state, 0), column]
    return jnp.where(token < 0, state, jnp.where(state < 0, DEAD, after))


def compile_regex(
    pattern: str,
    vocabulary: Tokenizer | Sequence[bytes | None],
    eos_ids: Sequence[int],
    *,
    width: int | None = None,
) -> Grammar:
    """The grammar of the outputs that match ``pattern`` as a whole, then end.

    Args:
        pattern: a regular expression in the syntax of `specjax.byte_automaton`.
        vocabulary: a tokenizer, or what each id adds to the text; None adds nothing and is never
            allowed, as special tokens and the padding of a vocabulary are not.
        eos_ids: all of them may come exactly where the text matches; nothing else comes after.
        width: of the logits; None is the vocabulary's own.

    A token is allowed if some sequence of tokens leads from it to a match: no output gets stuck.
    Raises ValueError for a pattern that does not compile, that no sequence of tokens matches, or
    that needs more than 8,192 states; ImportError without the extra `grammar`.
    """
    tokens = list(token_bytes(vocabulary) if isinstance(vocabulary, Tokenizer) else vocabulary)
    width = len(tokens) if width is None else width
    _check_ids(tokens, eos_ids, width)
    tokens += [None] * (width - len(tokens))
    for eos in eos_ids:
        tokens[eos] = None
    automaton = byte_automaton(pattern)
    states = len(automaton.accepting)
    if states > MAX_STATES:
        raise ValueError(
            f"the grammar needs {states} states, {MAX_STATES} are the limit: bound repetitions "
            "by smaller numbers, or leave them unbounded"
        )
    functions, function_of = _token_functions(automaton, tokens)
    table, accepting = _trimmed(functions.T, automaton.accepting)
    if not len(accepting):
        raise ValueError(f"no sequence of this vocabulary's tokens matches the regex {pattern!r}")
    return _with_end(table, accepting, function_of, eos_ids)


def compile_json_schema(
    schema: str | Mapping[str, Any] | type,
    vocabulary: Tokenizer | Sequence[bytes | None],
    eos_ids: Sequence[int],
    *,
    width: int | None = None,
) -> Grammar:
    """The grammar of JSON texts that are valid under a schema: a dict, its JSON, a pydantic model.

    See `compile_regex` for the rest, `specjax.json_schema` for what a schema may hold. Raises
    ValueError naming the keyword that is not supported.
    """
    return compile_regex(json_schema_regex(schema), vocabulary, eos_ids, width=width)


def union(grammars: Sequence[Grammar | None]) -> tuple[Grammar, Int[Array, " B"]]:
    """One grammar for all rows and the state that each row starts in; None allows everything.

    States and classes are padded to powers of two, so that grammars of much the same size share a
    compiled program. Raises ValueError for grammars of different vocabularies, or none at all.
    """
    distinct = {id(one): one for one in grammars if one is not None}
    widths = {one.token_class.shape[0] for one in distinct.values()}
    if len(widths) != 1:
        raise ValueError(
            f"grammars over {sorted(widths)} tokens can't be one: compile all for the same model"
            if widths
            else "no grammar given: leave the grammar out where no row has one"
        )
    classes = np.stack([np.asarray(one.token_class) for one in distinct.values()], axis=1)
    kinds, token_class = np.unique(classes, axis=0, return_inverse=True)
    states = sum(one.next_state.shape[0] for one in distinct.values()) + 1
    table = np.full((_power_of_two(states), _power_of_two(len(kinds))), DEAD, np.int32)
    table[0] = 0
    starts, first = {}, 1
    for own, (name, one) in zip(kinds.T, distinct.items(), strict=True):
        block = np.asarray(one.next_state)[:, own]
        table[first : first + len(block), : len(kinds)] = np.where(block < 0, DEAD, block + first)
        starts[name] = int(one.start) + first
        first += len(block)
    rows = [0 if one is None else starts[id(one)] for one in grammars]
    token_class = token_class.reshape(-1).astype(np.int32)
    united = Grammar(jnp.asarray(table), jnp.asarray(token_class), jnp.int32(0))
    return united, jnp.asarray(rows, jnp.int32)


def _power_of_two(size: int) -> int:
    return 1 << (size - 1).bit_length()


def _check_ids(tokens, eos_ids, width):
    if not eos_ids:
        raise ValueError("eos_ids is empty: a grammar needs an id that ends the text")
    wrong = [id for id in eos_ids if not 0 <= id < width]
    if wrong:
        raise ValueError(f"eos_ids has {wrong[0]}: the logits have {width} ids, 0 to {width - 1}")
    if width < len(tokens):
        raise ValueError(f"width is {width} and the vocabulary has {len(tokens)} ids: it is wider")


def _token_functions(
    automaton: ByteAutomaton, tokens: Sequence[bytes | None]
) -> tuple[Int[np.ndarray, "K S"], Int[np.ndarray, " V"]]:
    """Where each token leads each state: the distinct functions, and the function of each token.

    All tokens are read side by side, a byte at a time. Function 0 leads nowhere.
    """
    states = len(automaton.accepting)
    # A row and a value more: where nothing matches any longer, nothing ever does.
    dead = np.full((1, 256), DEAD, np.int32)
    step = np.concatenate([automaton.next_state, dead]).astype(np.int16)
    functions = [np.full(states, DEAD, np.int16), np.arange(states, dtype=np.int16)]
    number = {function.tobytes(): place for place, function in enumerate(functions)}
    length = np.array([len(token or b"") for token in tokens])
    text = np.zeros((len(tokens), max(length.max(), 1)), np.uint8)
    for row, token in zip(text, tokens, strict=True):
        row[: len(token or b"")] = list(token or b"")
    function_of = np.where(length > 0, 1, 0)
    for place in range(text.shape[1]):
        reading = np.flatnonzero((length > place) & (function_of > 0))
        pairs, which = np.unique(
            function_of[reading] * 256 + text[reading, place], return_inverse=True
        )
        after = np.empty(len(pairs), np.int64)
        for index, pair in enumerate(pairs):
            function = step[functions[pair >> 8], pair & 255]
            after[index] = number.setdefault(function.tobytes(), len(functions))
            if after[index] == len(functions):
                functions.append(function)
        function_of[reading] = after[which]
    used, function_of = np.unique(np.append(function_of, 0), return_inverse=True)
    return np.stack([functions[index] for index in used]), function_of[:-1]


def _trimmed(
    table: Int[np.ndarray, "S K"], accepting: Bool[np.ndarray, " S"]
) -> tuple[Int[np.ndarray, "Q K"], Bool[np.ndarray, " Q"]]:
    """Only what lies on some way of tokens from the start to a match; no states where none does."""
    alive = np.append(accepting, False)  # what DEAD, -1, points at
    while True:
        stuck = np.flatnonzero(~alive[:-1])
        saved = stuck[np.any(alive[table[stuck]], axis=1)]
        if not len(saved):
            break
        alive[saved] = True
    table = np.where(alive[table], table, DEAD)
    reached, frontier = np.zeros_like(accepting), np.flatnonzero(alive[:1])
    while len(frontier):
        reached[frontier] = True
        after = np.unique(table[frontier])
        frontier = after[(after != DEAD) & ~reached[after]]
    number = np.append(np.cumsum(reached) - 1, DEAD)
    return number[table[reached]], accepting[reached]


def _with_end(table, accepting, function_of, eos_ids) -> Grammar:
    """The grammar with a last state for what has ended, and tokens that behave alike in one class.

    A row that has ended may be asked for a law still: its end ids stay allowed.
    """
    states, functions = table.shape
    next_state = np.full((states + 1, functions + 1), DEAD, np.int32)
    next_state[:states, :functions] = table
    next_state[:states, -1] = np.where(accepting, states, DEAD)
    next_state[-1, -1] = states
    function_of[list(eos_ids)] = functions
    next_state, class_of = np.unique(next_state, axis=1, return_inverse=True)
    token_class = class_of.reshape(-1)[function_of].astype(np.int32)
    return Grammar(jnp.asarray(next_state), jnp.asarray(token_class), jnp.int32(0))

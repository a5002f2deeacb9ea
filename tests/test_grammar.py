"""Grammars: what may come next is what some sequence of tokens can complete to a match."""

import functools
import itertools
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_tokenizers import byte_fallback, byte_level, metaspace, of_pieces, with_token_of_bytes

import ckpt_convert
from specjax.byte_automaton import byte_automaton
from specjax.grammar import MAX_STATES, Grammar, advance, allowed, compile_regex, union
from specjax.token_bytes import token_bytes
from specjax.tokenizer import Tokenizer, TokenizerError

# Pieces that overlap, two halves of é and two ends.
PIECES = [b"a", b"b", b"ab", b"ba", b"c", b"\xc3", b"\xa9", None, "bé".encode(), None, None]
EOS = (7, 9)
WIDTH = len(PIECES) + 2
LONGEST = 5
BOUNDED = [
    "a|ab",
    "ab|a|",
    "(ab){0,2}c?",
    "a{0,2}?b{1,2}",
    "[ab]{2,3}",
    "é{1,2}",
    "a?é?b?",
    ".b",
    "^abc?$",
    "(?:a|b)(?:c|)",
]


@functools.cache
def sequences():
    """All sequences of pieces up to the longest, as ids padded with -1, and their bytes."""
    ids = [id for id, piece in enumerate(PIECES) if piece]
    every = [s for size in range(LONGEST + 1) for s in itertools.product(ids, repeat=size)]
    padded = np.array([[*s, *[-1] * (LONGEST - len(s))] for s in every], np.int32)
    return padded, [b"".join(PIECES[id] for id in s) for s in every]


class Walker:
    """A grammar in NumPy, by the meaning of its arrays: each of another shape would be compiled."""

    def __init__(self, grammar: Grammar):
        self.next_state, self.token_class = (
            np.asarray(array) for array in (grammar.next_state, grammar.token_class)
        )
        self.start = int(grammar.start)

    def ahead(self, states) -> np.ndarray:
        """The state after each token, in each of the states."""
        ahead = self.next_state[states][..., self.token_class]
        return np.where(np.asarray(states)[..., None] < 0, -1, ahead)

    def after(self, tokens) -> np.ndarray:
        """The state after each sequence of tokens, padded with -1."""
        state = np.full(tokens.shape[0], self.start)
        for token in tokens.T:
            following = self.next_state[state, self.token_class[token]]
            state = np.where(token < 0, state, np.where(state < 0, -1, following))
        return state


def matches(pattern: str, data: bytes) -> bool:
    try:
        return re.fullmatch(pattern, data.decode()) is not None
    except UnicodeDecodeError:
        return False


@pytest.mark.parametrize("pattern", BOUNDED)
def test_a_token_may_come_if_and_only_if_some_sequence_completes_it(pattern):
    """Against `re` over all sequences of tokens: what matches, and every prefix of what does."""
    walker = Walker(compile_regex(pattern, PIECES, EOS, width=WIDTH))
    tokens, texts = sequences()
    matching = np.array([matches(pattern, text) for text in texts])
    prefixes = {()}
    for row in tokens[matching]:
        ids = tuple(row[row >= 0].tolist())
        prefixes |= {ids[:size] for size in range(len(ids) + 1)}
    short = tokens[np.sum(tokens >= 0, axis=1) < LONGEST]
    state = walker.after(short)
    possible = walker.ahead(state) >= 0
    number = {tuple(row[row >= 0].tolist()): place for place, row in enumerate(tokens)}
    for row, where, may in zip(short, state, possible, strict=True):
        ids = tuple(row[row >= 0].tolist())
        assert (where >= 0) == (ids in prefixes)
        expected = [id for id in range(WIDTH) if (*ids, id) in prefixes]
        if matching[number[ids]]:
            expected += EOS
        assert np.flatnonzero(may).tolist() == sorted(expected)


@pytest.mark.parametrize("pattern", ["[ab]*c", "(é|a)+", r"a+(?:,a+)*|c", ".*"])
def test_what_matches_may_end_and_nothing_else_where_texts_are_unbounded(pattern):
    walker = Walker(compile_regex(pattern, PIECES, EOS, width=WIDTH))
    tokens, texts = sequences()
    may_end = walker.ahead(walker.after(tokens))[:, EOS] >= 0
    expected = np.array([matches(pattern, text) for text in texts])
    np.testing.assert_array_equal(may_end, np.stack([expected] * 2, axis=1))


def test_the_device_follows_the_table():
    """Through an end, past it, off the grammar and over padding; alone, mapped and compiled."""
    grammar = compile_regex("ab?", PIECES, EOS, width=WIDTH)
    tokens = np.array([[0, 7, 9], [0, 9, -1], [0, 7, 0], [0, -1, -1], [4, 0, 0]])

    @jax.jit
    def follow(tokens):
        state = jnp.broadcast_to(grammar.start, 5)
        for place in range(3):
            state = advance(grammar, state, tokens[:, place])
        return state, allowed(grammar, state), jax.vmap(lambda one: allowed(grammar, one))(state)

    state, possible, mapped = map(np.asarray, follow(tokens))
    np.testing.assert_array_equal(state, Walker(grammar).after(tokens))
    assert [np.flatnonzero(row).tolist() for row in possible] == [[7, 9], [7, 9], [], [1, 7, 9], []]
    np.testing.assert_array_equal(mapped, possible)


# --- what tokens are made of ----------------------------------------------------------------------

TEXTS = ["the lazy dog", "déjà vu, 한글", "👍🏽 \U0001f468\u200d\U0001f469", " a\n\tb  c"]


@pytest.mark.parametrize("text", TEXTS)
def test_bytes_of_byte_level_tokens_join_to_the_text(text):
    tokenizer = byte_level()
    pieces = token_bytes(tokenizer)
    assert b"".join(pieces[id] for id in tokenizer.encode(text)) == text.encode()
    assert pieces[tokenizer.bos_id] is None and pieces[tokenizer.eos_id] is None


def test_bytes_of_an_added_token():
    tokenizer, id = with_token_of_bytes("é!".encode())
    assert token_bytes(tokenizer)[id] == "é!".encode()
    tokenizer.backend.add_tokens(["漢字"])
    assert token_bytes(Tokenizer(tokenizer.backend))[-1] == "漢字".encode()


@pytest.mark.parametrize("build", [byte_fallback, metaspace])
def test_bytes_of_sentencepiece_tokens(build):
    """Every space is real: only the text's first is not, which the tokenizer put there."""
    tokenizer = build()
    pieces = token_bytes(tokenizer)
    assert b"".join(pieces[id] for id in tokenizer.encode("a b  c")) == b" a b  c"
    if build is byte_fallback:
        assert b"".join(pieces[id] for id in tokenizer.encode("a é")) == " a é".encode()
        assert pieces[0] == b"<unk>" and pieces[1] is None


def test_a_decoder_that_joins_by_context_is_refused():
    from tokenizers import decoders

    tokenizer = of_pieces(["a", "##b"])
    tokenizer.backend.decoder = decoders.WordPiece()
    with pytest.raises(TokenizerError, match="WordPiece"):
        compile_regex("a", tokenizer, [0])


# --- walks ----------------------------------------------------------------------------------------

WALKED = [
    r"[0-9]{4}-(?:0[1-9]|1[0-2])",
    r"[a-z]+(?:[._][a-z]+)*@[a-z]+\.[a-z]{2,4}",
    r"(?:é|한|👍🏽|[α-ωß]){1,6}",
    r"[a-zäé한]+( [a-z]+)*[.!?]",
    r'"(?:[^"\\\x00-\x1f]|\\["\\/bfnrt]){0,12}"',
    r".{0,40}",
]


def walk(walker: Walker, rng, steps: int) -> list[int]:
    """So many random allowed tokens, then the shortest way to an end."""
    distance = np.append(steps_to_end(walker.next_state), np.inf)
    state, ids = walker.start, []
    while distance[state] > 0:
        ahead = walker.ahead(state)
        nearer = distance[ahead] < distance[state]
        id = int(rng.choice(np.flatnonzero(ahead >= 0 if len(ids) < steps else nearer)))
        ids.append(id)
        state = ahead[id]
    return ids


def steps_to_end(next_state) -> np.ndarray:
    """From each state, the fewest tokens to the last state, where an output has ended."""
    distance = np.full(len(next_state) + 1, np.inf)
    distance[len(next_state) - 1] = 0
    while True:
        shorter = np.minimum(distance[:-1], distance[next_state].min(axis=1) + 1)
        if np.array_equal(shorter, distance[:-1]):
            return shorter
        distance[:-1] = shorter


@functools.cache
def trained():
    return byte_level()


@pytest.mark.parametrize("pattern", WALKED)
def test_walks_over_a_real_kind_of_vocabulary_always_match(pattern):
    tokenizer = trained()
    grammar = compile_regex(pattern, tokenizer, [tokenizer.eos_id], width=300)
    walker = Walker(grammar)
    assert np.isfinite(steps_to_end(walker.next_state)).all()
    rng = np.random.default_rng(0)
    pieces = token_bytes(tokenizer)
    for steps in range(30):
        *ids, last = walk(walker, rng, steps)
        assert last == tokenizer.eos_id
        text = b"".join(pieces[id] for id in ids).decode()
        assert re.fullmatch(pattern, text)
        assert text == tokenizer.decode(ids)
    assert walker.token_class.shape == (300,)


def test_a_byte_that_no_token_spells_leaves_no_way_in():
    """Without a token for é's second byte, no token may begin it."""
    walker = Walker(compile_regex("a|é", [b"a", b"\xc3", None], [2]))
    assert np.flatnonzero(walker.ahead(walker.start) >= 0).tolist() == [0]


# --- several grammars -----------------------------------------------------------------------------


def test_a_union_is_each_rows_own_grammar():
    one, two = (compile_regex(p, PIECES, EOS, width=WIDTH) for p in ("(ab)*c", "é|b+"))
    united, starts = union([one, None, two, one])
    assert united.next_state.shape == (16, 16)
    tokens = sequences()[0]
    for start, own in zip(starts, [one, None, two, one], strict=True):
        rows = Walker(united.replace(start=start))
        given = rows.ahead(rows.after(tokens)) >= 0
        if own is None:
            assert given.all()
        else:
            alone = Walker(own)
            np.testing.assert_array_equal(given, alone.ahead(alone.after(tokens)) >= 0)


def test_a_union_needs_grammars_of_one_vocabulary():
    one = compile_regex("a", PIECES, EOS)
    with pytest.raises(ValueError, match="over \\[11, 13\\] tokens"):
        union([one, compile_regex("a", PIECES, EOS, width=WIDTH)])
    with pytest.raises(ValueError, match="no grammar given"):
        union([None])


# --- faults ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pattern", "fault"),
    [
        ("(", "unterminated"),
        ("a(?=b)", "lookaround"),
        (r"(a)\1", "backreferences"),
        (r"[^\s\S]", "no text matches"),
        ("b^a", "no text matches"),
        ("x+", "no sequence of this vocabulary's tokens"),
        (f"a{{{MAX_STATES}}}", rf"needs {MAX_STATES + 2} states, {MAX_STATES} are the limit"),
    ],
)
def test_a_pattern_that_cannot_be_followed_is_refused(pattern, fault):
    with pytest.raises(ValueError, match=fault):
        compile_regex(pattern, PIECES, EOS)


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        ({"eos_ids": []}, "eos_ids is empty"),
        ({"eos_ids": [11]}, "eos_ids has 11"),
        ({"eos_ids": [7], "width": 5}, "eos_ids has 7"),
        ({"eos_ids": [3], "width": 5}, "width is 5"),
    ],
)
def test_ids_that_do_not_fit_are_refused(options, fault):
    with pytest.raises(ValueError, match=fault):
        compile_regex("a", PIECES, **options)


def test_the_missing_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "outlines_core", None)
    with pytest.raises(ImportError, match=r"specjax\[grammar\]"):
        byte_automaton("a")


def test_counted_repetitions_behind_the_same_letter_compile_at_once():
    """The engine's search for later beginnings would double the time with each repetition."""
    assert len(byte_automaton("[a-z][a-z0-9]{0,60}@").accepting) < 70


def test_the_mark_of_the_engine_may_be_part_of_a_text():
    automaton = byte_automaton("a\x00?b")
    state = 0
    for byte in b"a\x00b":
        state = automaton.next_state[state, byte]
    assert automaton.accepting[state] and automaton.next_state[0, 0] == -1


@pytest.mark.network
def test_the_real_vocabulary():
    """SmolLM2's 49,152 tokens: a date, walked, decoded and matched; the table is small."""
    tokenizer = Tokenizer.load(ckpt_convert.resolve("smollm2-135m-instruct"))
    pattern = r"(?:on )?[0-9]{4}-(?:0[1-9]|1[0-2])-(?:0[1-9]|[12][0-9]|3[01])|später 👍"
    grammar = compile_regex(pattern, tokenizer, [2, 0], width=49_200)
    assert grammar.next_state.size < 1000
    walker = Walker(grammar)
    rng = np.random.default_rng(1)
    for _ in range(50):
        *ids, last = walk(walker, rng, 30)
        assert re.fullmatch(pattern, tokenizer.decode(ids, skip_special_tokens=False))
        assert last in (0, 2)

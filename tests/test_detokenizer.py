"""Text that is right however its tokens come in."""

import codecs
import random
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from tiny_tokenizers import (
    byte_fallback,
    byte_ids,
    byte_level,
    bytes_of_tokens,
    metaspace,
    of_pieces,
    with_token_of_bytes,
)
from tokenizers import Tokenizer as Backend
from tokenizers import decoders

from specjax.detokenizer import Detokenizer
from specjax.tokenizer import Tokenizer

pytestmark = pytest.mark.fast

FAMILY = "\N{MAN}\u200d\N{WOMAN}\u200d\N{GIRL}"
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


# --- rounds ---------------------------------------------------------------------------------------


def every_grouping(ids: list[int], longest: int) -> Iterator[list[list[int]]]:
    """Every way of cutting ids into rounds of 1 to `longest`."""
    if not ids:
        yield []
    for size in range(1, min(longest, len(ids)) + 1):
        for rest in every_grouping(ids[size:], longest):
            yield [ids[:size], *rest]


def some_groupings(ids: list[int], longest: int, count: int) -> Iterator[list[list[int]]]:
    """`count` random ways, from a fixed seed, and the ones with all rounds alike."""
    choose = random.Random(len(ids))
    for size in range(1, longest + 1):
        yield [ids[i : i + size] for i in range(0, len(ids), size)]
    for _ in range(count):
        rest, rounds = ids, []
        while rest:
            size = choose.randint(1, longest)
            rounds.append(rest[:size])
            rest = rest[size:]
        yield rounds


def streamed(detokenizer: Detokenizer, rounds: Sequence[Sequence[int]]) -> str:
    return "".join([*(detokenizer.push(ids) for ids in rounds), detokenizer.flush()])


# --- whole characters -----------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["x😀é", "한글!", FAMILY[:3], "a👍🏽"])
def test_U1_every_grouping_of_short_texts(text):
    tokenizer = byte_level()
    ids = byte_ids(tokenizer, text.encode())
    assert tokenizer.decode(ids) == text and 5 <= len(ids) <= 12
    groupings = list(every_grouping(ids, 5))
    assert len(groupings) >= 2 ** (min(len(ids), 5) - 1)
    for rounds in groupings:
        assert streamed(Detokenizer(tokenizer), rounds) == text


@pytest.mark.parametrize("split", ["bytes", "merged"])
def test_U1_a_character_is_sent_with_its_last_byte_and_not_before(split):
    tokenizer = byte_level()
    text = f"a déjà vu 😀 of {FAMILY}, 한글 and cafe\u0301; 👍🏽."
    ids = byte_ids(tokenizer, text.encode()) if split == "bytes" else tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    for rounds in some_groupings(ids, 5, 60):
        detokenizer, whole_characters = (
            Detokenizer(tokenizer),
            codecs.getincrementaldecoder("utf-8")(),
        )
        for block in rounds:
            assert detokenizer.push(block) == whole_characters.decode(
                bytes_of_tokens(tokenizer, block)
            )
        assert detokenizer.flush() == ""


def test_U1_byte_fallback():
    tokenizer = byte_fallback()
    text = f"a 😀😀{FAMILY} b한글 你 é"
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    for rounds in some_groupings(ids, 5, 60):
        assert streamed(Detokenizer(tokenizer), rounds) == text
        detokenizer = Detokenizer(tokenizer)
        assert REPLACEMENT not in "".join(detokenizer.push(block) for block in rounds)


def test_U1_tokens_that_end_one_character_and_begin_the_next():
    begin, end = "é".encode()[:1], "é".encode()[1:]
    tokenizer, both = with_token_of_bytes(end + begin)
    accents = "é" * 5_000
    ids = [*byte_ids(tokenizer, begin), *[both] * 4_999, *byte_ids(tokenizer, end)]
    assert tokenizer.decode(ids) == accents
    detokenizer = Detokenizer(tokenizer)
    assert [detokenizer.push([id]) for id in ids] == ["", *accents]
    assert tokens_decoded(tokenizer, ids) <= 10 * len(ids)


@pytest.mark.parametrize("build", [byte_level, byte_fallback])
def test_U1_an_incomplete_character_is_held_and_shown_only_at_the_end(build):
    tokenizer = build()
    detokenizer = Detokenizer(tokenizer)
    assert detokenizer.push(byte_ids(tokenizer, "a😀".encode()[:-1])) == "a"
    assert detokenizer.flush().strip(REPLACEMENT) == ""
    detokenizer = Detokenizer(tokenizer)
    assert detokenizer.push(byte_ids(tokenizer, b"a\xf0\x9f")) == "a"
    assert detokenizer.flush() == tokenizer.decode(byte_ids(tokenizer, b"\xf0\x9f"))
    assert detokenizer.flush() == ""


def test_malformed_bytes_equal_full_decode():
    tokenizer = byte_level()
    # Leads, continuations, impossible bytes, a surrogate's bytes, U+FFFD itself, and letters.
    parts = [
        b"\xf0",
        b"\x9f",
        b"\x98",
        b"\x80",
        b"\xe4",
        b"\xbd",
        b"\xff",
        b"\xc3",
        b"\xed\xa0\x80",
    ]
    parts += [REPLACEMENT.encode(), b"a", "é".encode()]
    choose = random.Random(5)
    for _ in range(150):
        data = b"".join(choose.choices(parts, k=choose.randint(1, 24)))
        ids = byte_ids(tokenizer, data)
        assert tokenizer.decode(ids) == data.decode(errors="replace")
        for rounds in some_groupings(ids, 5, 3):
            assert streamed(Detokenizer(tokenizer), rounds) == tokenizer.decode(ids)


def test_any_ids_equal_full_decode():
    tokenizer = byte_level()
    choose = random.Random(6)
    unruly = [id for id in range(2, tokenizer.vocab_size) if not tokenizer.decode([id]).isascii()]
    for _ in range(150):
        ids = choose.choices(unruly, k=choose.randint(1, 24))
        for rounds in some_groupings(ids, 5, 2):
            assert streamed(Detokenizer(tokenizer), rounds) == tokenizer.decode(ids)


def test_a_token_may_end_a_malformed_character_and_begin_another():
    tokenizer, both = with_token_of_bytes(b"\x8d\xf0\x9f")
    ids = [*byte_ids(tokenizer, b"\xf0\xa9"), both, *byte_ids(tokenizer, b"\xae\xbe")]
    text = tokenizer.decode(ids)
    assert len(text) == 2 and text[0] == REPLACEMENT != text[1]
    for rounds in every_grouping(ids, 5):
        assert streamed(Detokenizer(tokenizer), rounds) == text


def test_malformed_bytes_leave_complete_characters_alone():
    tokenizer = byte_fallback()
    ids = [*byte_ids(tokenizer, "한".encode() + b"\xed"), tokenizer.backend.token_to_id("a")]
    # The decoder itself voids the whole run of bytes, the character that is out already included.
    assert tokenizer.decode(ids) == REPLACEMENT * 4 + "a"
    for rounds in every_grouping(ids, 5):
        assert streamed(Detokenizer(tokenizer), rounds) == f"한{REPLACEMENT}a"
    stray = byte_ids(tokenizer, b"\x80\x80" + "😀".encode())
    for rounds in every_grouping(stray, 5):
        assert streamed(Detokenizer(tokenizer), rounds) == f"{REPLACEMENT * 2}😀"


# --- spaces ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("build", [byte_fallback, metaspace])
@pytest.mark.parametrize("text", ["a b  c", " a b  c", "a   b", "abc  "])
def test_U3_spaces_survive(build, text):
    tokenizer = build()
    ids = tokenizer.encode(text)
    assert tokenizer.id_to_token(ids[0]).startswith("▁")
    for split in (ids, [tokenizer.backend.token_to_id(c) for c in "▁" + text.replace(" ", "▁")]):
        for rounds in every_grouping(split, 3):
            assert streamed(Detokenizer(tokenizer), rounds) == tokenizer.decode(split)


@pytest.mark.parametrize("build", [byte_fallback, metaspace])
def test_U3_random_tokens(build):
    tokenizer = build()
    pieces = [tokenizer.backend.token_to_id(t) for t in ("▁", "▁▁", "a", "▁a", "b", "▁b", "c")]
    choose = random.Random(9)
    for _ in range(300):
        ids = choose.choices(pieces, k=choose.randint(1, 12))
        for rounds in some_groupings(ids, 3, 2):
            assert streamed(Detokenizer(tokenizer), rounds) == tokenizer.decode(ids)


def test_U3_a_space_after_a_token_without_text():
    tokenizer = of_pieces(["a", "~", "▁b"])
    tokenizer.backend.decoder = decoders.Sequence(
        [decoders.Replace("~", ""), decoders.Replace("▁", " "), decoders.Fuse()]
        + [decoders.Strip(" ", 1, 0)]
    )
    for ids in ([0, 1, 2], [0, 1, 1, 2, 1, 2], [1, 2, 2]):
        for rounds in every_grouping(ids, 3):
            assert streamed(Detokenizer(tokenizer), rounds) == tokenizer.decode(ids)


# --- special tokens and padding -------------------------------------------------------------------


def test_special_and_padding_ids_are_no_text():
    tokenizer = byte_level()
    bos, eos, padding = tokenizer.bos_id, tokenizer.eos_id, tokenizer.vocab_size + 3
    smile = byte_ids(tokenizer, "é😀".encode())
    ids = [bos, *smile[:3], eos, padding, *smile[3:], eos]
    detokenizer = Detokenizer(tokenizer)
    assert streamed(detokenizer, [ids]) == tokenizer.decode(ids) == "é😀"
    assert detokenizer.tokens_kept == len(ids)
    shown = Detokenizer(tokenizer, skip_special_tokens=False)
    expected = tokenizer.decode(ids, skip_special_tokens=False)
    assert streamed(shown, [ids]) == expected and "</s>" in expected
    assert tokenizer.id_to_token(padding) is None and tokenizer.id_to_token(-1) is None


def test_ids_may_be_an_array():
    tokenizer = byte_level()
    ids = np.array(tokenizer.encode("the fox"), np.int32)
    assert streamed(Detokenizer(tokenizer), [ids]) == tokenizer.decode(ids) == "the fox"


# --- stop strings ---------------------------------------------------------------------------------


FOX = ["The quick br", "own", " f", "ox", " jumps", " over", "ord", " own fo"]


def fox(*pieces: str) -> list[int]:
    return [FOX.index(piece) for piece in pieces]


def test_P7_a_stop_string_over_three_tokens_in_every_grouping():
    tokenizer = of_pieces(FOX)
    ids = fox("The quick br", "own", " f", "ox", " jumps", " over")
    for rounds in every_grouping(ids, 3):
        detokenizer = Detokenizer(tokenizer, stop="own fox")
        pieces = [detokenizer.push(block) for block in rounds]
        assert "".join(pieces) == "The quick br"
        assert detokenizer.finished == "own fox" and detokenizer.tokens_kept == 4
        assert detokenizer.flush() == "" and detokenizer.push(ids) == ""
        assert detokenizer.tokens_kept == 4
    for rounds in every_grouping(ids, 3):
        detokenizer = Detokenizer(tokenizer, stop=["own fox"], include_stop=True)
        assert streamed(detokenizer, rounds) == "The quick brown fox"


def test_P7_text_that_only_begins_like_a_stop_string_is_released():
    tokenizer = of_pieces(FOX)
    ids = fox("The quick br", "own", " f", "ord", " own fo")
    for rounds in every_grouping(ids, 3):
        detokenizer = Detokenizer(tokenizer, stop="own fox")
        pieces = [detokenizer.push(block) for block in rounds]
        assert "".join(pieces) == "The quick brown ford "
        assert detokenizer.flush() == "own fo" and detokenizer.flush() == ""
        assert detokenizer.finished is None and detokenizer.tokens_kept == len(ids)


def test_P7_held_text_goes_no_further_back_than_it_must():
    tokenizer = of_pieces(FOX)
    detokenizer = Detokenizer(tokenizer, stop="own fox")
    sent = [detokenizer.push([id]) for id in fox("The quick br", "own", " f", "own", " jumps")]
    assert sent == ["The quick br", "", "", "own f", "own jumps"]


def test_P3_ids_are_kept_up_to_the_token_that_completes_the_stop():
    tokenizer = of_pieces(["a", "b", "ST", "OP", "c", "d"])
    block = [0, 2, 3, 1, 4, 5]
    for rounds in every_grouping(block, 6):
        detokenizer = Detokenizer(tokenizer, stop="STOP")
        assert streamed(detokenizer, rounds) == "a"
        assert detokenizer.tokens_kept == 3
        kept = block[: detokenizer.tokens_kept]
        assert tokenizer.decode(kept) == "a" + "STOP"


def test_P3_a_stop_before_an_unfinished_character_counts_at_once():
    tokenizer, joined = with_token_of_bytes("stop!é".encode()[:-1])
    assert tokenizer.decode([joined]) == f"stop!{REPLACEMENT}"
    detokenizer = Detokenizer(tokenizer, stop="top")
    assert detokenizer.push([joined, *byte_ids(tokenizer, "é".encode()[1:])]) == "s"
    assert detokenizer.tokens_kept == 1


def first_completed(text: str, stops: Sequence[str]) -> tuple[int, str] | None:
    """The oracle: read character by character, and look back at each."""
    for end in range(1, len(text) + 1):
        matches = [stop for stop in stops if text[:end].endswith(stop)]
        if matches:
            return end, max(matches, key=len)
    return None


def test_the_stop_completed_first_wins_and_the_longest_of_those():
    tokenizer = of_pieces(["a", "b", "c", "ab", "bca", "aab", "cc"])
    choose = random.Random(3)
    finished = 0
    for _ in range(250):
        ids = choose.choices(range(tokenizer.vocab_size), k=choose.randint(1, 14))
        stops = ["".join(choose.choices("abc", k=choose.randint(1, 5))) for _ in range(3)]
        text, match = tokenizer.decode(ids), first_completed(tokenizer.decode(ids), stops)
        for rounds in some_groupings(ids, 5, 3):
            for include in (False, True):
                detokenizer = Detokenizer(tokenizer, stops, include_stop=include)
                got = streamed(detokenizer, rounds)
                if match is None:
                    assert (got, detokenizer.finished) == (text, None)
                    assert detokenizer.tokens_kept == len(ids)
                    continue
                end, stop = match
                assert got == text[: end if include else end - len(stop)]
                assert detokenizer.finished == stop
                kept = detokenizer.tokens_kept
                assert (
                    len(tokenizer.decode(ids[: kept - 1]))
                    < end
                    <= len(tokenizer.decode(ids[:kept]))
                )
        finished += match is not None
    assert 50 < finished < 245


def test_stop_rule_by_example():
    tokenizer = of_pieces(["x", "a", "b", "c"])
    abc = [0, 1, 2, 3]
    first = Detokenizer(tokenizer, stop=["abc", "b"])
    assert (streamed(first, [abc]), first.finished) == ("xa", "b")
    longest = Detokenizer(tokenizer, stop=["bc", "abc"])
    assert (streamed(longest, [abc]), longest.finished) == ("x", "abc")


def test_an_empty_stop_string_is_refused():
    for stop in ("", ["x", ""]):
        with pytest.raises(ValueError, match="stop holds an empty string"):
            Detokenizer(of_pieces(["x"]), stop=stop)


# --- cost -----------------------------------------------------------------------------------------


class Counted:
    """A backend that counts the tokens it decodes, and leaves all else to the real one."""

    def __init__(self, backend: Backend) -> None:
        self.backend, self.decoded = backend, 0

    def __getattr__(self, name: str):
        return getattr(self.backend, name)

    def decode(self, ids, **settings) -> str:
        self.decoded += len(ids)
        return self.backend.decode(ids, **settings)


def tokens_decoded(tokenizer: Tokenizer, ids: Sequence[int]) -> int:
    counted = Counted(tokenizer.backend)
    watched = Tokenizer(counted, named_tokens=tokenizer.named_tokens)
    assert streamed(Detokenizer(watched, stop="never said"), [ids])
    return counted.decoded


# What makes a naive window grow: characters that stay open, U+FFFD itself, bytes that never fit.
UNITS = ["ab ", "😀", REPLACEMENT, b"\x80", b"\xf0\x9f\x98", b"\xe4\x80a"]


@pytest.mark.parametrize("build", [byte_level, byte_fallback])
def test_long_outputs_cost_a_bounded_number_of_decodes_a_token(build):
    tokenizer = build()
    for unit, length in zip(UNITS, [10_000, *[2_000] * 5], strict=True):
        data = unit if isinstance(unit, bytes) else unit.encode()
        ids = byte_ids(tokenizer, data * length)[:length]
        assert tokens_decoded(tokenizer, ids) <= 10 * length


@pytest.mark.parametrize("build", [byte_level, byte_fallback])
def test_a_long_run_of_skipped_tokens_costs_nothing(build):
    tokenizer = build()
    words = byte_ids(tokenizer, b"ab")
    padding = tokenizer.vocab_size
    ids = [words[0], *[tokenizer.eos_id, padding] * 5_000, words[1]]
    assert tokens_decoded(tokenizer, ids) <= 20

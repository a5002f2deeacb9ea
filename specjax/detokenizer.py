"""Tokens turned to text as they come: whole characters, and stop strings.

It runs on the host between chunks of the device program. A stream is decided token by token, so
what it says does not depend on how the tokens were grouped into rounds or chunks.
"""

from collections.abc import Iterable, Sequence
from operator import index
from typing import SupportsIndex

from specjax.tokenizer import Tokenizer

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"

# A character of UTF-8 has four bytes, so at most three tokens can hold the beginning of one.
_LONGEST_UNFINISHED = 3


class Detokenizer:
    """The text of one row's tokens as they come, ended by a stop string.

    Text is given out once it can't change any more: a character when its last byte is there (no
    U+FFFD for a beginning of one), and nothing that may yet become a stop string. Joined, the
    pieces are `Tokenizer.decode` of all ids, except that complete characters stay when malformed
    bytes follow them (byte-fallback decoders void the whole run of bytes). Each token is decoded a
    bounded number of times.

    The row is finished by the stop string that is completed first in the text; of several completed
    by the same character, by the longest. The text ends before it, or after it with
    ``include_stop``. Special tokens that are skipped are no text and match no stop string.
    Raises ValueError for an empty stop string.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: str | Sequence[str] = (),
        include_stop: bool = False,
        skip_special_tokens: bool = True,
    ) -> None:
        self._characters = _CharacterStream(tokenizer, skip_special_tokens)
        self._stops = _StopScanner((stop,) if isinstance(stop, str) else tuple(stop), include_stop)
        self._tokens_kept = 0

    @property
    def finished(self) -> str | None:
        """The stop string that ended the text, if one did."""
        return self._stops.found

    @property
    def tokens_kept(self) -> int:
        """How many ids belong to the text, the one that completed the stop string included."""
        return self._tokens_kept

    def push(self, ids: Iterable[SupportsIndex]) -> str:
        """The text that these ids, of any number of rounds, settle; ids after a stop are void."""
        pieces = []
        for id in ids:
            if self.finished is not None:
                break
            self._tokens_kept += 1
            pieces.append(self._stops.feed(self._characters.feed(index(id))))
        return "".join(pieces)

    def flush(self) -> str:
        """The text still held when the row has ended, an incomplete character as U+FFFD."""
        if self.finished is not None:
            return ""
        return self._stops.feed(self._characters.flush()) + self._stops.flush()


class _CharacterStream:
    """Tokens to whole characters, by decoding a short window that slides over the tokens.

    The window is what was decoded last (``_before``) and what is not complete yet (``_pending``).
    The former stays in it because decoders treat the first token of a text in their own way: they
    drop its leading space.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._textless = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._skip_special_tokens = skip_special_tokens
        self._before: list[int] = []
        self._pending: list[int] = []
        self._sent = ""

    def feed(self, id: int) -> str:
        # The decoder ignores such ids; in the window, a long run of them would only pile up.
        if id in self._textless or not self._tokenizer.id_to_token(id):
            return ""
        self._pending.append(id)
        text = self._window_text()
        complete = text.rstrip(REPLACEMENT)
        if complete == text:
            return self._slide(text) if len(text) > len(self._sent) else ""
        if len(complete) > len(self._sent):
            return self._slide_to_unfinished(text, len(complete))
        if len(self._pending) > _LONGEST_UNFINISHED:
            return self._slide_over_malformed(text)
        return ""

    def flush(self) -> str:
        text = self._send(self._window_text())
        self._restart([])
        return text

    def _window_text(self) -> str:
        text = self._decode(self._before + self._pending)
        if text.startswith(self._sent):
            return text
        # A byte-fallback decoder turns a whole run of bytes into U+FFFD while its end is open:
        # what was complete before the run's end is out already, so only the end is decoded.
        self._restart(self._pending)
        return self._decode(self._pending)

    def _slide(self, text: str) -> str:
        released = self._send(text)
        self._before, self._pending = self._pending, []
        self._sent = self._decode(self._before)
        return released

    def _slide_to_unfinished(self, text: str, settled: int) -> str:
        """Releases what stands before a character that is held, the last token at its end."""
        released, held = self._send(text[:settled]), len(text) - settled
        self._before = self._pending[:-1] or self._before
        self._pending = self._pending[-1:]
        self._sent = self._decode(self._before + self._pending)[:-held]
        return released

    def _slide_over_malformed(self, text: str) -> str:
        """Releases U+FFFD that no further byte can mend, all but a character that may have begun.

        Where decoding the two sides apart gives the same text, the cut splits no character. If
        one token ends what is malformed and begins a character, no such cut exists; then that
        character is the last U+FFFD.
        """
        for held in range(_LONGEST_UNFINISHED, 0, -1):
            tail = self._pending[-held:]
            tail_text = self._decode(tail)
            head_text = self._decode(self._before + self._pending[:-held])
            if not tail_text.strip(REPLACEMENT) and head_text + tail_text == text:
                released = self._send(head_text)
                self._restart(tail)
                return released
        return self._slide_to_unfinished(text, len(text) - 1)

    def _send(self, text: str) -> str:
        released = text[len(self._sent) :]
        if released:
            self._sent = text
        return released

    def _restart(self, pending: list[int]) -> None:
        self._before, self._pending, self._sent = [], pending, ""

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, self._skip_special_tokens)


class _StopScanner:
    """Text to text that no stop string can reach back into."""

    def __init__(self, stops: tuple[str, ...], include_stop: bool) -> None:
        if not all(stops):
            raise ValueError("stop holds an empty string, which would end any text: remove it")
        self.found: str | None = None
        self._stops = stops
        self._include_stop = include_stop
        self._longest = max(map(len, stops), default=1)
        self._held = ""

    def feed(self, text: str) -> str:
        text = self._held + text
        match = self._first_completed(text)
        if match is None:
            safe = self._safe_length(text)
            self._held = text[safe:]
            return text[:safe]
        end, self.found = match
        self._held = ""
        return text[: end if self._include_stop else end - len(self.found)]

    def flush(self) -> str:
        released, self._held = self._held, ""
        return released

    def _first_completed(self, text: str) -> tuple[int, str] | None:
        found = ((text.find(stop), stop) for stop in self._stops)
        ends = [(start + len(stop), stop) for start, stop in found if start >= 0]
        return min(ends, key=lambda match: (match[0], -len(match[1])), default=None)

    def _safe_length(self, text: str) -> int:
        for start in range(max(0, len(text) - self._longest + 1), len(text)):
            tail = text[start:]
            if any(stop.startswith(tail) for stop in self._stops):
                return start
        return len(text)

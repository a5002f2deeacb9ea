"""The bytes that each token of a vocabulary adds to a text.

Byte-level vocabularies spell a byte as a printable character, SentencePiece's spell a space as ▁
and single bytes as ``<0xE2>``. Which spelling is in use says the tokenizer's decoder.
"""

import json
import re
from collections.abc import Sequence
from typing import Any

from specjax.tokenizer import Tokenizer, TokenizerError

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
# A character of its own stands for these bytes; the rest are moved above 255, in order.
_PRINTABLE = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
# Parts of a decoder that join or trim whole texts and leave each token's bytes alone.
_NEUTRAL = ("Fuse", "Strip")


def token_bytes(tokenizer: Tokenizer) -> list[bytes | None]:
    """What each id adds to a text, by id; None for special tokens and ids without a token.

    Tokens that hold a part of a character are the bytes of that part. Raises TokenizerError for a
    decoder under which a token's text depends on its neighbours.
    """
    spell = _speller(tokenizer)
    tokens: list[bytes | None] = []
    for id in range(tokenizer.vocab_size):
        token = tokenizer.id_to_token(id)
        if token is None or id in tokenizer.special_ids:
            tokens.append(None)
        else:
            tokens.append(spell(token) or None)
    return tokens


def _speller(tokenizer: Tokenizer):
    parts = _parts(tokenizer.backend.decoder)
    kinds = [part["type"] for part in parts]
    if kinds == ["ByteLevel"]:
        return _byte_level
    spaces, has_bytes = [], "ByteFallback" in kinds
    for part in parts:
        if part["type"] == "Replace" and "String" in part["pattern"]:
            spaces.append((part["pattern"]["String"], part["content"]))
        elif part["type"] == "Metaspace":
            spaces.append((part["replacement"], " "))
        elif part["type"] not in (*_NEUTRAL, "ByteFallback"):
            raise _no_bytes(tokenizer, part["type"])
    if not kinds:
        raise _no_bytes(tokenizer, None)

    def spell(token: str) -> bytes:
        if has_bytes and (byte := _BYTE_TOKEN.fullmatch(token)):
            return bytes([int(byte[1], 16)])
        for written, meant in spaces:
            token = token.replace(written, meant)
        return token.encode()

    return spell


def _parts(decoder: Any) -> Sequence[dict[str, Any]]:
    if decoder is None:
        return []
    settings = json.loads(decoder.__getstate__())
    return settings["decoders"] if settings["type"] == "Sequence" else [settings]


def _no_bytes(tokenizer: Tokenizer, kind: str | None) -> TokenizerError:
    return TokenizerError(
        f"under the decoder {kind} of {tokenizer.source} a token has no bytes of its own: a "
        "grammar needs a byte-level or SentencePiece vocabulary"
    )


def _byte_level(token: str) -> bytes:
    try:
        return bytes(_BYTE_OF[character] for character in token)
    except KeyError:  # an added token, written out as it is
        return token.encode()


def _byte_alphabet() -> dict[str, int]:
    moved = [byte for byte in range(256) if byte not in _PRINTABLE]
    return {chr(byte): byte for byte in _PRINTABLE} | {
        chr(256 + place): byte for place, byte in enumerate(moved)
    }


_BYTE_OF = _byte_alphabet()

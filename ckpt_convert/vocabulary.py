"""A tokenizer beside a model: do their ids mean the same?"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

COMPLETE = (
    "let Transformers write it in full: AutoTokenizer.from_pretrained(SRC).save_pretrained(SRC)"
)


@dataclass(frozen=True)
class Vocabulary:
    """The tokens of a checkpoint's tokenizer files, by id; empty where there is none to read.

    ``note`` is worth knowing, ``fault`` means that text would become other ids than it should.
    """

    tokens: Mapping[int, str]
    note: str | None = None
    fault: str | None = None

    @property
    def size(self) -> int:
        """One more than the highest id."""
        return max(self.tokens, default=-1) + 1


def read(files: Mapping[str, bytes]) -> Vocabulary:
    """The vocabulary of ``tokenizer.json``, with what other files say of added tokens checked."""
    from tokenizers import Tokenizer

    if not files:
        return Vocabulary({})
    if "tokenizer.json" not in files:
        there = ", ".join(files)
        return Vocabulary({}, note=f"no tokenizer.json, only {there}: no text; {COMPLETE}")
    try:
        ids = Tokenizer.from_buffer(files["tokenizer.json"]).get_vocab(with_added_tokens=True)
        declared = dict(_declared(files))
    except Exception as raised:  # the library raises plain Exception for whatever it can't parse
        said = str(raised).strip().partition("\n")[0]
        broken = f"the tokenizer's files cannot be read ({said}); fetch them again"
        return Vocabulary({}, fault=broken)
    tokens = {id: token for token, id in ids.items()}
    for token, id in declared.items():
        if ids.get(token) != id:
            there = "lacks it" if token not in ids else f"has {ids[token]}"
            differs = f"{token!r} is added as id {id} and tokenizer.json {there}; {COMPLETE}"
            return Vocabulary(tokens, fault=differs)
    return Vocabulary(tokens)


def _declared(files: Mapping[str, bytes]) -> Iterator[tuple[str, int]]:
    """Added tokens with their ids, as files beside ``tokenizer.json`` have them."""
    if "added_tokens.json" in files:
        yield from json.loads(files["added_tokens.json"]).items()
    settings: dict[str, Any] = json.loads(files.get("tokenizer_config.json", b"{}"))
    for id, token in (settings.get("added_tokens_decoder") or {}).items():
        yield token["content"], int(id)

"""A tokenizer and its chat template, as they lie in a checkpoint's folder."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from operator import index
from pathlib import Path
from typing import Any, NamedTuple, SupportsIndex

_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token")


class TokenizerError(ValueError):
    """A tokenizer that can't be loaded, or a request it can't serve; says what to do about it."""


class TokenDifference(NamedTuple):
    """The first id to which two tokenizers give different tokens, or different parts to play."""

    id: int
    mine: str
    theirs: str


@dataclass(frozen=True, eq=False)
class Tokenizer:
    """Text to token ids and back, as the `tokenizer.json` of a checkpoint's folder says.

    ``backend`` is a `tokenizers.Tokenizer` without padding and truncation; ``named_tokens`` maps
    names of templates (`bos_token`, `eos_token`, ...) to tokens; ``add_bos`` None leaves the
    beginning of a text to the backend. Raises TokenizerError if the BOS or EOS is no token.
    """

    backend: Any
    source: str = "this tokenizer"
    named_tokens: Mapping[str, str] = field(default_factory=dict)
    add_bos: bool | None = None
    chat_template: str | None = None

    def __post_init__(self) -> None:
        for name in ("bos_token", "eos_token"):
            token = self.named_tokens.get(name)
            if token is not None and self.backend.token_to_id(token) is None:
                raise TokenizerError(
                    f"{self.source} names {token!r} as its {name}, which its vocabulary lacks: "
                    "its tokenizer.json and tokenizer_config.json don't belong together"
                )

    @classmethod
    def load(cls, folder: str | Path) -> "Tokenizer":
        """The tokenizer of a folder with `tokenizer.json` and, optionally, `tokenizer_config.json`.

        The chat template is `chat_template.jinja`, else the configuration's. Raises TokenizerError,
        naming the folder, if `tokenizer.json` is missing or a file can't be read.
        """
        folder = Path(folder)
        settings = _read_settings(folder)
        return cls(
            backend=_read_backend(folder),
            source=str(folder),
            named_tokens=_named_tokens(settings),
            add_bos=settings.get("add_bos_token"),
            chat_template=_read_chat_template(folder, settings),
        )

    @property
    def bos_id(self) -> int | None:
        """The id that begins a text, if there is one."""
        return self._named_id("bos_token")

    @property
    def eos_id(self) -> int | None:
        """The id that ends a text, if there is one."""
        return self._named_id("eos_token")

    @cached_property
    def vocab_size(self) -> int:
        """One more than the highest id; a model's logits may be padded to a larger width."""
        return max(self._vocabulary, default=-1) + 1

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """The ids that `decode` leaves out with ``skip_special_tokens``."""
        added = self.backend.get_added_tokens_decoder()
        return frozenset(id for id, token in added.items() if token.special)

    def id_to_token(self, id: SupportsIndex) -> str | None:
        """The token of an id, in the vocabulary's own spelling; None if the id is only padding."""
        return self._vocabulary.get(index(id))

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The ids of a text, with one BOS before it if the model wants one, and never two.

        ``add_special_tokens=False`` gives the ids of a piece of text alone. Raises
        TokenizerError for a text with lone surrogates, which no bytes stand for.
        """
        if not add_special_tokens:
            return self._encode(text, add_special_tokens=False)
        encoded = self._encode(text, add_special_tokens=self.add_bos is None)
        if self.add_bos and self.bos_id is not None:
            encoded = [self.bos_id, *encoded]
        return self._without_second_bos(encoded)

    def decode(self, ids: Iterable[SupportsIndex], skip_special_tokens: bool = True) -> str:
        """The text of ids; an incomplete character is U+FFFD, an id without a token is nothing."""
        return self.backend.decode(
            [index(id) for id in ids], skip_special_tokens=skip_special_tokens
        )

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True
    ) -> list[int]:
        """The ids of a conversation of ``{"role": ..., "content": ...}``, with at most one BOS.

        ``add_generation_prompt`` opens the answer. Raises TokenizerError if there is no template,
        no message, or a message that the template refuses.
        """
        if self.chat_template is None:
            raise TokenizerError(
                f"{self.source} has no chat template: pass text instead of messages, or add "
                "chat_template.jinja to it"
            )
        rendered = _render(
            self.chat_template,
            self.source,
            messages=_plain_messages(messages),
            add_generation_prompt=add_generation_prompt,
            tools=None,
            documents=None,
            **self.named_tokens,
        )
        # The template has written the special tokens it wants; the backend must not add its own.
        encoded = self._encode(rendered, add_special_tokens=False)
        return self._without_second_bos(encoded)

    def first_difference(self, other: "Tokenizer") -> TokenDifference | None:
        """The first id that means one thing here and another there; None if the two agree.

        Ids that only one of the two has are no difference: vocabularies may be padded. A BOS or EOS
        is compared where both declare it.
        """
        roles = [name for name in ("bos_token", "eos_token") if self._shares(name, other)]
        mine, theirs = self._labels(roles), other._labels(roles)
        differing = (id for id in mine.keys() & theirs.keys() if mine[id] != theirs[id])
        first = min(differing, default=None)
        return None if first is None else TokenDifference(first, mine[first], theirs[first])

    @cached_property
    def _vocabulary(self) -> dict[int, str]:
        return {id: token for token, id in self.backend.get_vocab(with_added_tokens=True).items()}

    def _encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError as fault:
            raise TokenizerError(
                f"the text is no valid Unicode at character {fault.start} of {len(text)}: was it "
                "read from bytes that are not UTF-8?"
            ) from None
        try:
            return self.backend.encode(text, add_special_tokens=add_special_tokens).ids
        except Exception as fault:  # the type that `tokenizers` raises whatever the matter
            raise TokenizerError(
                f"{self.source} cannot encode the text ({fault}): its vocabulary neither covers "
                "the text nor has a token for what it does not know"
            ) from None

    def _named_id(self, name: str) -> int | None:
        token = self.named_tokens.get(name)
        return None if token is None else self.backend.token_to_id(token)

    def _without_second_bos(self, ids: list[int]) -> list[int]:
        if self.bos_id is not None and ids[:2] == [self.bos_id, self.bos_id]:
            return ids[1:]
        return ids

    def _shares(self, name: str, other: "Tokenizer") -> bool:
        return name in self.named_tokens and name in other.named_tokens

    def _labels(self, roles: Sequence[str]) -> dict[int, str]:
        labels = dict(self._vocabulary)
        for name in roles:
            labels[self.backend.token_to_id(self.named_tokens[name])] += f" as {name}"
        return labels


def _read_backend(folder: Path) -> Any:
    import tokenizers

    path = folder / "tokenizer.json"
    if not path.is_file():
        raise TokenizerError(
            f"{folder} has no tokenizer.json: convert the checkpoint again, or copy the files of "
            "its tokenizer there"
        )
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as fault:  # the library raises plain Exception for whatever it can't parse
        raise TokenizerError(
            f"{path} is no readable tokenizer ({_first_line(fault)}): fetch or convert it again"
        ) from fault
    # Files carry the settings of training; here a prompt is neither padded nor cut in silence.
    backend.no_padding()
    backend.no_truncation()
    return backend


def _read_settings(folder: Path) -> dict[str, Any]:
    path = folder / "tokenizer_config.json"
    if not path.is_file():
        return {}
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as fault:
        raise TokenizerError(
            f"{path} is no readable JSON ({_first_line(fault)}): fetch or convert it again"
        ) from fault
    if not isinstance(settings, dict):
        raise TokenizerError(f"{path} holds no JSON object: fetch or convert it again")
    return settings


def _named_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    named = {name: settings.get(name) for name in _NAMED_TOKENS}
    # An older form spells a token out as an object, with its text as the content.
    texts = {n: t.get("content") if isinstance(t, dict) else t for n, t in named.items()}
    return {name: text for name, text in texts.items() if text is not None}


def _read_chat_template(folder: Path, settings: Mapping[str, Any]) -> str | None:
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = settings.get("chat_template")
    if isinstance(template, list):
        return {entry["name"]: entry["template"] for entry in template}.get("default")
    return template


def _plain_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    if not messages:
        raise TokenizerError("messages is empty: pass at least one {'role': ..., 'content': ...}")
    for message in messages:
        if not isinstance(message, Mapping) or "role" not in message:
            raise TokenizerError(f"{message!r} is no message: it needs a 'role' and a 'content'")
    try:
        # Templates are foreign code: they see plain copies, never the caller's objects.
        plain = json.loads(json.dumps([dict(message) for message in messages]))
    except TypeError as fault:
        raise TokenizerError(
            f"messages hold more than text, numbers, lists and dicts ({_first_line(fault)})"
        ) from fault
    # Callers write None for "nothing", which templates would print.
    kept = [{key: value for key, value in m.items() if value is not None} for m in plain]
    for message in kept:
        if "content" not in message and "tool_calls" not in message:
            raise TokenizerError(f"{message!r} has no 'content': give it a text")
        message["content"] = _as_text(message.get("content", ""))
    return kept


def _as_text(content: Any) -> Any:
    """The text of a content in parts, as OpenAI's clients write it, where all of them are text."""
    if not isinstance(content, list):
        return content
    texts = [part["text"] for part in content if isinstance(part, dict) and "text" in part]
    is_text = 0 < len(texts) == len(content) and all(isinstance(text, str) for text in texts)
    return "".join(texts) if is_text else content


def _render(template: str, source: str, **variables: Any) -> str:
    import jinja2

    try:
        return _compile_template(template)(**variables)
    # A template written for text adds what it is given, so a list of parts is a TypeError.
    except (jinja2.TemplateError, TypeError) as fault:
        raise TokenizerError(
            f"the chat template of {source} refuses these messages: {_first_line(fault)}"
        ) from fault


@lru_cache(maxsize=16)
def _compile_template(template: str) -> Callable[..., str]:
    """A chat template as a function, in the environment that templates are written for.

    That is Transformers' one: sandboxed, with `raise_exception`, `strftime_now`, a `tojson` that
    leaves HTML alone, loop controls, and `generation` blocks, which mark spans for training only.
    """
    from datetime import datetime

    import jinja2
    from jinja2 import nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        tags = {"generation"}

        def parse(self, parser):
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body, lineno=line)

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
        return json.dumps(
            value,
            ensure_ascii=ensure_ascii,
            indent=indent,
            separators=separators,
            sort_keys=sort_keys,
        )

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda style: datetime.now().strftime(style)
    return environment.from_string(template).render


def _first_line(fault: Exception) -> str:
    return str(fault).strip().partition("\n")[0]

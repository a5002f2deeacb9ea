"""Prompts to measure with: a JSON line each, or the twelve that come with the package.

A line is ``{"prompt": ...}`` (continued as it is) or ``{"messages": [...]}`` (answered as a
conversation), with an optional ``"kind"`` that the report groups by.
"""

import json
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from specjax.sampling_params import require_integer

BUNDLED = "prompts.jsonl"


@dataclass(frozen=True)
class BenchPrompt:
    """A prompt as text, or a conversation; ``kind`` groups it in the report."""

    kind: str
    prompt: str | None = None
    messages: tuple[dict[str, str], ...] = ()

    def token_ids(self, tokenizer: Any) -> list[int]:
        """The ids that the model is given."""
        if self.prompt is not None:
            return tokenizer.encode(self.prompt)
        return tokenizer.apply_chat_template(list(self.messages))


def bundled_prompts(count: int) -> list[BenchPrompt]:
    """The first ``count`` of the bundled prompts; raises ValueError where there are fewer."""
    require_integer("the number of prompts", count, at_least=1)
    every = read_prompts()
    if count > len(every):
        raise ValueError(f"{count} prompts are asked for: {len(every)} are bundled")
    return every[:count]


def read_prompts(path: str | Path | None = None) -> list[BenchPrompt]:
    """Prompts of a JSON-lines file; None is the bundled twelve, six extractive and six open.

    Raises ValueError naming the file and the line that is no prompt.
    """
    if path is None:
        text = resources.files("specjax.bench").joinpath(BUNDLED).read_text(encoding="utf-8")
    else:
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as fault:
            raise ValueError(f"cannot read the prompts in {path}: {_reason(fault)}") from None
    name = BUNDLED if path is None else path
    # Not splitlines(): JSON's strings may hold the other characters that it breaks at.
    lines = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    if not lines:
        raise ValueError(f"{name} holds no prompt: a line is {{'prompt': ...}}")
    return [_parse(name, number, line) for number, line in lines]


def _parse(name, number, line) -> BenchPrompt:
    try:
        entry = json.loads(line)
        kind = str(entry.get("kind", "all"))
        if isinstance(entry.get("prompt"), str) and entry["prompt"]:
            return BenchPrompt(kind, entry["prompt"])
        if _is_conversation(entry.get("messages")):
            return BenchPrompt(kind, None, tuple(entry["messages"]))
    except (ValueError, AttributeError, RecursionError):
        pass
    raise ValueError(f"{name}, line {number}: expected {{'prompt': ...}} or {{'messages': [...]}}")


def _is_conversation(messages: Any) -> bool:
    return (
        isinstance(messages, list)
        and bool(messages)
        and all(isinstance(message, dict) and "role" in message for message in messages)
    )


def _reason(fault) -> str:
    return getattr(fault, "strerror", None) or "it is not UTF-8 text"

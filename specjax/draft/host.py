"""What a drafter may be built from: the target at hand, and a way to load another model."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from specjax.types import Drafter, Target


class Loaded(NamedTuple):
    """A model ready to draft with."""

    target: Target
    params: Any
    max_context: int


@dataclass(frozen=True)
class Host:
    """The target that is to be sped up. ``load`` refuses a model with another tokenizer."""

    target: Any
    params: Any
    vocab_size: int
    max_context: int
    prefill_chunk: int
    load: Callable[[str], Loaded]


class Built(NamedTuple):
    """A drafter and its parameters."""

    drafter: Drafter
    params: Any

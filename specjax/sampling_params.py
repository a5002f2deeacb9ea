"""What a request asks for, in the names and meanings of vLLM's ``SamplingParams``."""

from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any


@dataclass(frozen=True)
class SamplingParams:
    """How one prompt is continued.

    Attributes:
        n: samples of the prompt, from one prefill.
        temperature: 0 is greedy.
        top_p: the smallest set of tokens with this mass, in (0, 1].
        top_k: the k most likely tokens; 0 or -1 is off.
        min_p: tokens at least this share as likely as the most likely one, in [0, 1].
        seed: 0 to 2**64 - 1, makes the request repeat anywhere; None draws from the engine's seed
            and the number of the request, so a script repeats and two calls differ.
        max_tokens: at most so many tokens.
        stop: strings at which the text ends; the text is cut before the string.
        stop_token_ids: ids that end the output like EOS.
        ignore_eos: go on after EOS.
        include_stop_str_in_output: cut after the stop string, not before.
        skip_special_tokens: leave special tokens out of the text.

    Raises ValueError for a value out of range or of another type.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int = 128
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True

    def __post_init__(self):
        require_integer("n", self.n, at_least=1)
        require_integer("max_tokens", self.max_tokens, at_least=1)
        require_integer("top_k", self.top_k)
        if self.seed is not None:
            require_integer("seed", self.seed, at_least=0)
            _require(self.seed < 1 << 64, f"seed is {self.seed}: it must be less than 2**64")
        for name in ("temperature", "top_p", "min_p"):
            value = getattr(self, name)
            _require(isinstance(value, Real), f"{name} is {value!r}: it must be a number")
        _require(
            0 <= self.temperature < float("inf"),
            f"temperature is {self.temperature}: it must be 0 (greedy) or a positive number",
        )
        _require(0 < self.top_p <= 1, f"top_p is {self.top_p}: it must lie in (0, 1]")
        _require(self.top_k >= -1, f"top_k is {self.top_k}: 0 or -1 is off, else at least 1")
        _require(0 <= self.min_p <= 1, f"min_p is {self.min_p}: it must lie in [0, 1]")
        _require(
            _is_list_of(self.stop_token_ids, Integral),
            f"stop_token_ids is {self.stop_token_ids!r}: it must be a list of token ids",
        )
        _require(
            isinstance(self.stop, str) or _is_list_of(self.stop, str),
            f"stop is {self.stop!r}: it must be a string or a list of strings",
        )
        _require(all(self.stop_strings), "a stop string is empty: every text contains it")

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)


def require_integer(name: str, value: Any, *, at_least: int | None = None) -> None:
    """Raises ValueError naming the parameter, unless ``value`` is an integer that large."""
    integral = isinstance(value, Integral) and not isinstance(value, bool)
    _require(integral, f"{name} is {value!r}: it must be an integer")
    enough = at_least is None or int(value) >= at_least
    _require(enough, f"{name} is {value}: it must be at least {at_least}")


def _is_list_of(values: Any, kind: type) -> bool:
    return isinstance(values, Sequence) and all(isinstance(value, kind) for value in values)


def _require(condition, sentence):
    if not condition:
        raise ValueError(sentence)

"""What a request asks for, in the names and meanings of vLLM's ``SamplingParams``."""

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

STRUCTURES = ("regex", "json", "choice")
LISTS = ("stop", "stop_token_ids", "bad_words")
# Of temperatures, biases and repetition penalties: what they lead to is finite in float32.
LARGEST = 1e20
# Of presence and frequency penalties, which is vLLM's.
LARGEST_PENALTY = 2.0


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
        max_tokens: at most so many tokens; None goes on as far as ``max_model_len`` allows.
        stop: strings at which the text ends; the text is cut before the string.
        stop_token_ids: ids that end the output like EOS.
        ignore_eos: go on after EOS.
        include_stop_str_in_output: cut after the stop string, not before.
        skip_special_tokens: leave special tokens out of the text.
        min_tokens: before so many tokens neither EOS nor a stop id comes, unless bad words or a
            structure leave nothing else; a stop string may.
        repetition_penalty: divides the likelihood of what prompt or output hold; 1 is off.
        presence_penalty: taken from the logits of what the output holds, in [-2, 2].
        frequency_penalty: the same for each time that the output holds it, in [-2, 2].
        logit_bias: added to the logits of token ids; -inf bans.
        allowed_token_ids: no other ids come; None allows all.
        banned_token_ids: ids that never come.
        bad_words: strings whose tokens, spelled with or without a space before, never come in a
            row, unless nothing else is left.
        structured_outputs: ``{"regex": ...}``, ``{"json": schema}`` or ``{"choice": [...]}``: the
            text matches it. It prevails over ``min_tokens`` and ``bad_words`` where nothing else is
            left, and with ``ignore_eos`` repeats EOS at its end. Needs the extra ``grammar``.
        logits_processor: ``f(logits [V], past) -> logits [V]`` in JAX, applied after the penalties;
            ``past`` is a `specjax.history.Past`. Requests decoded together share one function. NaN
            counts as -inf, and where it leaves no token at all, by -inf or NaN throughout, the
            logits stay as they were.
        logprobs: score every token, with so many alternatives; None does not.
        num_speculative_tokens: at most so many drafted tokens a round, 0 decodes plainly; None is
            the drafter's number.

    Raises ValueError for a value out of range or of another type.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = 128
    stop: str | Sequence[str] | None = ()
    stop_token_ids: Sequence[int] | None = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    min_tokens: int = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    banned_token_ids: Sequence[int] = ()
    bad_words: Sequence[str] | None = ()
    structured_outputs: Mapping[str, Any] | None = None
    logits_processor: Callable[..., Any] | None = None
    logprobs: int | None = None
    num_speculative_tokens: int | None = None

    def __post_init__(self):
        for name in LISTS:
            if getattr(self, name) is None:  # as callers of vLLM write it
                object.__setattr__(self, name, ())
        self._check_draw()
        self._check_ends()
        self._check_shaping()
        self._check_structure()

    def _check_draw(self):
        require_integer("n", self.n, at_least=1)
        if self.max_tokens is not None:
            require_integer("max_tokens", self.max_tokens, at_least=1)
        require_integer("top_k", self.top_k)
        if self.seed is not None:
            require_integer("seed", self.seed, at_least=0)
            _require(self.seed < 1 << 64, f"seed is {self.seed}: it must be less than 2**64")
        for name in ("temperature", "top_p", "min_p"):
            value = getattr(self, name)
            _require(_is_number(value), f"{name} is {value!r}: it must be a number")
        _require(
            0 <= self.temperature <= LARGEST,
            f"temperature is {self.temperature}: it must be 0 (greedy) or a positive number, at "
            f"most {LARGEST:g}",
        )
        _require(0 < self.top_p <= 1, f"top_p is {self.top_p}: it must lie in (0, 1]")
        _require(self.top_k >= -1, f"top_k is {self.top_k}: 0 or -1 is off, else at least 1")
        _require(0 <= self.min_p <= 1, f"min_p is {self.min_p}: it must lie in [0, 1]")
        for name in ("logprobs", "num_speculative_tokens"):
            if getattr(self, name) is not None:
                require_integer(name, getattr(self, name), at_least=0)

    def _check_ends(self):
        require_integer("min_tokens", self.min_tokens, at_least=0)
        _require(
            self.max_tokens is None or self.min_tokens <= self.max_tokens,
            f"min_tokens is {self.min_tokens}, more than max_tokens, {self.max_tokens}",
        )
        _require(
            _is_list_of(self.stop_token_ids, Integral),
            f"stop_token_ids is {self.stop_token_ids!r}: it must be a list of token ids",
        )
        _require(
            isinstance(self.stop, str) or _is_list_of(self.stop, str),
            f"stop is {self.stop!r}: it must be a string or a list of strings",
        )
        _require(all(self.stop_strings), "a stop string is empty: every text contains it")
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            value = getattr(self, name)
            _require(isinstance(value, bool), f"{name} is {value!r}: it must be True or False")

    def _check_shaping(self):
        for name in ("repetition_penalty", "presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            finite = _is_number(value) and math.isfinite(value)
            _require(finite, f"{name} is {value!r}: it must be a finite number")
        _require(
            1 / LARGEST <= self.repetition_penalty <= LARGEST,
            f"repetition_penalty is {self.repetition_penalty}: it must be more than 0, between "
            f"{1 / LARGEST:g} and {LARGEST:g}; 1 is off",
        )
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            _require(abs(value) <= LARGEST_PENALTY, f"{name} is {value}: it must lie in [-2, 2]")
        _require(
            self.logit_bias is None or isinstance(self.logit_bias, Mapping),
            f"logit_bias is {self.logit_bias!r}: it must be a dictionary, a number a token id",
        )
        for id, bias in (self.logit_bias or {}).items():
            number = _is_number(bias) and (abs(bias) <= LARGEST or bias == -math.inf)
            _require(
                number,
                f"logit_bias of token {id!r} is {bias!r}: give a number of at most {LARGEST:g}, "
                "or -inf",
            )
        for name in ("allowed_token_ids", "banned_token_ids"):
            ids = getattr(self, name)
            listed = _is_list_of(ids, Integral) or (ids is None and name == "allowed_token_ids")
            _require(listed, f"{name} is {ids!r}: it must be a list of token ids")
        _require(
            self.allowed_token_ids is None or len(self.allowed_token_ids) > 0,
            "allowed_token_ids is empty: no token could come; None allows all",
        )
        words = not isinstance(self.bad_words, str) and _is_list_of(self.bad_words, str)
        _require(words, f"bad_words is {self.bad_words!r}: it must be a list of strings")
        _require(all(self.bad_words or ()), "a bad word is empty: every text contains it")

    def _check_structure(self):
        wanted = self.structured_outputs
        if wanted is not None:
            known = (
                isinstance(wanted, Mapping) and len(wanted) == 1 and set(wanted) <= {*STRUCTURES}
            )
            _require(
                known,
                f"structured_outputs is {wanted!r}: give a dictionary with one of "
                f"{', '.join(STRUCTURES)}",
            )
            choices = wanted.get("choice", ("",))
            _require(
                _is_list_of(choices, str) and not isinstance(choices, str) and len(choices) > 0,
                f"structured_outputs choice is {choices!r}: it must be a list of strings",
            )
            pattern = wanted.get("regex", "")
            _require(
                isinstance(pattern, str),
                f"structured_outputs regex is {pattern!r}: it must be a string",
            )
        function = self.logits_processor
        _require(
            function is None or callable(function),
            f"logits_processor is {function!r}: it must be a function of (logits, past)",
        )
        _require(
            isinstance(function, Hashable),
            f"logits_processor is {function!r}, which has no hash: a compiled program is kept for "
            "each function, so give it one",
        )

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    def ends(self, eos_ids: Sequence[int]) -> tuple[int, ...]:
        """The ids that end the output of a model with these EOS ids."""
        return (*(() if self.ignore_eos else eos_ids), *(self.stop_token_ids or ()))


def require_integer(name: str, value: Any, *, at_least: int | None = None) -> None:
    """Raises ValueError naming the parameter, unless ``value`` is an integer that large."""
    integral = isinstance(value, Integral) and not isinstance(value, bool)
    _require(integral, f"{name} is {value!r}: it must be an integer")
    enough = at_least is None or int(value) >= at_least
    _require(enough, f"{name} is {value}: it must be at least {at_least}")


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _is_list_of(values: Any, kind: type) -> bool:
    """Of text or numbers; truth values are integers to Python, and never meant as such here."""
    return isinstance(values, Sequence) and all(
        isinstance(value, kind) and not isinstance(value, bool) for value in values
    )


def _require(condition, sentence):
    if not condition:
        raise ValueError(sentence)

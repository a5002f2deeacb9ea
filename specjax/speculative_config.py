"""One translator from the ``speculative_config`` that users know to a drafter and a rule.

It takes vLLM's keys and Transformers' assisted-generation arguments. What is not known is refused
with the nearest key that is; nothing is dropped in silence.
"""

import difflib
import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any

from specjax.accept import RULES, default_rule
from specjax.draft import DRAFTERS, Built, Host
from specjax.types import Rule

# Transformers' names, and others in use: what they set, and the method that they imply.
ALIASES = {
    "rejection_sample_method": ("rule", None),
    "prompt_lookup_num_tokens": ("num_speculative_tokens", "ngram"),
    "max_matching_ngram_size": ("prompt_lookup_max", "ngram"),
    "ngram_prompt_lookup_max": ("prompt_lookup_max", "ngram"),
    "ngram_prompt_lookup_min": ("prompt_lookup_min", "ngram"),
    "assistant_model": ("model", "draft_model"),
    "num_assistant_tokens": ("num_speculative_tokens", None),
    "assistant_early_exit": ("exit_layer", "early_exit"),
}
IMPLIED = {"model": "draft_model", "exit_layer": "early_exit", "prompt_lookup_max": "ngram"}


@dataclass(frozen=True)
class SpeculativeConfig:
    """A method of drafting, its options, and the acceptance rule (None: the method's default)."""

    method: str = "none"
    options: Mapping[str, Any] = field(default_factory=dict)
    rule: str | None = None

    @classmethod
    def parse(cls, config: Mapping[str, Any] | None) -> "SpeculativeConfig":
        """Reads a user's dictionary. Raises ValueError naming the key at fault and the remedy."""
        if config is not None and not isinstance(config, Mapping):
            raise ValueError(
                f"speculative_config is {config!r}: give a dictionary such as "
                "{'method': 'ngram', 'num_speculative_tokens': 5}"
            )
        for key in config or {}:
            if not isinstance(key, str):
                raise ValueError(f"speculative_config has the key {key!r}: keys are strings")
        options, implied = _translate(config or {})
        rule = options.pop("rule", None)
        method = options.pop("method", None) or _implied_method(options, implied)
        if str(method) not in DRAFTERS:
            raise ValueError(f"unknown method {method!r}{_nearest(str(method), DRAFTERS)}")
        if rule is not None and str(rule) not in RULES:
            raise ValueError(f"unknown rule {rule!r}{_nearest(str(rule), RULES)}")
        known = option_names(method)
        for key in options:
            if key not in known:
                raise ValueError(_unknown_key(key, method, known))
        for key in _required(method):
            if key not in options:
                raise ValueError(f"method '{method}' needs {key!r} in speculative_config")
        for key, value in options.items():
            if _wants_integer(method, key) and not _is_integer(value):
                raise ValueError(f"{key} is {value!r}: it must be an integer")
        return cls(method, options, rule)

    def build(self, host: Host) -> tuple[Built, Rule]:
        """The drafter with its parameters, and the rule."""
        built = DRAFTERS[self.method](host, **self.options)
        drafter = built.drafter
        default = default_rule(drafter.has_law, drafter.is_chain)
        name = default if self.rule is None else self.rule
        return built, RULES[name]


def option_names(method: str) -> tuple[str, ...]:
    """The keys that a method takes: the keyword arguments of its ``build``."""
    return tuple(inspect.signature(DRAFTERS[method]).parameters)[1:]


def _wants_integer(method: str, key: str) -> bool:
    return inspect.signature(DRAFTERS[method]).parameters[key].annotation in (int, "int")


def _is_integer(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _required(method):
    parameters = list(inspect.signature(DRAFTERS[method]).parameters.values())[1:]
    return [p.name for p in parameters if p.default is inspect.Parameter.empty]


def _translate(config) -> tuple[dict[str, Any], str | None]:
    options, implied = {}, None
    for key, value in config.items():
        name, method = ALIASES.get(key, (key, None))
        if name in options:
            raise ValueError(f"{key!r} and another key both set {name!r}: give one of them")
        if value is not None:
            options[name] = value
        implied = implied or method
    return options, implied


def _implied_method(options, implied) -> str:
    if implied:
        return implied
    for key, method in IMPLIED.items():
        if key in options:
            return method
    if not options:
        return "none"
    raise ValueError(f"speculative_config has no 'method': choose one of {', '.join(DRAFTERS)}")


def _unknown_key(key, method, known) -> str:
    elsewhere = [other for other in DRAFTERS if key in option_names(other)]
    if elsewhere:
        return f"{key!r} belongs to method {' or '.join(map(repr, elsewhere))}, not to {method!r}"
    every = ("method", "rule", *known, *ALIASES)
    return f"unknown key {key!r} in speculative_config{_nearest(key, every)}"


def _nearest(word, known) -> str:
    close = difflib.get_close_matches(word, list(known), n=1)
    listed = f"; known: {', '.join(known)}"
    return f": did you mean {close[0]!r}?" if close else listed

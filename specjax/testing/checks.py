"""What a certificate checks: every rule on every shape of draft, every drafter, every parameter."""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from specjax.accept import RULES, default_rule
from specjax.draft import DRAFTERS, Host
from specjax.draft.host import Loaded
from specjax.testing.drafters import TreeDrafter
from specjax.testing.loop_sampler import CHUNK, Settings
from specjax.testing.tables import TABLES, VOCABULARY
from specjax.testing.transformer import Transformer

BUDGETS = {"fast": 30, "full": 60}
DRAFTED = 3
MAX_CONTEXT = 64
GREEDY: Settings = ({"temperature": 0.0},)

CHAIN = "chain"
# Parents of the nodes of a draft, the root first.
SHAPES = {
    CHAIN: (-1, 0, 1, 2),
    "tree": (-1, 0, 0, 1, 1),
    "siblings": (-1, 0, 0),
    "deep tree": (-1, 0, 0, 1, 2, 3),
}
SHAPES_OF_BUDGET = {"fast": (CHAIN, "tree"), "full": tuple(SHAPES)}

# Tables on which the first rounds both accept and reject; the exact laws are summed over all.
TELLING = ("trigram", "zeros", "near_zeros", "markov", "ties", "point_masses")
# All but those that leave nothing to chance.
RANDOM = tuple(name for name, table in TABLES.items() if np.count_nonzero(table.law()) > 1)
# Those on which a rule that is not lossless is far from the target's law.
TELLING_LOSSES = ("near_zeros", "markov", "trigram")

# Options of each drafter's `build`, and the model it is tried on.
RECIPES: dict[str, tuple[dict[str, Any], str]] = {
    "none": ({}, "trigram"),
    "ngram": ({"num_speculative_tokens": DRAFTED, "prompt_lookup_min": 1}, "trigram"),
    "draft_model": ({"num_speculative_tokens": DRAFTED, "model": "draft"}, "trigram"),
    "early_exit": ({"num_speculative_tokens": DRAFTED, "exit_layer": 1}, "transformer"),
}
MODELS = {**TABLES, "transformer": Transformer()}


class Echo:
    """A user's processor that favours the token that came last, in JAX and in NumPy."""

    def __call__(self, logits: Float[Array, " V"], past: Any) -> Float[Array, " V"]:
        last = jnp.take(past.tokens, past.length - 1)
        return logits + 0.7 * (jnp.arange(logits.shape[-1]) == last)

    def reference(self, logits: Any, history: Any) -> Any:
        return logits + 0.7 * (np.arange(len(logits)) == history[-1])


# Every part that can be absent from a program is present, and idle but for the processor: the
# checks of the parameters differ in values only, and share one program.
IDLE: dict[str, Any] = {
    "top_k": 0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "logit_bias": {},
    "bad_words": ((VOCABULARY, 0), (VOCABULARY, 0, 0)),
    "min_tokens": 0,
    "stop_token_ids": (-1,),
    "grammar": np.zeros((3, VOCABULARY), int),
    "logits_processor": Echo(),
    "num_speculative_tokens": DRAFTED,
}
PARAMETERS: dict[str, tuple[dict[str, Any], ...]] = {
    "temperature, top_k": ({"temperature": 0.7, "top_k": 2},),
    "top_p, min_p": ({"temperature": 1.2, "top_p": 0.9, "min_p": 0.3},),
    "penalties": ({"repetition_penalty": 1.4, "presence_penalty": 0.4, "frequency_penalty": 0.3},),
    "logit_bias, allowed_token_ids": ({"logit_bias": {0: 1.0}, "allowed_token_ids": (0, 2)},),
    "bad_words": ({"bad_words": ((0, 1), (2, 2, 0))},),
    "min_tokens, stop_token_ids": ({"min_tokens": 2, "stop_token_ids": (2,)},),
    "grammar": ({"grammar": np.array([[1, 2, 0], [-1, 2, 0], [1, -1, 0]])},),
    "logits_processor": ({},),
    "rows side by side": (
        {"temperature": 0.0},
        {"num_speculative_tokens": 0},
        {"num_speculative_tokens": 1, "top_k": 2},
        {"temperature": 0.8, "repetition_penalty": 1.5},
        {"bad_words": ((0, 0), (1, 2, 1)), "banned_token_ids": (2,)},
    ),
}


@dataclass(frozen=True)
class Check:
    """One rule with one drafter on one model, and what is asked of its rows.

    ``is_of_rule`` marks the checks that stand for a rule on a shape, one each.
    """

    rule: str
    drafter: str
    shape: str
    model: str
    settings: Settings = ({},)
    asks: str = ""
    is_of_rule: bool = False

    @property
    def name(self) -> str:
        parts = [self.rule, self.drafter, self.shape, self.model, self.asks]
        return ", ".join(part for part in parts if part)

    def build(self) -> tuple[Any, Any]:
        """The drafter and its parameters."""
        model = MODELS[self.model]
        if self.drafter == "tree":
            return TreeDrafter(SHAPES[self.shape]), model.draft_params
        options, _ = RECIPES[self.drafter]

        def load(_):
            return Loaded(model.target, model.draft_params, MAX_CONTEXT)

        host = Host(model.target, model.params, model.vocabulary, MAX_CONTEXT, CHUNK, load)
        return tuple(DRAFTERS[self.drafter](host, **options))


def checks(
    budget: str,
    rules: Sequence[str] = (),
    drafters: Sequence[str] = (),
    registry: Mapping[str, Any] = RULES,
) -> list[Check]:
    """The checks of a budget, those of certain rules and drafters only where any are named.

    Drafters and parameters are checked under rules of the registry only. Raises ValueError for
    names that are unknown, and where nothing is left to check.
    """
    require_known("budget", [budget], BUDGETS)
    require_known("rule", rules, registry)
    require_known("drafter", drafters, DRAFTERS)
    every = [*_of_rules(budget, registry), *_of_drafters(), *_of_parameters(budget)]
    chosen = [
        check
        for check in every
        if check.rule in (rules or registry) and (not drafters or check.drafter in drafters)
    ]
    if not chosen and not rules and not drafters:
        raise ValueError("no check has a rule of the registry: give it one at least")
    _refuse_left_out("rule", rules, {check.rule for check in chosen}, "drafters", drafters)
    _refuse_left_out("drafter", drafters, {check.drafter for check in chosen}, "rules", rules)
    return chosen


def _refuse_left_out(kind, named, checked, others, among) -> None:
    left_out = [name for name in named if name not in checked]
    if left_out:
        raise ValueError(
            f"no check has the {kind} {left_out[0]!r} with the {others} {', '.join(among)}: leave "
            "one of them out"
        )


def _of_rules(budget: str, registry: Mapping[str, Any]) -> Iterator[Check]:
    """Each rule on each shape that it allows; the tables take turns."""
    every = itertools.cycle(TELLING if budget == "fast" else RANDOM)
    losing = itertools.cycle(TELLING_LOSSES)
    for name, rule in registry.items():
        tables = every if rule.lossless else losing
        for shape in SHAPES_OF_BUDGET[budget]:
            if shape != CHAIN and not rule.trees:
                continue
            drafter = "draft_model" if shape == CHAIN else "tree"
            settings, asks = (GREEDY, "temperature 0") if rule.greedy_only else (({},), "")
            yield Check(name, drafter, shape, next(tables), settings, asks, is_of_rule=True)


def _of_drafters() -> Iterator[Check]:
    """The other drafters, each with the rule that `specjax.generate` gives it."""
    for name in DRAFTERS:
        if name == "draft_model":
            continue
        _, model = RECIPES[name]
        rule = default_rule(name not in ("none", "ngram"))
        yield Check(rule, name, CHAIN, model)


def _of_parameters(budget: str) -> Iterator[Check]:
    """Each sampling parameter, with the rule for chains drawn from a law; at length on trees too.

    What a node's law depends on is its own ancestors, which siblings are not.
    """
    ways = [(default_rule(True), "draft_model", CHAIN), ("recursive", "tree", "tree")]
    for rule, drafter, shape in ways if budget == "full" else ways[:1]:
        for asks, settings in PARAMETERS.items():
            whole = tuple(IDLE | one for one in settings)
            yield Check(rule, drafter, shape, "trigram", whole, asks)


def require_known(kind: str, names: Iterable[str], registry: Iterable[str]) -> None:
    """Raises ValueError for a name that is not in the registry."""
    unknown = [name for name in names if name not in registry]
    if unknown:
        raise ValueError(f"unknown {kind} {unknown[0]!r}; known: {', '.join(registry)}")

"""What is found out about one check: its exact law, its sampled law, identity with plain output."""

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from specjax import tree
from specjax.accept import RULES
from specjax.draft import NoDraft
from specjax.testing.checks import MODELS, SHAPES, Check
from specjax.testing.exact import exact_law
from specjax.testing.joint import JointLawResult, joint_law_test, plan_of
from specjax.testing.loop_sampler import LoopSampler, settings_law
from specjax.testing.pearson import Fit
from specjax.testing.power_analysis import rows_needed, tilted, worst_direction
from specjax.testing.tables import DEPTH, TABLES, Table

ROWS_A_CALL = 50_000


@dataclass(frozen=True)
class Evidence:
    """Of one check; None is what cannot be asked of its rule.

    Attributes:
        exact_error: the largest total variation between a round's law and the target's.
        fit: the statistic of the sampled joint law, through the whole loop.
        independent: whether its rows are, as far as that can be seen.
        different: rows that are not plain decoding's with the same keys, of ``compared``.
    """

    exact_error: float | None
    fit: Fit
    independent: bool = True
    different: int | None = None
    compared: int = 0


def calls_of(rows: int) -> tuple[int, int]:
    """At least ``rows`` rows as calls of one size, so that one program draws them all."""
    calls = math.ceil(rows / ROWS_A_CALL)
    return calls, math.ceil(rows / calls)


def gather(check: Check, rules: Any, tv: float, family: int, seed: int) -> Evidence:
    """All evidence on one check, of ``family``, from as many rows as find a bias of ``tv``.

    ``rules`` maps the names of rules to rules, as `specjax.accept.RULES` does.
    """
    rule = rules[check.rule]
    drafter, params = check.build()
    model = MODELS[check.model]
    sampler = LoopSampler(model, DEPTH, rule, drafter, params, check.settings)
    result = sampled(sampler, settings_law(model, DEPTH, check.settings), tv, family, seed)
    found = result.fit, result.independent
    if hasattr(rule, "stop_law"):
        return Evidence(_of_round(check, rule), *found)
    if rule.draws != "coupled" and not rule.greedy_only:
        return Evidence(None, *found)
    compared = calls_of(rows_needed(tv, checks=family))[1]
    plain = LoopSampler(model, DEPTH, RULES["matching"], NoDraft(), None, check.settings)
    differs = np.any(np.asarray(sampler(seed, compared)) != np.asarray(plain(seed, compared)), 1)
    return Evidence(None, *found, int(differs.sum()), compared)


def _of_round(check: Check, rule: Any) -> float | None:
    if not check.is_of_rule:
        return None
    tables = TABLES.values() if rule.lossless else [TABLES[check.model]]
    return exact_error(rule, SHAPES[check.shape], tables)


def sampled(sampler: LoopSampler, law: Any, tv: float, family: int, seed: int) -> JointLawResult:
    """The test of a sampler by calls of one size, for all laws, so that programs are shared."""
    _, size = calls_of(rows_needed(tv, checks=family))
    rows = plan_of(law, tv=tv, checks=family).rows
    whole = math.ceil(rows / size) * size
    return joint_law_test(sampler, law, rows=whole, checks=family, rows_a_call=size, seed=seed)


def exact_error(
    rule: Any, parents: tuple[int, ...], tables: Iterable[Table] = tuple(TABLES.values())
) -> float:
    """The largest total variation of one round's law from the target's, over some tables.

    In float64, by summing over every draft of this shape, every stop and every next token.
    """
    # What the noise does is out of its sight, so that coupled drafts are any others to it.
    draws = "sample" if rule.draws == "coupled" else rule.draws
    depth = 1 + int(tree.depth(jnp.array(parents)).max())
    errors = []
    for table in tables:
        law = exact_law(rule, *_contexts(table, depth), np.array(parents, np.int32), draws)
        errors.append(float(np.abs(np.asarray(law.joint) - np.asarray(law.target)).sum() / 2))
    return max(errors)


def _contexts(
    table: Table, depth: int
) -> tuple[Float[np.ndarray, "C V"], Float[np.ndarray, "C V"]]:
    """Log-laws of target and draft after each sequence of fewer than ``depth`` tokens."""
    last_two = [
        (*table.prompt, *output)[-2:]
        for length in range(depth)
        for output in itertools.product(range(table.vocabulary), repeat=length)
    ]
    rows = tuple(np.array(last_two).T)
    with np.errstate(divide="ignore"):
        return _normalised(table.logits[rows]), _normalised(table.draft_logits[rows])


def _normalised(logits) -> Float[np.ndarray, "C V"]:
    weights = np.exp(logits.astype(np.float64))
    return np.log(weights / weights.sum(-1, keepdims=True))


def biased_table(table: Table, tv: float) -> Table:
    """A table whose joint law is ``tv`` from that of ``table``, in the first token's law alone."""
    before = table.prompt[-2:]
    weights = np.exp(table.logits[before].astype(np.float64))
    law = weights / weights.sum()
    low, high = 0.0, 2 * tv
    for _ in range(40):
        middle = (low + high) / 2
        logits = table.logits.copy()
        logits[before] = np.log(tilted(law, worst_direction(law), middle))
        biased = Table(f"{tv:.1%} from another", logits, table.draft_logits, table.prompt)
        distance = np.abs(biased.law() - table.law()).sum() / 2
        low, high = (middle, high) if distance < tv else (low, middle)
    return biased

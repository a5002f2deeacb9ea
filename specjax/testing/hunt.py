"""What finds a mutant: the exact law, the sampled law, identity with plain decoding, invariants.

Each check answers whether it has found a fault in what a `Mutant` runs.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Int

from specjax import loop, noise
from specjax.accept import Matching
from specjax.draft import NoDraft
from specjax.recompute import Recompute
from specjax.sampling import Sampling
from specjax.testing.drafters import TreeDrafter
from specjax.testing.exact import exact_law, num_contexts
from specjax.testing.faulty_drafters import FaultyDrafter
from specjax.testing.faulty_targets import SumOfSlots
from specjax.testing.joint import joint_law_test
from specjax.testing.quick_compilation import jit_quickly
from specjax.testing.tables import DEPTH, PROMPT, TABLES, VOCABULARY, second_order
from specjax.types import Request, SpecState

# Rows that the sampled law is judged by, and the p-value below which it is broken.
ROWS_OF_BUDGET = {"fast": 25_000, "full": 250_000}
ROWS_A_CALL = 25_000
BROKEN = 1e-9
MISTAKE = 1e-6
# Rows and tokens that are compared, or whose invariants are watched.
COMPARED, LONG = 256, 12
CHUNK = 8

CHAIN = (-1, 0, 1, 2)


@dataclass(frozen=True)
class Mutant:
    """What is run, with one of the arguments wrong.

    Attributes:
        fault: what is wrong, in a sentence.
        caught_by: the check that must find it, a name in `CHECKS`.
        passes: a weaker check that does not.
        exact_shape: parents for the exact law, where they are not the drafter's.
        settings: sampling parameters of all rows, by their names in `Sampling.create`.
        end: the id that ends a row.
        table: the name of the target and draft model in `specjax.testing.tables.TABLES`.
        times_rows: how many times a budget's rows the sampled law needs to show the fault.
    """

    fault: str
    caught_by: str
    passes: str
    rule: Any
    drafter: Any = TreeDrafter(CHAIN)
    exact_shape: tuple[int, ...] | None = None
    target: Any = Recompute(second_order)
    step: Callable[..., SpecState] = loop.step
    settings: tuple[tuple[str, Any], ...] = ()
    end: int | None = None
    table: str = "trigram"
    times_rows: int = 1

    def __post_init__(self):
        for name in (self.caught_by, self.passes):
            if name not in CHECKS:
                raise ValueError(f"unknown check {name!r}; known: {', '.join(CHECKS)}")


class Decoded(NamedTuple):
    """Rows of output, how long each is, and whether the cache's invariant held in every round."""

    tokens: Int[Array, "B T"]
    length: Int[Array, " B"]
    finish: Int[Array, " B"]
    in_step: Bool[Array, ""]


def run_checks(mutant: Mutant, budget: str = "fast", seed: int = 0) -> dict[str, bool]:
    """Which of its two checks find a mutant: ``caught_by`` should, ``passes`` should not."""
    rows = ROWS_OF_BUDGET[budget]
    return {name: CHECKS[name](mutant, rows, seed) for name in (mutant.caught_by, mutant.passes)}


def exact(mutant: Mutant, rows: int, seed: int) -> bool:
    """Whether the exact law of one round is wrong. It sees the rule alone."""
    drafter = mutant.drafter.drafter if _is_faulty(mutant.drafter) else mutant.drafter
    shape = np.array(mutant.exact_shape or drafter.parents, np.int32)
    # What the noise does is out of its sight, so that coupled drafts are any others to it.
    draws = "sample" if mutant.rule.draws == "coupled" else mutant.rule.draws
    rng = np.random.default_rng(seed)
    contexts = num_contexts(VOCABULARY, drafter.max_depth + 1)
    for _ in range(4):
        logits = 1.5 * rng.standard_normal((2, contexts, VOCABULARY))
        # Tokens that p or q excludes are where an epsilon shows.
        logits[rng.random(logits.shape) < 0.1] = -np.inf
        logits[..., 0] = np.maximum(logits[..., 0], -3.0)
        log_p, log_q = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        if exact_law(mutant.rule, log_p, log_q, shape, draws).error > MISTAKE:
            return True
    return False


def sampled(mutant: Mutant, rows: int, seed: int) -> bool:
    """Whether the joint law of the first tokens is wrong, through the whole loop."""

    def sampler(seed, rows):
        return decode(mutant, rows, DEPTH, seed).tokens

    law = TABLES[mutant.table].law(DEPTH, **_for_law(mutant))
    rows *= mutant.times_rows
    result = joint_law_test(sampler, law, rows=rows, rows_a_call=ROWS_A_CALL, seed=seed)
    return result.p_value < BROKEN


def identity(mutant: Mutant, rows: int, seed: int) -> bool:
    """Whether the tokens are not plain decoding's with the same keys.

    At temperature 0, unless the rule promises as much when it samples.
    """
    samples = mutant.rule.draws == "coupled"
    settings = {} if samples else {"temperature": 0.0}
    ours = decode(mutant, COMPARED, LONG, seed, settings)
    plain = decode(mutant, COMPARED, LONG, seed, settings, plain=True)
    return bool(jnp.any(ours.tokens != plain.tokens))


def invariant(mutant: Mutant, rows: int, seed: int) -> bool:
    """Whether the cache is not one token behind the context after a round, or a row goes on after
    its end.
    """
    result = decode(mutant, COMPARED, LONG, seed)
    output, emitted = np.asarray(result.tokens), np.asarray(result.length) - len(PROMPT)
    goes_on = np.any((output[:, :-1] == mutant.end) & (np.arange(1, LONG) < emitted[:, None]))
    return bool(goes_on) or not bool(result.in_step)


CHECKS: Mapping[str, Callable[[Mutant, int, int], bool]] = MappingProxyType(
    {"exact": exact, "sampled": sampled, "identity": identity, "invariant": invariant}
)


def decode(
    mutant: Mutant,
    rows: int,
    depth: int,
    seed: int,
    settings: Mapping[str, Any] | None = None,
    *,
    plain: bool = False,
) -> Decoded:
    """``depth`` tokens of output a row; those beyond a row's end are 0. Without drafts if plain."""
    table = TABLES[mutant.table]
    keys = noise.row_keys(jax.random.key(seed), rows)
    settings = dict(mutant.settings) | dict(settings or {})
    request = Request(
        prompt_length=jnp.full((rows,), len(PROMPT), jnp.int32),
        limit=jnp.full((rows,), len(PROMPT) + depth, jnp.int32),
        eos_ids=jnp.full((rows, 1), -1 if mutant.end is None else mutant.end, jnp.int32),
        keys=keys,
        sampling=Sampling.create(rows, **settings),
    )
    prompt = jnp.broadcast_to(jnp.array(PROMPT, jnp.int32), (rows, len(PROMPT)))
    tokens = jnp.pad(prompt, ((0, 0), (0, depth)))
    params = table.params[:2] if isinstance(mutant.target, SumOfSlots) else table.params
    run = mutant.step, mutant.target, mutant.drafter, mutant.rule
    drafter_params: Any = table.draft_params
    if _is_faulty(mutant.drafter):
        drafter_params = table.draft_params, keys
    if plain:
        # Without a draft every rule takes a plain step: one program serves them all.
        run, drafter_params = (loop.step, mutant.target, NoDraft(), Matching()), None
    return _decode(*run, params, drafter_params, request, tokens)


@functools.partial(jit_quickly, static_argnums=(0, 1, 2, 3))
def _decode(step, target, drafter, rule, params, drafter_params, request, tokens) -> Decoded:
    def goes_on(carry):
        return jnp.any(~carry[0].done)

    def one_round(carry):
        state, in_step = carry
        state = step(target, params, drafter, drafter_params, rule, request, state)
        return state, in_step & jnp.all(state.cache.length == state.context.length - 1)

    state = loop.start(target, params, drafter, drafter_params, rule, request, tokens, chunk=CHUNK)
    state, in_step = lax.while_loop(goes_on, one_round, (state, jnp.bool(True)))
    output = state.context.tokens[:, len(PROMPT) :]
    return Decoded(output, state.context.length, state.finish, in_step)


def _is_faulty(drafter) -> bool:
    return isinstance(drafter, FaultyDrafter)


def _for_law(mutant: Mutant) -> dict[str, Any]:
    ends = {} if mutant.end is None else {"stop_token_ids": (mutant.end,)}
    return dict(mutant.settings) | ends

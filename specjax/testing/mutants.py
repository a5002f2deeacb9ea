"""Faults that a proof of losslessness must find: one wrong line each, and everything else right.

A check that never failed proves nothing. Each mutant names the check that finds it and a weaker
one that it passes: why the weaker one alone would not do.
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
from specjax.accept import (
    Block,
    Coupled,
    Matching,
    Recursive,
    Rejection,
    Traversal,
)
from specjax.draft import NoDraft
from specjax.recompute import Recompute
from specjax.sampling import Sampling
from specjax.testing import faulty_parts as parts
from specjax.testing import faulty_rules as rules
from specjax.testing.drafters import TreeDrafter
from specjax.testing.exact import exact_law, num_contexts
from specjax.testing.faulty_parts import FaultyDrafter
from specjax.testing.faulty_rules import FaultyDecision, FaultyLaw
from specjax.testing.joint import joint_law_test
from specjax.testing.tables import DEPTH, PROMPT, TABLES, VOCABULARY, second_order
from specjax.types import Request, SpecState

# Rows that the sampled law is judged by, and the p-value below which it is broken.
ROWS_OF_BUDGET = {"fast": 100_000, "full": 1_000_000}
ROWS_A_CALL = 50_000
BROKEN = 1e-9
MISTAKE = 1e-6
# Rows and tokens that are compared, or whose invariants are watched.
COMPARED, LONG = 256, 12
CHUNK = 8

CHAIN = (-1, 0, 1, 2)
SIBLINGS = (-1, 0, 0)
TREE = (-1, 0, 0, 1, 1, 2, 2)
PADDED = (-1, 0, -1, 1)


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
    params = table.params[:2] if isinstance(mutant.target, parts.SumOfSlots) else table.params
    run = mutant.step, mutant.target, mutant.drafter, mutant.rule
    drafter_params: Any = table.draft_params
    if _is_faulty(mutant.drafter):
        drafter_params = table.draft_params, keys
    if plain:
        # Without a draft every rule takes a plain step: one program serves them all.
        run, drafter_params = (loop.step, mutant.target, NoDraft(), Matching()), None
    return _decode(*run, params, drafter_params, request, tokens)


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
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


def _in_exact_law(fault: str, rule: Any, **options: Any) -> Mutant:
    return Mutant(fault, "exact", "identity", rule, **options)


def _in_sampled_law(fault: str, rule: Any, **options: Any) -> Mutant:
    return Mutant(fault, "sampled", "exact", rule, **options)


_PENALISED = (("frequency_penalty", 1.5),)

MUTANTS: Mapping[str, Mutant] = MappingProxyType(
    {
        "residual is p": _in_exact_law(
            "after a rejection the next token is drawn from the target's law",
            FaultyLaw(Rejection(), follows=rules.target_for_residual),
        ),
        "residual softmaxed": _in_exact_law(
            "the residual's mass is put through a softmax",
            FaultyLaw(Rejection(), follows=rules.softmaxed_residual),
        ),
        "residual unscaled": _in_exact_law(
            "the residual of a block is [P - Q]+, not [p P - Q]+",
            FaultyLaw(Block(), follows=rules.unscaled_residual),
        ),
        "bonus of the row before": _in_exact_law(
            "the next token comes from the law after the last node's parent",
            FaultyLaw(Rejection(), follows=rules.row_before),
        ),
        "block accepts by prefix": _in_exact_law(
            "each node of a block is accepted with p_i, not with h_i",
            FaultyLaw(Block(), stops=rules.stops_by_prefix),
        ),
        "siblings reversed": _in_exact_law(
            "siblings are verified against the order in which they were drawn",
            FaultyLaw(Recursive(), stops=rules.last_sibling_first),
            drafter=TreeDrafter(SIBLINGS),
        ),
        "padding below the root": _in_exact_law(
            "a padding node is taken for a child of the root",
            FaultyLaw(Recursive(), stops=rules.padding_below_root),
            drafter=TreeDrafter(TREE, ragged=True),
            exact_shape=PADDED,
        ),
        "padding in a chain": _in_exact_law(
            "the padding of a chain is taken for drafted tokens",
            FaultyLaw(Rejection(), stops=rules.padding_in_chain),
            drafter=TreeDrafter(CHAIN, ragged=True),
            exact_shape=(-1, 0, -1, -1),
        ),
        "impossible node drawn": _in_exact_law(
            "a node of probability 0 can be drawn",
            FaultyLaw(Rejection(), stops=rules.impossible_stops),
        ),
        "argmax as sample": _in_sampled_law(
            "the most likely token is drafted and said to be drawn from the softmax",
            Rejection(),
            drafter=FaultyDrafter(TreeDrafter(CHAIN), parts.argmax_as_sample),
        ),
        "law before temperature": _in_sampled_law(
            "the draft's law is reported without the temperature",
            Block(),
            drafter=FaultyDrafter(TreeDrafter(CHAIN), parts.law_before_temperature),
            settings=(("temperature", 0.5),),
        ),
        "top-p before temperature": _in_sampled_law(
            "top-p comes before temperature in the draft's law, and after it in the target's",
            Block(),
            drafter=FaultyDrafter(TreeDrafter(CHAIN), parts.top_p_before_temperature),
            settings=(("temperature", 0.5), ("top_p", 0.7)),
        ),
        "one vector for all parents": _in_sampled_law(
            "the children of sibling parents are drawn with one vector of noise",
            Traversal(),
            drafter=FaultyDrafter(TreeDrafter(TREE), parts.one_vector_for_all_parents),
        ),
        "reranked": _in_sampled_law(
            "a drawn child is dropped because others score higher",
            Recursive(),
            drafter=FaultyDrafter(TreeDrafter(SIBLINGS), parts.best_of_more),
        ),
        "noise by own position": _in_sampled_law(
            "the noise of a draft is keyed by the token's own position",
            Block(),
            drafter=FaultyDrafter(TreeDrafter(CHAIN), parts.noise_by_own_position),
        ),
        "dropped as unlikely": _in_sampled_law(
            "a drafted token is dropped because of its own probability",
            Block(),
            drafter=FaultyDrafter(TreeDrafter(CHAIN), changes=parts.drops_unlikely),
        ),
        "drafted by token noise": _in_sampled_law(
            "drafts come from the noise that the residual is drawn with",
            Matching(draws="coupled"),
        ),
        "accepted by draft noise": _in_sampled_law(
            "draft and acceptance share a key",
            FaultyDecision(Rejection(), rules.accepts_by_draft_noise),
        ),
        "accepted by row": _in_sampled_law(
            "the acceptance noise is the same in every round",
            FaultyDecision(Rejection(), rules.accepts_by_row),
        ),
        "rejected drafts counted": _in_sampled_law(
            "the penalties count rejected drafts as output",
            Rejection(),
            drafter=FaultyDrafter(TreeDrafter(CHAIN)),
            step=parts.rejected_drafts_counted,
            settings=_PENALISED,
        ),
        "siblings counted": _in_sampled_law(
            "a node's siblings are part of its history",
            Recursive(),
            drafter=TreeDrafter(SIBLINGS),
            target=parts.SiblingsPenalised(Recompute(second_order), _PENALISED[0][1]),
            settings=_PENALISED,
        ),
        "coupled with fresh noise": Mutant(
            "the token after the path is drawn anew, not with its position's noise",
            "sampled",
            "invariant",
            FaultyDecision(Coupled(), rules.fresh_noise),
        ),
        "coupled by round": Mutant(
            "coupled noise is keyed by the round: lossless, but no longer plain decoding's tokens",
            "identity",
            "sampled",
            FaultyDecision(Coupled(), rules.token_noise_by_round),
        ),
        "stale slots visible": Mutant(
            "slots that a wider block has left behind stay visible",
            "identity",
            "invariant",
            Coupled(),
            drafter=FaultyDrafter(
                TreeDrafter(CHAIN, ragged=True), changes=parts.every_second_round
            ),
            target=parts.SumOfSlots(stale=True),
        ),
        "batch in lockstep": Mutant(
            "the cache of every row advances by the batch's minimum",
            "invariant",
            "exact",
            Rejection(),
            target=parts.Lockstep(Recompute(second_order)),
        ),
        "bonus after the end": Mutant(
            "what a round emits after the end of a row stays",
            "invariant",
            "exact",
            Rejection(),
            step=parts.bonus_after_end,
            end=2,
        ),
    }
)

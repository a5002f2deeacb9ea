"""How often each rule accepts, beside the most that any lossless rule could.

Drafts are drawn by `specjax.choose` and judged by the rules themselves. A rule in law form tells
how probable acceptance is for each draft, and only the drafts are left to chance; of the others
the decisions are counted. The bounds are those of `specjax.testing.transport`.
"""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int, Key

from specjax import noise, tree
from specjax.accept import RULES
from specjax.bench.table import table
from specjax.choose import chooser
from specjax.sampling import Sampling
from specjax.testing.exact import num_contexts
from specjax.testing.quick_compilation import jit_quickly
from specjax.testing.transport import chain_optimum, lump, optimum
from specjax.types import NO_PARENT, NO_TOKEN, ROOT, Draft, Rule

DRAFTED, CHAIN_DRAFTED = (1, 2, 4, 8), (1, 2, 4)
DRAFTS_DRAWN = 256
PEAKED, FLAT = 4.0, 1.0
# The first k of more drawn so are k drawn so.
NESTED = ("sample", "top_k", "coupled")
SIBLINGS, CHAIN = "siblings", "chain"
BOUND = "best possible"


@dataclass(frozen=True)
class Laws:
    """Pairs of a target's and a draft's law: at one node [P, V], or in all contexts [P, C, V].

    Contexts are numbered as in `specjax.testing.exact`.
    """

    name: str
    log_p: Float[np.ndarray, "P *C V"]
    log_q: Float[np.ndarray, "P *C V"]


@dataclass(frozen=True)
class Acceptance:
    """Accepted tokens a round of one rule, and the most that its drafts allow.

    ``shape`` is "siblings" (of which one can be accepted) or "chain". The errors are standard
    errors over the pairs of laws; that of ``share`` is small where a rule and its bound vary
    together.
    """

    laws: str
    rule: str
    draws: str
    shape: str
    drafted: int
    accepted: float
    error: float
    optimum: float
    share: float
    share_error: float


def synthetic_laws(
    scale: float, *, vocabulary: int = 50, contexts: int | None = None, pairs: int = 64
) -> Laws:
    """Laws with normal logits of this ``scale``, the draft's 0.8 away; `FLAT` and `PEAKED` ones.

    ``contexts`` asks for a law in each, for `chain_acceptance`.
    """
    rng = np.random.default_rng(0)
    shape = (pairs, vocabulary) if contexts is None else (pairs, contexts, vocabulary)
    logits = scale * rng.standard_normal(shape)
    shifted = logits + 0.8 * rng.standard_normal(shape)
    name = {PEAKED: "peaked", FLAT: "flat"}.get(scale, f"logits of scale {scale}")
    return Laws(name, _log_softmax(logits), _log_softmax(shifted))


def sibling_acceptance(
    laws: Laws,
    rules: Mapping[str, Rule] | None = None,
    *,
    drafted: Sequence[int] = DRAFTED,
    drafts: int = DRAFTS_DRAWN,
    seed: int = 0,
) -> list[Acceptance]:
    """Acceptance at one node with ``drafted`` siblings; rules for chains only with one draft.

    ``drafts`` are drawn for each pair of laws. ``rules`` are the lossless ones of `RULES` by
    default. Raises ValueError where the laws cannot draw so many siblings.
    """
    rules = _sampling_rules() if rules is None else rules
    bounds = functools.cache(lambda k, sets: _node_optima(laws, k, sets))
    drawn = functools.cache(lambda draws, k: _siblings(draws, k, drafts, laws.log_q, keys))
    keys = jax.random.split(jax.random.key(seed), len(laws.log_p))
    rows = []
    for name, rule in rules.items():
        allowed = drafted if rule.trees else [k for k in drafted if k == 1]
        widest = max(allowed, default=0)
        for k in allowed:
            bound = bounds(k, _sets(rule.draws))
            tokens, log_q = drawn(rule.draws, max(drafted) if rule.draws in NESTED else k)
            index = jnp.arange(widest + 1)
            parents = jnp.where((index > 0) & (index <= k), ROOT, NO_PARENT)
            missing = max(widest - tokens.shape[-1], 0)
            tokens = jnp.pad(tokens[..., :widest], ((0, 0), (0, 0), (1, missing)))
            seen = laws.log_p[:, None, None]
            accepted = _accepted(rule, tokens, parents, log_q, seen, keys)
            rows.append(_row(laws, name, rule, SIBLINGS, k, accepted, bound))
    return rows


def chain_acceptance(
    laws: Laws,
    rules: Mapping[str, Rule] | None = None,
    *,
    drafted: Sequence[int] = CHAIN_DRAFTED,
    drafts: int = DRAFTS_DRAWN,
    seed: int = 0,
) -> list[Acceptance]:
    """Accepted tokens of chains of ``drafted`` drawn tokens; ``laws`` hold every context."""
    rules = _sampling_rules() if rules is None else rules
    drawn = functools.cache(lambda draws: _chains(draws, longest, drafts, *given, keys))
    keys = jax.random.split(jax.random.key(seed), len(laws.log_p))
    given = laws.log_p, laws.log_q
    p, q = (np.exp(law) for law in given)
    longest, rows = max(drafted), []
    for length in drafted:
        bounds = np.array([chain_optimum(*pair, length) for pair in zip(p, q, strict=True)])
        parents = tree.padded_chain(jnp.array([length]), longest + 1)[0]
        for name, rule in rules.items():
            if _sets(rule.draws) == "sample":
                tokens, log_q, seen = drawn(rule.draws)
                accepted = _accepted(rule, tokens, parents, log_q, seen, keys)
                rows.append(_row(laws, name, rule, CHAIN, length, accepted, bounds))
    return rows


def synthetic_report(
    rules: Mapping[str, Rule] | None = None,
    *,
    pairs: int = 64,
    drafts: int = DRAFTS_DRAWN,
    seed: int = 0,
) -> list[Acceptance]:
    """Every lossless rule on flat and on peaked laws, on siblings and on chains."""
    rows = []
    for scale in (FLAT, PEAKED):
        rows += sibling_acceptance(
            synthetic_laws(scale, pairs=pairs), rules, drafts=drafts, seed=seed
        )
        contexts = num_contexts(8, 4)
        laws = synthetic_laws(scale, vocabulary=8, contexts=contexts, pairs=pairs)
        rows += chain_acceptance(laws, rules, drafts=drafts, seed=seed)
    return rows


def acceptance_table(rows: Sequence[Acceptance]) -> str:
    """Markdown: accepted tokens with their standard error, and their share of the bound.

    There is a line for each rule on each kind of laws, and below these one for each bound.
    """
    groups = {}
    for row in rows:
        rules, bounds = groups.setdefault((row.laws, row.shape), ({}, {}))
        accepted = f"{row.accepted:.3f} ± {row.error:.3f}, {row.share:.1%}"
        rules.setdefault((row.rule, row.draws), {})[row.drafted] = accepted
        bounds.setdefault((BOUND, _sets(row.draws)), {})[row.drafted] = f"{row.optimum:.3f}"
    drafted = sorted({row.drafted for row in rows})
    cells = [
        [*group, *name, *(line.get(k, "") for k in drafted)]
        for group, parts in groups.items()
        for part in parts
        for name, line in part.items()
    ]
    return table(["laws", "shape", "rule", "drafts drawn", *map(str, drafted)], cells)


def _sampling_rules():
    return {name: rule for name, rule in RULES.items() if rule.lossless and not rule.greedy_only}


def _sets(draws):
    """Which law of sets, as `transport` names them, the drafts have."""
    return "sample" if draws == "coupled" else draws


def _node_optima(laws, k, draws):
    def bound(log_p, log_q):
        p, q = (np.exp(np.asarray(law, np.float64)) for law in (log_p, log_q))
        p, q = p / p.sum(), q / q.sum()
        return optimum(*(lump(p, q) if draws == "sample" else (p, q)), k, draws)

    return np.array([bound(*pair) for pair in zip(laws.log_p, laws.log_q, strict=True)])


def _row(laws, name, rule, shape, drafted, accepted, bounds) -> Acceptance:
    share = accepted.mean() / bounds.mean()
    return Acceptance(
        laws=laws.name,
        rule=name,
        draws=rule.draws,
        shape=shape,
        drafted=drafted,
        accepted=float(accepted.mean()),
        error=_standard_error(accepted),
        optimum=float(bounds.mean()),
        share=float(share),
        share_error=_standard_error((accepted - share * bounds) / bounds.mean()),
    )


def _standard_error(values):
    if values.size < 2:
        return float("nan")
    return float(np.std(values, ddof=1) / np.sqrt(values.size))


@functools.partial(jit_quickly, static_argnums=0)
def _accepted(
    rule: Rule,
    tokens: Int[Array, "P R N"],
    parents: Int[Array, " N"],
    log_q: Float[Array, "P #R #N V"] | None,
    log_p: Float[Array, "P #R #N V"],
    keys: Key[Array, " P"],
) -> Float[Array, " P"]:
    """Mean accepted tokens of each pair of laws, which are gone through one at a time."""
    drafts, nodes = tokens.shape[1:]

    def of_draft(tokens, log_q, log_p, key):
        draft = Draft(tokens, parents, log_q)
        stop_law = getattr(rule, "stop_law", None)
        if stop_law is not None:
            log_stop, _ = stop_law(draft, log_p)
            return jnp.sum(jnp.exp(log_stop) * tree.depth(parents))
        decided = rule(draft, log_p, noise.Noise(key, jnp.zeros((), jnp.int32)))
        return decided.num_accepted.astype(log_p.dtype)

    def of_pair(pair):
        tokens, log_q, log_p, key = pair
        log_q = None if log_q is None else at_nodes(log_q)
        keys = noise.row_keys(key, drafts)
        return jnp.mean(jax.vmap(of_draft)(tokens, log_q, at_nodes(log_p), keys))

    def at_nodes(law):
        return jnp.broadcast_to(law, (drafts, nodes, law.shape[-1]))

    return lax.map(of_pair, (tokens, log_q, log_p, keys))


@functools.partial(jit_quickly, static_argnums=(0, 1, 2))
def _siblings(
    draws: str, width: int, drafts: int, log_q: Float[Array, "P V"], keys: Key[Array, " P"]
) -> tuple[Int[Array, "P {drafts} {width}"], Float[Array, "P 1 1 V"] | None]:
    """Children of the root for each pair of laws, and the law that they were drawn from."""

    def of_pair(pair):
        log_q, key = pair
        choose = _chooser(draws, noise.row_keys(key, drafts))
        logits = jnp.broadcast_to(log_q, (drafts, 1, log_q.shape[-1]))
        root = jnp.full((drafts, 1), ROOT)
        tokens, _, law = choose(logits, root, jnp.full((drafts, 1, 1), NO_TOKEN), width)
        return tokens[:, 0], None if law is None else law[:1]

    return lax.map(of_pair, (log_q, keys))


@functools.partial(jit_quickly, static_argnums=(0, 1, 2))
def _chains(
    draws: str,
    length: int,
    drafts: int,
    log_p: Float[Array, "P C V"],
    log_q: Float[Array, "P C V"],
    keys: Key[Array, " P"],
) -> tuple[
    Int[Array, "P {drafts} N"], Float[Array, "P {drafts} N V"], Float[Array, "P {drafts} N V"]
]:
    """Chains below the root for each pair of laws, and both laws at their nodes."""
    vocabulary = log_p.shape[-1]

    def of_pair(pair):
        log_p, log_q, key = pair
        choose = _chooser(draws, noise.row_keys(key, drafts))

        def deeper(carry, node):
            context, path = carry
            logits = log_q.at[context].get(mode="clip")[:, None]
            chosen, _, _ = choose(logits, jnp.full((drafts, 1), node), path[:, None])
            token = chosen[:, 0, 0]
            path = lax.dynamic_update_slice(path, token[:, None], (0, node))
            return (vocabulary * context + token + 1, path), (context, token)

        nothing = jnp.zeros((drafts,), jnp.int32), jnp.full((drafts, length), NO_TOKEN)
        # One step more than is drafted: the last node has a context, and its child is not used.
        _, (contexts, drawn) = lax.scan(deeper, nothing, jnp.arange(length + 1))
        tokens = jnp.pad(drawn[:-1].T, ((0, 0), (1, 0)))
        laws = (law.at[contexts.T].get(mode="clip") for law in (log_q, log_p))
        return tokens, *laws

    return lax.map(of_pair, (log_p, log_q, keys))


def _chooser(draws, keys):
    rows = keys.shape[0]
    return chooser(draws, Sampling.create(rows), keys, jnp.zeros((rows,), jnp.int32))


def _log_softmax(logits):
    shifted = logits - logits.max(-1, keepdims=True)
    return (shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))).astype(np.float32)

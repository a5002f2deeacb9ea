"""The speculative decoding loop: prefill, then draft, verify, accept and commit until all rows end.

`step` is one round. `run` repeats it in a ``lax.while_loop`` on the device: to the end for
`generate`, some rounds at a time for a host that streams. Every strategy is an argument.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Int

from specjax import tree
from specjax.choose import chooser
from specjax.history import History, Seen, drafted_paths
from specjax.noise import Noise
from specjax.prefill import Prefilled, prefill
from specjax.sampling import first_argmax, log_probs
from specjax.scores import acceptance, certain, no_scores, put, score
from specjax.shaping import shape
from specjax.types import (
    LENGTH,
    NO_PARENT,
    RUNNING,
    STOPPED,
    AcceptResult,
    Context,
    Draft,
    Drafter,
    Feedback,
    Request,
    Rule,
    Scores,
    SpecState,
    Stats,
    Target,
    Trace,
)
from specjax.walk import walk


def slots_needed(buffer: int, nodes: int, chunk: int) -> int:
    """Cache slots for ``buffer`` tokens: a block is written behind the last before it is cut.

    Without the slack ``dynamic_update_slice`` would clamp, and destroy committed slots in silence.
    """
    return buffer + max(nodes, chunk)


def start(
    target: Target,
    params: Any,
    drafter: Drafter,
    drafter_params: Any,
    rule: Rule,
    request: Request,
    tokens: Int[Array, "P L"],
    *,
    chunk: int,
    prompt_of_row: Int[Array, " B"] | None = None,
) -> SpecState:
    """Prefills the prompts, draws each row's first token, and readies the drafter.

    ``prompt_of_row`` lets several rows go on from one prompt's prefill; None is a row a prompt.
    """
    slots = slots_needed(tokens.shape[1], drafter.num_nodes, chunk)
    prompt = prompts_of(tokens, request, prompt_of_row)
    empty = target.init_cache(tokens.shape[0], slots)
    prefilled = prefill(target, params, prompt, empty, chunk=chunk, taps=drafter.taps)
    return begin(drafter, drafter_params, rule, request, tokens, prefilled, slots, prompt_of_row)


def prompts_of(
    tokens: Int[Array, "P L"], request: Request, prompt_of_row: Int[Array, " B"] | None
) -> Context:
    """The prompts to prefill, each as long as its longest row says; rows that idle say 1."""
    if prompt_of_row is None:
        return Context(tokens, request.prompt_length)
    length = jnp.zeros(tokens.shape[:1], jnp.int32)
    return Context(tokens, length.at[prompt_of_row].max(request.prompt_length))


def begin(
    drafter: Drafter,
    drafter_params: Any,
    rule: Rule,
    request: Request,
    tokens: Int[Array, "P L"],
    prefilled: Prefilled,
    slots: int,
    prompt_of_row: Int[Array, " B"] | None = None,
) -> SpecState:
    """Draws the first token of each row after its prompt, and readies the drafter."""
    cache, logits, features = prefilled
    if prompt_of_row is not None:
        tokens, logits = tokens[prompt_of_row], logits[prompt_of_row]
        cache = cache.take(prompt_of_row)
        features = None if features is None else features[prompt_of_row]
    prompt = Context(tokens, request.prompt_length)
    state = _first_token(rule, request, prompt, cache, logits, drafter)
    draft_state = drafter.init(drafter_params, state.context, features, slots)
    return replace(state, draft_state=draft_state)


def step(
    target: Target,
    params: Any,
    drafter: Drafter,
    drafter_params: Any,
    rule: Rule,
    request: Request,
    state: SpecState,
) -> SpecState:
    """One round: draft, one target forward over the draft, accept, commit.

    A row that is done takes part in the arithmetic and commits nothing.
    """
    context = state.context
    root = context.length - 1
    looks = partial(_history, request, context, state.seen)
    choose = chooser(rule.draws, request.sampling, request.keys, root, looks)
    draft, draft_state = drafter.draft(drafter_params, state.draft_state, context, choose)
    draft = _limited(draft, request.max_drafted)
    verified = _verify_narrowest(target, params, drafter, rule, request, state, draft)
    cache, result, emitted, features, logits, scores = verified

    full = result.num_accepted + 1
    count, finish = _cut(emitted, full, context, request, state.finish)
    path = None if drafter.is_chain else result.path
    feedback = Feedback(emitted, count, result.path, features, logits)
    return SpecState(
        context=_append(context, emitted, count),
        cache=cache.commit(path, count),
        draft_state=drafter.update(drafter_params, draft_state, feedback),
        finish=finish,
        stats=_tally(state, drafter, draft, full, count),
        seen=state.seen.after(request.sampling, emitted, count),
        scores=put(state.scores, scores, context.length, count),
    )


def run(
    target: Target,
    params: Any,
    drafter: Drafter,
    drafter_params: Any,
    rule: Rule,
    request: Request,
    state: SpecState,
    rounds: Int[ArrayLike, ""],
    record: int = 0,
) -> tuple[SpecState, Trace]:
    """Rounds until every row is done, at most ``rounds`` of them, in one device program.

    The first ``record`` rounds are also told one by one, for a host that cuts rows at stop strings.
    """
    batch = request.limit.shape[0]
    empty = jnp.zeros((record, batch), jnp.int32)

    def goes_on(carry):
        ran, state, _ = carry
        return jnp.any(~state.done) & (ran < rounds)

    def body(carry):
        ran, state, trace = carry
        after = step(target, params, drafter, drafter_params, rule, request, state)
        if record:
            trace = _note(trace, ran, state.stats, after.stats)
        return ran + 1, after, trace

    ran, state, trace = lax.while_loop(
        goes_on, body, (jnp.int32(0), state, Trace(empty, empty, jnp.int32(0)))
    )
    return state, replace(trace, rounds=ran)


def _note(trace: Trace, ran, before: Stats, after: Stats) -> Trace:
    def put(rows, row):
        return lax.dynamic_update_index_in_dim(rows, row.astype(rows.dtype), ran, 0)

    return replace(
        trace,
        emitted=put(trace.emitted, after.emitted - before.emitted),
        drafted=put(trace.drafted, jnp.sum(after.drafted - before.drafted, axis=1)),
    )


def verify(
    rule: Rule,
    draft: Draft,
    logits: Float[Array, "B N V"],
    request: Request,
    context: Context,
    seen: Seen,
) -> tuple[AcceptResult, Float[Array, "B N V"]]:
    """Lets the rule decide for every row; a greedy row takes the target's most likely tokens.

    Returns also the logits that it decided by: those that the sampling parameters have shaped.
    """
    sampling = request.sampling
    paths = drafted_paths(draft, draft.tokens.shape[1] - 1)
    shaped = shape(sampling, logits.astype(jnp.float32), _history(request, context, seen, paths))
    greedy = jax.vmap(walk)(draft, first_argmax(shaped))

    def sampled():
        log_p = log_probs(sampling, shaped)
        result = jax.vmap(rule)(draft, log_p, Noise(request.keys, context.length - 1))
        return jax.tree.map(
            lambda taken, other: jnp.where(_rows(sampling.greedy, taken), taken, other),
            greedy,
            result,
        )

    return lax.cond(jnp.all(sampling.greedy), lambda: greedy, sampled), shaped


def _history(request, context, seen, path) -> History | None:
    """What the sampling parameters are told of nodes with these drafted ancestors."""
    if not request.sampling.looks_back:
        return None
    return History(context, request.prompt_length, seen, path)


def _limited(draft: Draft, depths: Int[Array, " B"] | None) -> Draft:
    """The draft without the levels below ``depths``; those drawn above them stay as they are."""
    if depths is None:
        return draft
    beyond = tree.depth(draft.parents) > depths[:, None]
    return replace(draft, parents=jnp.where(beyond, NO_PARENT, draft.parents))


def _scored(rule, draft, result, emitted, logits, shaped, request) -> Scores | None:
    """Scores of what each row's path emits, where they are asked for."""
    if request.logprobs is None:
        return None
    log_p = log_probs(request.sampling, shaped)
    by_rule = jax.vmap(partial(acceptance, rule))(draft, log_p, result)
    decided = jax.vmap(certain)(draft, result)
    decided = jnp.where(jnp.isnan(by_rule), by_rule, decided)
    likely = jnp.where(request.sampling.greedy[:, None], decided, by_rule)
    wide = logits.astype(jnp.float32)
    return score(draft, result, emitted, wide, log_p, likely, request.logprobs)


def _verify_narrowest(target, params, drafter, rule, request, state, draft):
    """Verifies the columns that some running row uses, in the narrowest of the drafter's widths.

    Each width is a loop of no trip or one. A branch would say the same, but XLA copies a cache
    that passes through one in which layers are scanned: all of it, at every layer, on TPU.
    """
    depths = drafter.max_depth + 1

    def at_width(width, cache):
        part = jax.tree.map(lambda x: x[:, :width], draft)
        parents = None if drafter.is_chain else part.parents
        out = target(params, part.tokens, parents, cache, taps=drafter.taps)
        result, shaped = verify(rule, part, out.logits, request, state.context, state.seen)
        path = _to_width(result.path, depths, edge=True)
        result = replace(result, path=path)
        emitted = _emitted(part, result)
        scores = _scored(rule, part, result, emitted, out.logits, shaped, request)
        features = logits = None
        if "features" in drafter.needs:
            features = tree.take_path(out.features, path)
        if "logits" in drafter.needs:
            logits = _to_width(out.logits, drafter.num_nodes)
        return out.cache, result, emitted, features, logits, scores

    widths = drafter.widths
    if len(widths) == 1:
        return at_width(widths[0], state.cache)
    real = tree.reachable(draft.parents) & ~state.done[:, None]
    used = jnp.max(jnp.where(real, jnp.arange(1, drafter.num_nodes + 1), 1))
    narrowest = jnp.sum(used > jnp.asarray(widths[:-1]))
    _, *decided = jax.eval_shape(lambda cache: at_width(widths[0], cache), state.cache)
    verified = (state.cache, *jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), decided))
    for index, width in enumerate(widths):
        trips = (narrowest == index).astype(jnp.int32)
        verified = lax.fori_loop(
            0, trips, lambda _, carry, width=width: at_width(width, carry[0]), verified
        )
    return verified


def _to_width(x, width, edge=False):
    x = x[:, :width]
    padding = [(0, 0), (0, width - x.shape[1])] + [(0, 0)] * (x.ndim - 2)
    return jnp.pad(x, padding, mode="edge" if edge else "constant")


def _emitted(draft: Draft, result: AcceptResult) -> Int[Array, "B D"]:
    """The accepted tokens in order, then the next token, then anything."""
    accepted = tree.take_path(draft.tokens, result.path[:, 1:])
    drafted = jnp.concatenate([accepted, jnp.zeros_like(result.next_token)[:, None]], axis=1)
    last = jnp.arange(drafted.shape[1]) == result.num_accepted[:, None]
    return jnp.where(last, result.next_token[:, None], drafted)


def _cut(emitted, full, context, request, finish):
    """How many tokens each row commits, and whether it ends: at EOS, or where its room ends."""
    place = jnp.arange(emitted.shape[1])
    is_eos = jnp.any(emitted[:, :, None] == request.eos_ids[:, None, :], axis=-1)
    to_eos = jnp.min(jnp.where(is_eos, place + 1, emitted.shape[1] + 1), axis=1)
    room = request.limit - context.length
    active = finish == RUNNING
    count = jnp.where(active, jnp.minimum(jnp.minimum(full, to_eos), room), 0)
    stopped = active & (count == to_eos)
    ended = jnp.where(stopped, STOPPED, jnp.where(count >= room, LENGTH, RUNNING))
    return count, jnp.where(active, ended, finish)


def _append(context: Context, emitted: Int[Array, "B D"], count: Int[Array, " B"]) -> Context:
    place = jnp.arange(emitted.shape[1])
    beyond = context.tokens.shape[1]
    column = jnp.where(place < count[:, None], context.length[:, None] + place, beyond)
    row = jnp.arange(emitted.shape[0])[:, None]
    tokens = context.tokens.at[row, column].set(emitted, mode="drop")
    return Context(tokens, context.length + count)


def _tally(state: SpecState, drafter: Drafter, draft: Draft, full, count) -> Stats:
    stats, active = state.stats, ~state.done
    level = jnp.arange(1, drafter.max_depth + 1)
    depth = jnp.where(tree.reachable(draft.parents), tree.depth(draft.parents), 0)
    drafted = jnp.any(depth[:, :, None] == level, axis=1) & active[:, None]
    accepted = (level <= jnp.minimum(full - 1, count)[:, None]) & active[:, None]
    return Stats(
        rounds=stats.rounds + active,
        emitted=stats.emitted + count,
        drafted=stats.drafted + drafted,
        accepted=stats.accepted + accepted,
        draft_forwards=stats.draft_forwards + active * drafter.forwards,
        truncated=stats.truncated + jnp.where(active, full - count, 0),
    )


def _first_token(rule, request, prompt: Context, cache, logits, drafter) -> SpecState:
    """Draws and commits the token after each prompt: a plain step whose root is cached already."""
    batch = prompt.length.shape[0]
    root = Draft(tokens=jnp.zeros((batch, 1), jnp.int32), parents=tree.chain(batch, 1))
    logits = logits[:, None]
    seen = Seen.of_prompts(request.sampling, prompt, logits.shape[-1])
    result, shaped = verify(rule, root, logits, request, prompt, seen)
    idle = jnp.where(request.limit > prompt.length, RUNNING, LENGTH).astype(jnp.int32)
    emitted = result.next_token[:, None]
    count, finish = _cut(emitted, jnp.ones((batch,), jnp.int32), prompt, request, idle)
    scores = _scored(rule, root, result, emitted, logits, shaped, request)
    if scores is not None:
        nothing = no_scores(batch, prompt.tokens.shape[1], request.logprobs)
        scores = put(nothing, scores, prompt.length, count)
    zeros = jnp.zeros((batch,), jnp.int32)
    by_depth = jnp.zeros((batch, drafter.max_depth), jnp.int32)
    return SpecState(
        context=_append(prompt, emitted, count),
        cache=cache,
        draft_state=None,
        finish=finish,
        stats=Stats(zeros, zeros, by_depth, by_depth, zeros, zeros),
        seen=seen.after(request.sampling, emitted, count),
        scores=scores,
    )


def _rows(flag, like):
    return flag.reshape(flag.shape + (1,) * (like.ndim - 1))

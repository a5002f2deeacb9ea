"""Speculative generation on arrays: target, drafter, rule and keys in, tokens and counts out."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import Mesh
from jaxtyping import Array, Int, Key

from specjax import noise
from specjax.accept import RULES, default_rule
from specjax.draft.none import NoDraft
from specjax.programs import Programs
from specjax.sampling import GREEDY_BELOW, Sampling
from specjax.sampling_params import LARGEST
from specjax.types import Drafter, Generation, Request, Rule, Target


def generate(
    target: Target,
    params: Any,
    prompt: Int[Array, "B P"],
    key: Key[Array, "*B"],
    *,
    drafter: Drafter | None = None,
    drafter_params: Any = None,
    rule: Rule | str | None = None,
    sampling: Sampling | None = None,
    max_new_tokens: int | Int[Array, " B"] = 128,
    eos_ids: tuple[int, ...] | Int[Array, "B Z"] = (),
    prompt_length: Int[Array, " B"] | None = None,
    buffer: int | None = None,
    mesh: Mesh | None = None,
    prefill_chunk: int = 64,
    logprobs: int | None = None,
    max_drafted: Int[Array, " B"] | int | None = None,
) -> Generation:
    """Generates to the end of every row in one device program.

    Args:
        target: the model, a hashable value (`specjax.models.DecoderTarget`, `Recompute`, ...).
        params: its parameters; new values of the same shapes do not recompile.
        prompt: token ids, right-padded where ``prompt_length`` is given.
        key: one key, of which row ``i`` uses ``fold_in(key, i)``, or one a row. Consumed.
        drafter: None decodes plainly.
        drafter_params: the drafter's parameters, if it has any.
        rule: a rule or its name; None takes "block" for chains drawn from a law, "traversal" for
            such trees, else "matching".
        sampling: parameters a row; None is temperature 1.
        max_new_tokens: one number or one a row, traced.
        eos_ids: ids that end a row; one list, or [B, Z] padded with -1.
        prompt_length: tokens of each row's prompt, at least 1; None is the whole width.
        buffer: room for prompt and output together; rows end there with finish LENGTH. None is
            the next power of two that holds prompt and ``max_new_tokens``.
        mesh: devices to shard over, with axes "data" and "model" (`specjax.sharding.make_mesh`).
            Parameters that don't lie on it yet are moved there at every call.
        prefill_chunk: prompt tokens forwarded at once.
        logprobs: score each token of the output, with so many alternatives (0 or more).
        max_drafted: levels of the draft that a row takes at most, traced; 0 decodes it plainly.

    Returns:
        tokens [B, buffer] with each row's prompt and output, lengths, finish codes (STOPPED,
        LENGTH), the counts of `specjax.types.Stats` and, if asked for, `specjax.types.Scores`.

    Raises:
        ValueError: naming the argument, before anything is compiled. Under a caller's ``jit``
            only what is static can be checked.
    """
    prompt = jnp.atleast_2d(jnp.asarray(prompt, jnp.int32))
    batch, width = prompt.shape
    if batch == 0 or width == 0:
        raise ValueError(
            f"the prompt has shape {prompt.shape}: give at least one row and one token"
        )
    drafter = NoDraft() if drafter is None else drafter
    rule = _resolve_rule(rule, drafter)
    sampling = Sampling.create(batch) if sampling is None else sampling
    lengths = jnp.full((batch,), width) if prompt_length is None else jnp.asarray(prompt_length)
    lengths = lengths.astype(jnp.int32)
    budget = jnp.broadcast_to(jnp.asarray(max_new_tokens, jnp.int32), (batch,))
    buffer = _resolve_buffer(buffer, width, budget)
    _check_rows(sampling, batch)
    _check_values(rule, sampling, lengths, width, budget, buffer)
    _check_length(target, jnp.minimum(lengths + budget, buffer))
    _check_logprobs(logprobs)
    request = Request(
        prompt_length=lengths,
        limit=jnp.minimum(lengths + budget, buffer),
        eos_ids=_eos_rows(eos_ids, batch),
        keys=noise.row_keys(key, batch) if jnp.ndim(key) == 0 else key,
        sampling=sampling,
        max_drafted=_resolve_max_drafted(max_drafted, batch),
        logprobs=logprobs,
    )
    tokens = jnp.pad(prompt[:, :buffer], ((0, 0), (0, max(buffer - width, 0))))
    programs = Programs(target, drafter, rule, prefill_chunk, mesh=mesh)
    params, drafter_params = programs.place_all(params, drafter_params)
    state = programs.start(params, drafter_params, request, tokens)
    state, _ = programs.advance(params, drafter_params, request, state, np.int32(2**31 - 1))
    context = state.context
    return Generation(
        context.tokens, context.length, lengths, state.finish, state.stats, state.scores
    )


def next_power_of_two(size: int) -> int:
    """The smallest power of two that is at least ``size``."""
    return 1 << max(size - 1, 0).bit_length()


def _resolve_rule(rule, drafter) -> Rule:
    name = default_rule(drafter.has_law, drafter.is_chain) if rule is None else rule
    if not isinstance(name, str):
        return name
    if name not in RULES:
        raise ValueError(f"unknown rule {name!r}; known: {', '.join(RULES)}")
    return RULES[name]


def _resolve_buffer(buffer, width, budget) -> int:
    if buffer is not None:
        return int(buffer)
    if isinstance(budget, Tracer):
        raise ValueError("max_new_tokens is traced: give buffer, the room for prompt and output")
    return next_power_of_two(width + int(jnp.max(budget)))


def _eos_rows(eos_ids, batch) -> Int[Array, "B Z"]:
    ids = jnp.asarray(eos_ids, jnp.int32)
    if ids.ndim < 2:
        ids = jnp.broadcast_to(ids.reshape(1, -1), (batch, ids.size))
    return ids if ids.shape[1] else jnp.full((batch, 1), -1, jnp.int32)


def _check_values(rule, sampling, lengths, width, budget, buffer):
    def some(condition) -> bool:
        return not isinstance(condition, Tracer) and bool(jnp.any(condition))

    if some(lengths < 1):
        raise ValueError("a prompt has no token: every row needs at least one (BOS, for example)")
    if some(lengths > width):
        raise ValueError(f"prompt_length is {int(lengths.max())}, the prompt has {width} columns")
    if some(lengths >= buffer):
        raise ValueError(
            f"a prompt of {int(lengths.max())} tokens leaves no room in a buffer of {buffer}"
        )
    if some(budget < 1):
        raise ValueError(f"max_new_tokens is {int(budget.min())}: it must be at least 1")
    if rule.greedy_only and some(sampling.temperature >= GREEDY_BELOW):
        raise ValueError("rule 'greedy' would ignore the temperature: use 'coupled' or another")
    # Said of what must hold, so that NaN is refused too.
    if some(~((sampling.temperature >= 0) & (sampling.temperature <= LARGEST))):
        raise ValueError(f"temperature must be 0 or more, at most {LARGEST:g}")
    if sampling.truncation is not None:
        _check_truncation(sampling.truncation, some)
    if sampling.penalties is not None:
        _check_penalties(sampling.penalties, some)
    if sampling.bias is not None:
        if some(jnp.all(sampling.bias == -jnp.inf, axis=-1)):
            raise ValueError("bias bans every token of a row: leave at least one")
        if some(~((jnp.abs(sampling.bias) <= LARGEST) | (sampling.bias == -jnp.inf))):
            raise ValueError(f"bias must be of numbers of at most {LARGEST:g}, or -inf")


def _check_truncation(truncation, some):
    if some(~((truncation.top_p > 0) & (truncation.top_p <= 1))):
        raise ValueError("top_p must lie in (0, 1]")
    if some(~((truncation.min_p >= 0) & (truncation.min_p <= 1))):
        raise ValueError("min_p must lie in [0, 1]")


def _check_length(target, limit):
    longest = getattr(target, "max_length", None)
    if longest is None or isinstance(limit, Tracer) or int(limit.max()) <= longest:
        return
    raise ValueError(
        f"prompt and output may be {int(limit.max())} tokens long, and the model has no more than "
        f"{longest} positions: give a shorter prompt, or lower max_new_tokens or buffer"
    )


def _check_penalties(penalties, some):
    if some(~((penalties.repetition >= 1 / LARGEST) & (penalties.repetition <= LARGEST))):
        raise ValueError(
            f"repetition_penalty must be more than 0, from {1 / LARGEST:g} to {LARGEST:g}; 1 is off"
        )
    for name in ("presence", "frequency"):
        if some(~(jnp.abs(getattr(penalties, name)) <= LARGEST)):
            raise ValueError(f"{name}_penalty must be a number of at most {LARGEST:g}")


def _check_rows(sampling, batch):
    """Parameters of other rows than the prompt's would be an error deep inside, or stretched."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(replace(sampling, grammar=None)):
        if leaf.shape[:1] != (batch,):
            name = jax.tree_util.keystr(path).strip(".")
            raise ValueError(
                f"sampling.{name} has the shape {leaf.shape} and the prompt {batch} rows: make it "
                f"with Sampling.create({batch}, ...)"
            )


def _resolve_max_drafted(max_drafted, batch) -> Int[Array, " B"] | None:
    if max_drafted is None:
        return None
    levels = jnp.asarray(max_drafted)
    if not jnp.issubdtype(levels.dtype, jnp.integer) or levels.shape not in ((), (1,), (batch,)):
        raise ValueError(
            f"max_drafted is {levels.dtype}{list(levels.shape)}: give an integer, or one a row"
        )
    if not isinstance(levels, Tracer) and bool(jnp.any(levels < 0)):
        raise ValueError(f"max_drafted is {int(levels.min())}: 0 decodes plainly, None is no limit")
    return jnp.broadcast_to(levels.astype(jnp.int32), (batch,))


def _check_logprobs(logprobs) -> None:
    is_count = isinstance(logprobs, int) and not isinstance(logprobs, bool) and logprobs >= 0
    if logprobs is not None and not is_count:
        raise ValueError(f"logprobs is {logprobs!r}: give 0 or more alternatives, or None")

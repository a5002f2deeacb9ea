"""Speculative generation on arrays: target, drafter, rule and keys in, tokens and counts out."""

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
from specjax.row_values import INT32_MAX, check_ids, integers, known, of_rows
from specjax.sampling import GREEDY_BELOW, Sampling
from specjax.sampling_checks import check_rows, check_values
from specjax.sampling_params import require_integer
from specjax.shaping import check_processor
from specjax.types import NO_TOKEN, Drafter, Generation, Request, Rule, Target


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
    prompt = _resolve_prompt(prompt)
    batch, width = prompt.shape
    drafter = _resolve_drafter(drafter)
    rule = _resolve_rule(rule, drafter)
    require_integer("prefill_chunk", prefill_chunk, at_least=1)
    programs = Programs(target, drafter, rule, prefill_chunk, mesh=mesh)
    sampling = Sampling.create(batch) if sampling is None else sampling
    lengths = integers("prompt_length", width if prompt_length is None else prompt_length)
    lengths = of_rows("prompt_length", lengths, batch)
    budget = of_rows("max_new_tokens", integers("max_new_tokens", max_new_tokens), batch)
    buffer = _resolve_buffer(buffer, width, budget)
    _check_lengths(lengths, width, budget, buffer)
    _check_length(target, jnp.minimum(lengths + budget, buffer))
    _check_logprobs(logprobs)
    _check_key(key, batch)
    check_rows(sampling, batch)
    if rule.greedy_only and (known(sampling.temperature) >= GREEDY_BELOW).any():
        raise ValueError("rule 'greedy' would ignore the temperature: use 'coupled' or another")
    request = Request(
        prompt_length=lengths,
        limit=jnp.minimum(lengths + budget, buffer),
        eos_ids=_eos_rows(eos_ids, batch),
        keys=noise.row_keys(key, batch) if jnp.ndim(key) == 0 else key,
        sampling=sampling,
        max_drafted=_resolve_max_drafted(max_drafted, batch),
        logprobs=logprobs,
    )
    _check_vocabulary(programs.vocabulary(params, batch, buffer), prompt, request, buffer)
    tokens = jnp.pad(prompt[:, :buffer], ((0, 0), (0, max(buffer - width, 0))))
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


def _resolve_prompt(prompt) -> Int[Array, "B P"]:
    prompt = jnp.atleast_2d(integers("prompt", prompt))
    if prompt.ndim > 2 or prompt.size == 0:
        raise ValueError(
            f"the prompt has shape {prompt.shape}: give at least one row and one token, [B, P]"
        )
    return prompt


def _resolve_drafter(drafter) -> Drafter:
    drafter = NoDraft() if drafter is None else drafter
    if isinstance(drafter, type) or not hasattr(drafter, "num_nodes"):
        raise ValueError(f"drafter is {drafter!r}: give one of specjax.draft, or None")
    return drafter


def _resolve_rule(rule, drafter) -> Rule:
    name = default_rule(drafter.has_law, drafter.is_chain) if rule is None else rule
    if isinstance(name, str) and name not in RULES:
        raise ValueError(f"unknown rule {name!r}; known: {', '.join(RULES)}")
    found = RULES[name] if isinstance(name, str) else name
    if isinstance(found, type) or not hasattr(found, "draws"):
        raise ValueError(f"rule is {found!r}: give a rule, or a name of {', '.join(RULES)}")
    return found


def _resolve_buffer(buffer, width, budget) -> int:
    if buffer is not None:
        require_integer("buffer", buffer, at_least=1)
        return int(buffer)
    if isinstance(budget, Tracer):
        raise ValueError("max_new_tokens is traced: give buffer, the room for prompt and output")
    return next_power_of_two(width + int(jnp.max(budget)))


def _eos_rows(eos_ids, batch) -> Int[Array, "B Z"]:
    ids = integers("eos_ids", eos_ids)
    ids = of_rows("eos_ids", ids.reshape(1) if ids.ndim == 0 else ids, batch, "Z")
    return ids if ids.shape[1] else jnp.full((batch, 1), NO_TOKEN, jnp.int32)


def _check_lengths(lengths, width, budget, buffer):
    lengths, budget = known(lengths), known(budget)
    if (lengths < 1).any():
        raise ValueError("a prompt has no token: every row needs at least one (BOS, for example)")
    if (lengths > width).any():
        raise ValueError(f"prompt_length is {lengths.max()}, the prompt has {width} columns")
    if (lengths >= buffer).any():
        raise ValueError(
            f"a prompt of {lengths.max()} tokens leaves no room in a buffer of {buffer}"
        )
    if (budget < 1).any():
        raise ValueError(f"max_new_tokens is {budget.min()}: it must be at least 1")
    if (budget > INT32_MAX - width).any():
        raise ValueError(
            f"max_new_tokens is {budget.max()}, and with the prompt beyond 32 bits: give at most "
            f"{INT32_MAX - width}"
        )


def _check_key(key, batch):
    dtype = getattr(key, "dtype", None)
    if dtype is None or not jnp.issubdtype(dtype, jax.dtypes.prng_key):
        given = repr(key) if dtype is None else f"an array of {dtype}"
        raise ValueError(f"key is {given}: make one with jax.random.key, not PRNGKey")
    if key.shape not in ((), (batch,)):
        raise ValueError(
            f"key has the shape {key.shape} and the prompt {batch} rows: give one, or one a row"
        )


def _check_vocabulary(vocabulary, prompt, request, buffer):
    """What can only be told from the vocabulary; what pads a prompt may be anything."""
    lengths = known(request.prompt_length)
    if not isinstance(prompt, Tracer) and lengths.size:
        inside = np.arange(prompt.shape[1]) < lengths[:, None]
        check_ids("prompt", known(prompt)[inside], vocabulary)
    check_ids("eos_ids", request.eos_ids, vocabulary, NO_TOKEN)
    check_values(request.sampling, vocabulary)
    if request.sampling.processor is not None:
        check_processor(request.sampling.processor, vocabulary, buffer)


def _check_length(target, limit):
    longest = getattr(target, "max_length", None)
    if longest is None or isinstance(limit, Tracer) or int(limit.max()) <= longest:
        return
    raise ValueError(
        f"prompt and output may be {int(limit.max())} tokens long, and the model has no more than "
        f"{longest} positions: give a shorter prompt, or lower max_new_tokens or buffer"
    )


def _resolve_max_drafted(max_drafted, batch) -> Int[Array, " B"] | None:
    if max_drafted is None:
        return None
    levels = of_rows("max_drafted", integers("max_drafted", max_drafted), batch)
    if (known(levels) < 0).any():
        raise ValueError(f"max_drafted is {int(levels.min())}: 0 decodes plainly, None is no limit")
    return levels


def _check_logprobs(logprobs) -> None:
    is_count = isinstance(logprobs, int) and not isinstance(logprobs, bool) and logprobs >= 0
    if logprobs is not None and not is_count:
        raise ValueError(f"logprobs is {logprobs!r}: give 0 or more alternatives, or None")

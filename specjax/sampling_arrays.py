"""A group of rows as the arrays that the loop is given; what no row asks for is left out."""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from specjax.generation import next_power_of_two
from specjax.grammar import union
from specjax.penalties import Penalties
from specjax.requests import INT32_MAX, Row
from specjax.sampling import Sampling
from specjax.sampling_params import SamplingParams
from specjax.truncation import Truncation
from specjax.types import NO_TOKEN, Request

IDLE = SamplingParams(temperature=0.0)
# Rows of end ids are this wide at least, so that a few stop ids don't compile another program.
SMALLEST_ENDS = 8


def request_arrays(
    rows: Sequence[Row | None], buffer: int, eos_ids: Sequence[int], vocab_size: int
) -> Request:
    """What the loop is asked, a row each; None is a row that is done from the start."""
    busy = next(row for row in rows if row is not None)
    params = [IDLE if row is None else row.params for row in rows]
    ends = [() if row is None else row.params.ends(eos_ids) for row in rows]
    prompt = _integers(1 if row is None else len(row.prompt) for row in rows)
    budget = _integers(
        0 if row is None else min(row.params.max_tokens or buffer, buffer) for row in rows
    )
    return Request(
        prompt_length=prompt,
        limit=jnp.minimum(prompt + budget, buffer),
        eos_ids=jnp.asarray(padded(ends, SMALLEST_ENDS)),
        keys=jnp.stack([(busy if row is None else row).key for row in rows]),
        sampling=sampling_arrays(rows, ends, vocab_size),
        max_drafted=_integers(_most_drafted(one) for one in params),
        logprobs=_logprobs(params, vocab_size),
    )


def _most_drafted(params: SamplingParams) -> int:
    wanted = params.num_speculative_tokens
    return INT32_MAX if wanted is None else min(wanted, INT32_MAX)


def _logprobs(params, vocab_size: int) -> int | None:
    """Alternatives for all rows: a power of two or all, so that few numbers compile anew."""
    wanted = [one.logprobs for one in params if one.logprobs is not None]
    if not wanted:
        return None
    return min(next_power_of_two(max(wanted)), vocab_size) if max(wanted) else 0


def sampling_arrays(
    rows: Sequence[Row | None], ends: Sequence[Sequence[int]], vocab_size: int
) -> Sampling:
    """Parameters of each row; None is a row that is done from the start.

    ``ends`` holds the ids that end each row.
    """
    params = [IDLE if row is None else row.params for row in rows]
    grammar, grammar_start = _grammars(rows)
    functions = [one.logits_processor for one in params]
    processor = next((function for function in functions if function is not None), None)
    any_minimum = any(one.min_tokens for one in params)
    return Sampling(
        temperature=_floats(one.temperature for one in params),
        truncation=_truncation(params),
        bias=_bias(params, vocab_size),
        penalties=_penalties(params),
        min_tokens=_integers(min(one.min_tokens, INT32_MAX) for one in params)
        if any_minimum
        else None,
        ends=jnp.asarray(padded(ends)) if any_minimum else None,
        bad_words=_bad_words(rows),
        grammar=grammar,
        grammar_start=grammar_start,
        processed=None if processor is None else jnp.array([f is not None for f in functions]),
        processor=processor,
    )


def padded(lists: Sequence[Sequence[int]], smallest: int = 1) -> np.ndarray:
    """Lists of ids as rows, padded with -1 to a power of two, ``smallest`` at least."""
    width = next_power_of_two(max(smallest, *map(len, lists)))
    return np.array([[*ids, *[NO_TOKEN] * (width - len(ids))] for ids in lists], np.int32)


def _floats(values):
    return jnp.array(list(values), jnp.float32)


def _integers(values):
    return jnp.array(list(values), jnp.int32)


def _bias(params, vocab_size):
    if not any(one.logit_bias or one.banned_token_ids or one.allowed_token_ids for one in params):
        return None
    bias = np.zeros((len(params), vocab_size), np.float32)
    for row, one in zip(bias, params, strict=True):
        if one.allowed_token_ids is not None:
            row[:] = -np.inf
            row[list(one.allowed_token_ids)] = 0.0
        row[list(one.banned_token_ids)] = -np.inf
        for id, value in (one.logit_bias or {}).items():
            row[id] += value
    return jnp.asarray(bias)


def _truncation(params) -> Truncation:
    """Always there, so that a first request for it needs no program of its own."""
    return Truncation(
        top_k=_integers(min(max(one.top_k, 0), INT32_MAX) for one in params),
        top_p=_floats(one.top_p for one in params),
        min_p=_floats(one.min_p for one in params),
    )


def _penalties(params):
    strengths = [
        (one.repetition_penalty, one.presence_penalty, one.frequency_penalty) for one in params
    ]
    if all(one == (1.0, 0.0, 0.0) for one in strengths):
        return None
    return Penalties(*(_floats(part) for part in zip(*strengths, strict=True)))


def _bad_words(rows):
    words = [[] if row is None else row.bad_words for row in rows]
    if not any(words):
        return None
    most = next_power_of_two(max(map(len, words)))
    longest = next_power_of_two(max(len(ids) for own in words for ids in own))
    array = np.full((len(rows), most, longest), NO_TOKEN, np.int32)
    for row, own in zip(array, words, strict=True):
        for place, ids in zip(row, own, strict=False):
            place[longest - len(ids) :] = ids
    return jnp.asarray(array)


def _grammars(rows):
    grammars = [None if row is None else row.grammar for row in rows]
    if all(grammar is None for grammar in grammars):
        return None, None
    return union(grammars)

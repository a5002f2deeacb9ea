"""From what a user asks to the arrays of a group of rows: prompts, parameters, keys, ends."""

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import index
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Key

from specjax.detokenizer import Detokenizer
from specjax.grammar import Grammar
from specjax.metrics import Counts
from specjax.outputs import CompletionOutput
from specjax.sampling_params import SamplingParams, require_integer
from specjax.types import Scores

Prompt = str | Sequence[int] | np.ndarray | Array | Mapping[str, Any]
PROMPT_KEYS = ("prompt", "prompt_token_ids")
SMALLEST_BUFFER = 128
INT32_MAX = np.iinfo(np.int32).max


@dataclass
class Row:
    """One sample while it is decoded."""

    request: int
    index: int
    prompt: list[int]
    params: SamplingParams
    key: Any
    detokenizer: Detokenizer
    bad_words: list[list[int]] = field(default_factory=list)
    grammar: Grammar | None = None
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    pending_text: str = ""
    pending_ids: list[int] = field(default_factory=list)
    output: CompletionOutput | None = None
    counts: Counts | None = None
    scores: Scores | None = None
    ttft: float = 0.0


def seed_key(seed: int) -> Key[Array, ""]:
    """The key of a seed of up to 64 bits; `jax.random.key` would drop all but the lower 32.

    Raises ValueError for anything else.
    """
    require_integer("seed", seed, at_least=0)
    if seed >= 1 << 64:
        raise ValueError(f"seed is {seed}: it must be less than 2**64")
    words = jnp.array([int(seed) >> 32, int(seed) & 0xFFFFFFFF], jnp.uint32)
    return jax.random.wrap_key_data(words, impl="threefry2x32")


def listed(prompts: Any) -> list[Any]:
    """One prompt or many as a list of prompts."""
    if isinstance(prompts, str | Mapping) or not is_list_of_ids(prompts):
        return [prompts]
    prompts = list(prompts)
    is_one = bool(prompts) and _is_number(prompts[0])
    return [prompts] if is_one else prompts


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float | np.number) or getattr(value, "ndim", None) == 0


def params_of_each(sampling_params: Any, prompts: int) -> list[SamplingParams]:
    """The parameters of each of so many prompts; one for all is repeated."""
    if isinstance(sampling_params, SamplingParams):
        return [sampling_params] * prompts
    each = list(sampling_params) if isinstance(sampling_params, Sequence) else [sampling_params]
    for one in each:
        if not isinstance(one, SamplingParams):
            raise ValueError(f"{one!r} is no SamplingParams: give one, or one a prompt in a list")
    if len(each) != prompts:
        raise ValueError(f"{len(each)} SamplingParams for {prompts} prompts: give one or {prompts}")
    return each


def prompt_of_mapping(number: int, prompt: Mapping[str, Any]) -> Any:
    """Text or ids out of ``{"prompt": ...}`` or ``{"prompt_token_ids": ...}``."""
    unknown = [key for key in prompt if key not in PROMPT_KEYS]
    if unknown:
        raise ValueError(
            f"prompt {number} has the unknown key {unknown[0]!r}; known: {', '.join(PROMPT_KEYS)}"
        )
    ids = prompt.get("prompt_token_ids")
    return prompt.get("prompt", "") if ids is None else ids


def is_list_of_ids(prompt: Any) -> bool:
    """Whether it may hold token ids, in an order."""
    unordered_or_bytes = bytes | bytearray | memoryview | set | frozenset
    has_items = isinstance(prompt, Iterable) and getattr(prompt, "ndim", 1) > 0
    return has_items and not isinstance(prompt, unordered_or_bytes)


def token_id(number: int, token: Any) -> int:
    """A token id as an int; raises ValueError, naming the prompt, for anything else."""
    with contextlib.suppress(TypeError):
        if not isinstance(token, bool | np.bool_):
            return index(token)
    raise ValueError(f"prompt {number} has {token!r} where a token id, an integer, belongs")


def groups(rows: list[Row], size: int) -> Iterator[list[Row]]:
    """Consecutive rows, ``size`` at a time; the samples of one prompt together if they fit."""
    group: list[Row] = []
    for row in rows:
        room = size - len(group)
        if group and (room == 0 or (row.index == 0 and min(row.params.n, size) > room)):
            yield group
            group = []
        group.append(row)
    yield group


def distinct_prompts(group: list[Row]) -> dict[int, list[int]]:
    """The prompts of a group, each once, by the number of its request."""
    return {row.request: row.prompt for row in group}

"""What is refused of sampling parameters that are arrays, before anything is compiled."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from specjax.grammar import Grammar
from specjax.penalties import Penalties
from specjax.row_values import check_ids, known
from specjax.sampling import Sampling
from specjax.sampling_params import LARGEST, LARGEST_PENALTY
from specjax.truncation import Truncation
from specjax.types import NO_TOKEN


def check_rows(sampling: Any, batch: int) -> None:
    """Parameters of other rows than the prompt's would be an error deep inside, or stretched."""
    if not isinstance(sampling, Sampling):
        raise ValueError(f"sampling is {sampling!r}: make it with Sampling.create({batch}, ...)")
    for path, leaf in jax.tree_util.tree_leaves_with_path(replace(sampling, grammar=None)):
        if leaf.shape[:1] != (batch,):
            name = jax.tree_util.keystr(path).strip(".")
            raise ValueError(
                f"sampling.{name} has the shape {leaf.shape} and the prompt {batch} rows: make it "
                f"with Sampling.create({batch}, ...)"
            )


def check_values(sampling: Sampling, vocabulary: int) -> None:
    """Raises ValueError naming a parameter out of range; traced ones are skipped."""
    # Said of what must hold, so that NaN is refused too.
    _require(
        (known(sampling.temperature) >= 0) & (known(sampling.temperature) <= LARGEST),
        f"temperature must be 0 or more, at most {LARGEST:g}",
    )
    if sampling.truncation is not None:
        _check_truncation(sampling.truncation)
    if sampling.penalties is not None:
        _check_penalties(sampling.penalties)
    if sampling.bias is not None and not isinstance(sampling.bias, Tracer):
        _check_bias(sampling.bias)
    if sampling.min_tokens is not None:
        _require(known(sampling.min_tokens) >= 0, "min_tokens must be 0 or more")
        check_ids("ends", sampling.ends, vocabulary, NO_TOKEN)
    if sampling.bad_words is not None:
        _check_bad_words(sampling.bad_words, vocabulary)
    if sampling.grammar is not None:
        _check_start(sampling.grammar, sampling.grammar_start)


def _check_truncation(truncation: Truncation):
    top_k, top_p, min_p = map(known, (truncation.top_k, truncation.top_p, truncation.min_p))
    _require(top_k >= -1, "top_k must be at least 1, or 0 or -1, which are off")
    _require((top_p > 0) & (top_p <= 1), "top_p must lie in (0, 1]")
    _require((min_p >= 0) & (min_p <= 1), "min_p must lie in [0, 1]")


def _check_penalties(penalties: Penalties):
    repetition = known(penalties.repetition)
    _require(
        (repetition >= 1 / LARGEST) & (repetition <= LARGEST),
        f"repetition_penalty must be more than 0, from {1 / LARGEST:g} to {LARGEST:g}; 1 is off",
    )
    most = LARGEST_PENALTY
    for name in ("presence", "frequency"):
        small = np.abs(known(getattr(penalties, name))) <= most
        _require(small, f"{name}_penalty must lie in [{-most:g}, {most:g}]")


def _check_bias(bias):
    """Where the bias lies: it is as wide as the vocabulary."""
    if bool(jnp.any(jnp.all(bias == -jnp.inf, axis=-1))):
        raise ValueError("bias bans every token of a row: leave at least one")
    if bool(jnp.any(~((jnp.abs(bias) <= LARGEST) | (bias == -jnp.inf)))):
        raise ValueError(f"bias must be of numbers of at most {LARGEST:g}, or -inf")


def _check_bad_words(words, vocabulary):
    check_ids("bad_words", words, vocabulary, NO_TOKEN)
    padding = known(words) == NO_TOKEN
    _require(
        padding[..., :-1] | ~padding[..., 1:],
        "bad_words has -1 after a token: a word is padded at its start",
    )


def _check_start(grammar: Grammar, start):
    states = grammar.next_state.shape[0]
    _require(
        (known(start) >= 0) & (known(start) < states),
        f"grammar_start must be a state of the grammar, 0 to {states - 1}",
    )


def _require(holds: np.ndarray, sentence: str):
    if not holds.all():
        raise ValueError(sentence)

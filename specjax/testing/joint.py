"""Laws of whole sequences of tokens, and how often each sequence was generated.

Sequences are numbered with the last token counting fastest.
"""

import itertools

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float, Int

from specjax.types import Generation


def continuations(vocabulary: int, depth: int) -> Int[Array, "sequences {depth}"]:
    """All sequences of ``depth`` tokens, in the order of their numbers."""
    sequences = list(itertools.product(range(vocabulary), repeat=depth))
    return jnp.asarray(np.array(sequences, np.int32).reshape(vocabulary**depth, depth))


def after_prompt(
    prompt: Int[Array, " P"], vocabulary: int, depth: int
) -> Int[Array, "sequences P+{depth}"]:
    """The prompt followed by each sequence of ``depth`` tokens: what a model is to be asked."""
    followed = continuations(vocabulary, depth)
    repeated = jnp.broadcast_to(prompt, (followed.shape[0], prompt.shape[0]))
    return jnp.concatenate([repeated, followed], axis=1)


def next_token_laws(
    log_p: Float[Array, "sequences T V"], depth: int
) -> Float[Array, "sequences {depth} V"]:
    """The laws that the last ``depth`` tokens of each sequence are drawn from."""
    return log_p[:, -1 - depth : -1]


def sequence_law(
    log_p: Float[Array, "sequences T V"], tokens: Int[Array, "sequences T"], depth: int
) -> Float[Array, " sequences"]:
    """Probability of each sequence's last ``depth`` tokens, from a model's log-probs on it all."""
    laws = next_token_laws(log_p, depth)
    each = jnp.take_along_axis(laws, tokens[:, -depth:, None], axis=-1)
    return jnp.exp(jnp.sum(each[..., 0], axis=-1))


def total_variation(
    log_p: Float[Array, "*contexts V"], log_q: Float[Array, "*contexts V"]
) -> Float[Array, "*contexts"]:
    """Half the L1 distance of two laws; 1 minus it is what rejection sampling accepts."""
    return jnp.sum(jnp.abs(jnp.exp(log_p) - jnp.exp(log_q)), axis=-1) / 2


def output(generation: Generation, depth: int) -> Int[Array, "B {depth}"]:
    """The first ``depth`` tokens that each row generated; raises where a row has fewer."""
    short = generation.length - generation.prompt_length < depth
    if bool(jnp.any(short)):
        raise ValueError(f"{int(short.sum())} rows generated fewer than {depth} tokens")
    place = generation.prompt_length[:, None] + jnp.arange(depth)
    return jnp.take_along_axis(generation.tokens, place, axis=1)


def sequence_counts(tokens: Int[ArrayLike, "B depth"], vocabulary: int) -> Int[np.ndarray, " _"]:
    """How many rows hold each sequence."""
    depth = np.shape(tokens)[1]
    weights = vocabulary ** np.arange(depth)[::-1]
    return np.bincount(np.asarray(tokens) @ weights, minlength=vocabulary**depth)


def transition_counts(
    tokens: Int[ArrayLike, "B T"], vocabulary: int, order: int
) -> Int[np.ndarray, "contexts V"]:
    """How often each token followed each sequence of ``order`` tokens, anywhere in the rows."""
    windows = np.lib.stride_tricks.sliding_window_view(np.asarray(tokens), order + 1, axis=1)
    counts = sequence_counts(windows.reshape(-1, order + 1), vocabulary)
    return counts.reshape(-1, vocabulary)

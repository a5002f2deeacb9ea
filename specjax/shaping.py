"""What changes a row's logits before its temperature: bans, bias, a grammar, penalties, a function.

The order is vLLM's: allowed ids and bans, minimum length, bias, penalties, then the user's own
function. Bans that would leave no token at all are dropped where that happens, so that every node
has a law: the grammar comes first, bad words and the minimum length yield to it, and so does a
function that leaves nothing.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from specjax.grammar import allowed
from specjax.history import History, Past
from specjax.penalties import penalise
from specjax.sampling import Sampling
from specjax.sampling_params import LARGEST
from specjax.types import NO_TOKEN

UNTRACEABLE = (
    jax.errors.ConcretizationTypeError,
    jax.errors.NonConcreteBooleanIndexError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)


def shape(
    sampling: Sampling, logits: Float[Array, "B N V"], history: History | None
) -> Float[Array, "B N V"]:
    """Logits that the temperature and the truncations go on from.

    ``history`` may be None where `Sampling.looks_back` is False.
    """
    vocabulary = logits.shape[-1]
    if sampling.bias is not None:
        _check_width("bias", sampling.bias.shape[-1], vocabulary)
        logits = logits + sampling.bias.astype(logits.dtype)[:, None]
    if history is None:
        return logits
    if sampling.grammar is not None:
        _check_width("grammar", sampling.grammar.token_class.shape[0], vocabulary)
        state = history.grammar_state(sampling)
        logits = _ban(logits, ~allowed(sampling.grammar, state))
    if sampling.bad_words is not None:
        logits = _ban(logits, _ends_bad_word(sampling, logits, history))
    if sampling.min_tokens is not None:
        logits = _ban(logits, _too_early(sampling, logits, history))
    if sampling.penalties is not None:
        logits = penalise(sampling.penalties, logits, history)
    if sampling.processor is not None:
        logits = _process(sampling, logits, history)
    return logits


def _check_width(name, width, vocabulary):
    if width != vocabulary:
        raise ValueError(f"{name} is for {width} ids and the logits have {vocabulary}")


def _ban(logits, banned: Bool[Array, "B N V"]):
    left = jnp.where(banned, -jnp.inf, logits)
    any_left = jnp.any(left > -jnp.inf, axis=-1, keepdims=True)
    return jnp.where(any_left, left, logits)


def _marked(logits, ids, wanted) -> Bool[Array, "B N V"]:
    """Which tokens are among the ``wanted`` of ``ids`` [B N Q]."""
    batch, nodes, vocabulary = logits.shape
    row = jnp.arange(batch)[:, None, None]
    node = jnp.arange(nodes)[None, :, None]
    column = jnp.where(wanted & (ids >= 0), ids, vocabulary)
    return jnp.zeros(logits.shape, bool).at[row, node, column].set(True, mode="drop")


def _ends_bad_word(sampling, logits, history):
    """The last token of each bad word whose other tokens the output ends with."""
    words = sampling.bad_words[:, None]
    before = history.last_of_output(words.shape[-1] - 1)[:, :, None]
    reached = jnp.all((words[..., :-1] == NO_TOKEN) | (words[..., :-1] == before), axis=-1)
    return _marked(logits, jnp.broadcast_to(words[..., -1], reached.shape), reached)


def _too_early(sampling, logits, history):
    """The ids that end a row, while its output is shorter than its minimum."""
    early = history.output_length() < sampling.min_tokens[:, None]
    ends = jnp.broadcast_to(sampling.ends[:, None], (*early.shape, sampling.ends.shape[-1]))
    return _marked(logits, ends, early[..., None])


def _process(sampling, logits, history):
    past = history.of_each_node()
    check_processor(sampling.processor, logits.shape[-1], past.tokens.shape[-1])
    processed = jax.vmap(jax.vmap(sampling.processor))(logits, past).astype(logits.dtype)
    # What a function makes infinite comes for certain, and stays so at any temperature.
    processed = jnp.minimum(processed, LARGEST)
    any_left = jnp.any(processed > -jnp.inf, axis=-1, keepdims=True)
    return jnp.where(sampling.processed[:, None, None] & any_left, processed, logits)


def check_processor(processor: Callable[..., Any], vocabulary: int, buffer: int) -> None:
    """Raises ValueError unless a user's function makes a vector of logits out of one, in JAX."""
    shaped: Any = jax.ShapeDtypeStruct
    logits, count = shaped((vocabulary,), jnp.float32), shaped((), jnp.int32)
    past = Past(shaped((buffer,), jnp.int32), count, count)
    try:
        made = jax.eval_shape(processor, logits, past)
    except UNTRACEABLE as fault:  # the cause, which is kept, shows the line
        raise ValueError(
            "logits_processor asks for values that JAX knows only when it runs, as `if` and NumPy "
            "do: choose with jnp.where or lax.cond, and calculate with jax.numpy"
        ) from fault
    if getattr(made, "shape", None) != (vocabulary,):
        raise ValueError(f"logits_processor returns {made}: it must return {vocabulary} logits")

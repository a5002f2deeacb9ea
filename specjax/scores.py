"""Log-probabilities of the tokens that a round emits, and how likely each draft was to stand."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from specjax import tree
from specjax.types import AcceptResult, Draft, Scores


def no_scores(batch: int, places: int, alternatives: int) -> Scores:
    """Nothing scored yet: NaN, and -1 for ids."""

    def nan(*shape):
        return jnp.full((batch, places, *shape), jnp.nan, jnp.float32)

    ids = jnp.full((batch, places, alternatives), -1, jnp.int32)
    return Scores(nan(), nan(), ids, nan(alternatives), nan())


def score(
    draft: Draft,
    result: AcceptResult,
    emitted: Int[Array, "B D"],
    logits: Float[Array, "B N V"],
    log_p: Float[Array, "B N V"],
    acceptance: Float[Array, "B N"],
    alternatives: int,
) -> Scores:
    """Scores of the tokens that follow each node of the accepted path, [B, D]."""
    vocabulary = logits.shape[-1]
    if alternatives > vocabulary:
        raise ValueError(f"logprobs is {alternatives}, more than the {vocabulary} ids that exist")
    raw = jax.nn.log_softmax(tree.take_path(logits, result.path), axis=-1)
    processed = tree.take_path(log_p, result.path)
    top, top_ids = lax.top_k(raw, alternatives)

    def of_emitted(law):
        return jnp.take_along_axis(law, emitted[..., None], axis=-1)[..., 0]

    return Scores(
        raw=of_emitted(raw),
        processed=of_emitted(processed),
        top_ids=top_ids.astype(jnp.int32),
        top=top,
        acceptance=tree.take_path(acceptance, result.path),
    )


def acceptance(rule, draft: Draft, log_p: Float[Array, "N V"], result: AcceptResult):
    """For one row and each node, the probability of going on to one of its children; NaN at leaves.

    A rule in law form is asked; one that follows the target's noise has decided with certainty.
    """
    inner = tree.has_child(draft.parents)
    if hasattr(rule, "stop_law"):
        stop = jnp.exp(rule.stop_law(draft, log_p)[0])
        reached = jnp.sum(jnp.where(tree.ancestors(draft.parents), stop[:, None], 0.0), axis=0)
        going_on = 1 - jnp.where(reached > 0, stop / jnp.where(reached > 0, reached, 1.0), 1.0)
    else:
        going_on = certain(draft, result)
    return jnp.where(inner, going_on, jnp.nan)


def certain(draft: Draft, result: AcceptResult) -> Float[Array, " N"]:
    """1 at the nodes of one row's path that lead on, 0 elsewhere."""
    place = jnp.arange(result.path.shape[0])
    nodes = draft.parents.shape[0]
    ahead = jnp.where(place < result.num_accepted, result.path, nodes)
    return jnp.zeros((nodes,), jnp.float32).at[ahead].set(1.0, mode="drop")


def put(
    scores: Scores | None, new: Scores | None, at: Int[Array, " B"], count: Int[Array, " B"]
) -> Scores | None:
    """Puts the scores of ``count`` tokens of each row at their places, from ``at`` on."""

    def write(buffer, values):
        place = jnp.arange(values.shape[1])
        column = jnp.where(place < count[:, None], at[:, None] + place, buffer.shape[1])
        row = jnp.arange(values.shape[0])[:, None]
        return buffer.at[row, column].set(values.astype(buffer.dtype), mode="drop")

    return jax.tree.map(write, scores, new)

"""Rules written as laws: where the path ends, and what follows there.

A law says, for a given draft, with which probability the accepted path ends at each node
(`stop_law`) and from which law the next token is drawn there (`residual`). One sampler turns any
law into a rule, so the whole law of a rule can be computed exactly, without sampling.
"""

from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from specjax import tree
from specjax.noise import Noise
from specjax.sampling import first_argmax
from specjax.types import ROOT, AcceptResult, Draft


class Law(Protocol):
    """What a rule in law form provides, for one row and in the dtype of ``log_p``."""

    def stop_law(self, draft: Draft, log_p: Float[Array, "N V"]) -> tuple[Float[Array, " N"], Any]:
        """Log-probability that the path ends at each node, and what `residual` needs of it."""
        ...

    def residual(
        self, draft: Draft, log_p: Float[Array, "N V"], aux: Any, node: Int[Array, ""]
    ) -> Float[Array, " V"]:
        """Log-law, up to a constant, of the token that follows when the path ends at ``node``."""
        ...


def sample(law: Law, draft: Draft, log_p: Float[Array, "N V"], noise: Noise) -> AcceptResult:
    """Draws the node where the path ends from the accept noise, then the token that follows."""
    return sample_by(law, draft, log_p, noise.accept(log_p.shape[0]), noise)


def sample_by(
    law: Law, draft: Draft, log_p: Float[Array, "N V"], accept: Float[Array, " N"], noise: Noise
) -> AcceptResult:
    """`sample` with its accept noise given; the token that follows is drawn from ``noise``."""
    nodes, vocabulary = log_p.shape
    log_stop, aux = law.stop_law(draft, log_p)
    node = first_argmax(log_stop + accept)
    depth = tree.depth(draft.parents)[node]
    follows = law.residual(draft, log_p, aux, node) + noise.token(depth, vocabulary)
    return AcceptResult(
        path=tree.path_to(draft.parents, node, nodes),
        num_accepted=depth,
        next_token=first_argmax(follows),
    )


def proposal(draft: Draft, vocabulary: int) -> Float[Array, "N V"]:
    """Log-law from which the child of each node of a chain was drawn; -inf below a leaf."""
    if draft.log_q is not None:
        return jnp.where(tree.has_child(draft.parents)[:, None], draft.log_q, -jnp.inf)
    child = draft.parents[None, :] == jnp.arange(draft.parents.shape[0])[:, None]
    drafted = jax.nn.one_hot(draft.tokens, vocabulary, dtype=bool)
    return jnp.where(jnp.any(child[:, :, None] & drafted[None], axis=1), 0.0, -jnp.inf)


def log_ratio(
    draft: Draft, log_p: Float[Array, "N V"], log_q: Float[Array, "N V"]
) -> Float[Array, " N-1"]:
    """log(p / q) of each drafted token of a chain; -inf for padding and where p is 0."""
    token = draft.tokens[1:, None]
    p = jnp.take_along_axis(log_p[:-1], token, axis=-1)[:, 0]
    q = jnp.take_along_axis(log_q[:-1], token, axis=-1)[:, 0]
    possible = tree.reachable(draft.parents)[1:] & (p > -jnp.inf)
    ratio = jnp.where(possible, p, 0.0) - jnp.where(possible, q, 0.0)
    return jnp.where(possible, ratio, -jnp.inf)


def log_kept(excess: Float[Array, "*S"], log_reach: Float[Array, "*S"]) -> Float[Array, "*S"]:
    """log(S / (S + 1 - p)): how probable a node ends the path, once nothing below it stands.

    ``log_reach`` is log p, at most 0, and ``excess`` S the total of [p P - Q]+ at the node. Where
    p is 1 nothing above is left to stop at, and the result is 0.
    """
    certain = log_reach >= 0
    missing = jnp.where(certain, 1.0, -jnp.expm1(log_reach))
    return jnp.where(certain, 0.0, jnp.log(excess) - jnp.log(excess + missing))


def log_into(draft: Draft, log_p: Float[Array, "N V"]) -> Float[Array, " N"]:
    """log p of each node's token after its parent; 0 at the root, anything at padding."""
    return log_p[jnp.maximum(draft.parents, ROOT), draft.tokens].at[ROOT].set(0.0)


def log_difference(a: Float[Array, "*S"], b: Float[Array, "*S"]) -> Float[Array, "*S"]:
    """log(exp(a) - exp(b)) where that is positive, else -inf."""
    positive = a > b
    gap = jnp.where(positive, b - jnp.where(positive, a, 0.0), -1.0)
    return jnp.where(positive, a + jnp.log(-jnp.expm1(gap)), -jnp.inf)


def unless_empty(log_residual: Float[Array, " V"], log_p: Float[Array, " V"]) -> Float[Array, " V"]:
    """The residual, or the target's law where rounding has left it no mass at all."""
    return jnp.where(jnp.any(log_residual > -jnp.inf), log_residual, log_p)

"""Siblings that were drawn without replacement: from which law each came, and in which order.

A child whose token its parent's law excludes was not left to chance. It is a point mass: so are
all children where there is no law, and those for which a law has run out of tokens.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from specjax import tree
from specjax.sampling import renormalised
from specjax.types import Draft


def proposals(draft: Draft, log_p: Float[Array, "N V"]) -> Float[Array, "N V"]:
    """Log-law from which each node's children were drawn; -inf throughout for point masses."""
    if draft.log_q is None:
        return jnp.full_like(log_p, -jnp.inf)
    return draft.log_q.astype(log_p.dtype)


def order(draft: Draft, log_q: Float[Array, "N V"]) -> Int[Array, " N"]:
    """Each node's place among its siblings in verification: those drawn first, as they were drawn.

    A point mass is best kept for last: verifying one leaves p to the others as it is, and what a
    rejected draw takes off p never touches the token of a point mass.
    """
    index = jnp.arange(draft.parents.shape[0])
    drawn = log_q[jnp.maximum(draft.parents, 0), draft.tokens] > -jnp.inf
    rank = jnp.where(drawn, index, index.shape[0] + index)
    return jnp.sum(tree.siblings(draft.parents) & (rank[None, :] < rank[:, None]), axis=1)


def law_of_child(log_q: Float[Array, " V"], token: Int[Array, ""]) -> Float[Array, " V"]:
    """Log-law of the child that carries ``token``, given what earlier siblings left of its law."""
    itself = jnp.where(jnp.arange(log_q.shape[0]) == token, 0.0, -jnp.inf).astype(log_q.dtype)
    return jnp.where(log_q[token] > -jnp.inf, log_q, itself)


def without(log_q: Float[Array, " V"], token: Int[Array, ""]) -> Float[Array, " V"]:
    """Log-law left to the next sibling once ``token`` is drawn; -inf throughout if none is."""
    return renormalised(log_q.at[token].set(-jnp.inf))

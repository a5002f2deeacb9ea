"""Recursive rejection sampling over trees whose siblings are drawn without replacement.

Chen et al., "Sequoia: scalable, robust, and hardware-aware speculative decoding", arXiv
2402.12374, after Miao et al., "SpecInfer", arXiv 2305.09781.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from specjax import tree
from specjax.accept import law, siblings
from specjax.noise import Noise
from specjax.types import NO_PARENT, ROOT, AcceptResult, Draft


@dataclass(frozen=True)
class Recursive:
    """Tries the children of a node in turn, each with min(1, p/q); a rejection changes p and q.

    After one, p becomes [p - q]+ and q loses the token, both renormalised. Children that were not
    drawn, because there is no law or because it has run out of tokens, are matched as `Matching`
    does; on chains drawn from a law this is `Rejection`.
    """

    draws: str = "sample"
    lossless: bool = True
    trees: bool = True
    greedy_only: bool = False

    def __call__(self, draft: Draft, log_p: Float[Array, "N V"], noise: Noise) -> AcceptResult:
        return law.sample(self, draft, log_p, noise)

    def stop_law(
        self, draft: Draft, log_p: Float[Array, "N V"]
    ) -> tuple[Float[Array, " N"], Float[Array, "N V"]]:
        """Log-probability that the path ends at each node; aux is what p has become there."""
        nodes = draft.parents.shape[0]
        log_q = siblings.proposals(draft, log_p)
        # Any order that keeps siblings in theirs: nodes only meet at their parent.
        turn = jnp.argsort(siblings.order(draft, log_q))

        def verify(step, carry):
            left_p, left_q, log_rejected, log_into = carry
            child = turn[step]
            parent, token = draft.parents[child], draft.tokens[child]
            p, q, rejected = left_p[parent], left_q[parent], log_rejected[parent]
            drawn_from = siblings.law_of_child(q, token)
            accept = jnp.minimum(p[token] - drawn_from[token], 0.0)
            left = law.unless_empty(law.log_difference(p, drawn_from), p)
            # Padding has no parent to write to.
            row = jnp.where(parent == NO_PARENT, nodes, parent)
            return (
                left_p.at[row].set(jax.nn.log_softmax(left), mode="drop"),
                left_q.at[row].set(siblings.without(q, token), mode="drop"),
                log_rejected.at[row].add(
                    law.log_difference(jnp.zeros_like(accept), accept), mode="drop"
                ),
                log_into.at[child].set(rejected + accept),
            )

        zeros = jnp.zeros((nodes,), log_p.dtype)
        carry = lax.fori_loop(0, nodes, verify, (log_p, log_q, zeros, zeros))
        left_p, _, log_rejected, log_into = carry
        reach = tree.ancestors(draft.parents)
        log_path = tree.path_sum(reach, log_into.at[ROOT].set(0.0))
        return jnp.where(reach[:, ROOT], log_path + log_rejected, -jnp.inf), left_p

    def residual(
        self,
        draft: Draft,
        log_p: Float[Array, "N V"],
        aux: Float[Array, "N V"],
        node: Int[Array, ""],
    ) -> Float[Array, " V"]:
        """p after ``node`` as its rejected children have left it."""
        return aux[node]

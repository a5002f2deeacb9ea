"""Block verification: a drafted chain is judged as a whole.

Sun et al., "Block verification accelerates speculative decoding", arXiv 2403.10444, Algorithm 2.
"""

from dataclasses import dataclass

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from specjax import tree
from specjax.accept import law
from specjax.noise import Noise
from specjax.types import AcceptResult, Draft


@dataclass(frozen=True)
class Block:
    """Accepts the longest prefix that stands jointly, as many drafts as any rule for chains can.

    Works on chains drawn from a law and on chains of point masses (``log_q`` None), where it is
    `Rejection`. It judges a token by those that follow, so acceptance by position is not
    `Rejection`'s: the mean over a round is never lower.
    """

    draws: str = "sample"
    lossless: bool = True
    trees: bool = False
    greedy_only: bool = False

    def __call__(self, draft: Draft, log_p: Float[Array, "N V"], noise: Noise) -> AcceptResult:
        return law.sample(self, draft, log_p, noise)

    def stop_law(
        self, draft: Draft, log_p: Float[Array, "N V"]
    ) -> tuple[Float[Array, " N"], tuple[Float[Array, " N"], Float[Array, "N V"]]]:
        """Log-probability that the chain ends at each node; aux is log p_i and the draft's law."""
        log_q = law.proposal(draft, log_p.shape[-1])
        log_reach = _log_reach(law.log_ratio(draft, log_p, log_q))
        excess = jnp.sum(jnp.exp(law.log_difference(log_reach[:, None] + log_p, log_q)), axis=-1)
        # Nothing is taken off below the last draft, where the formula comes to p, up to rounding.
        kept = law.log_kept(excess, log_reach)
        kept = jnp.where(tree.has_child(draft.parents), kept, log_reach)
        given_up = law.log_difference(jnp.zeros_like(kept), kept)
        from_here = jnp.cumsum(given_up[::-1])[::-1]
        later = jnp.concatenate([from_here[1:], jnp.zeros_like(kept[:1])])
        return kept + later, (log_reach, log_q)

    def residual(
        self,
        draft: Draft,
        log_p: Float[Array, "N V"],
        aux: tuple[Float[Array, " N"], Float[Array, "N V"]],
        node: Int[Array, ""],
    ) -> Float[Array, " V"]:
        """[p_i P - Q]+ after ``node``: what is left of P scaled, not of P."""
        log_reach, log_q = aux
        left = law.log_difference(log_reach[node] + log_p[node], log_q[node])
        return law.unless_empty(left, log_p[node])


def _log_reach(log_ratio: Float[Array, " drafted"]) -> Float[Array, " drafted+1"]:
    """log p_i: p_0 = 1 and p_i = min(p_{i-1} P/Q, 1), 0 from the first impossible token on."""

    def deeper(above, ratio):
        reach = jnp.where(above > -jnp.inf, jnp.minimum(above + ratio, 0.0), -jnp.inf)
        return reach, reach

    root = jnp.zeros((), log_ratio.dtype)
    return jnp.concatenate([root[None], lax.scan(deeper, root, log_ratio)[1]])

"""Token-by-token rejection sampling.

Leviathan, Kalman and Matias, "Fast inference from transformers via speculative decoding", arXiv
2211.17192; Chen et al., "Accelerating large language model decoding with speculative sampling",
arXiv 2302.01318.
"""

from dataclasses import dataclass

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from specjax.accept import law
from specjax.noise import Noise
from specjax.types import AcceptResult, Draft


@dataclass(frozen=True)
class Rejection:
    """Accepts each token of a chain with probability min(1, p/q), else draws from [p - q]+.

    Works on chains drawn from a law and on chains of point masses (``log_q`` None).
    """

    draws: str = "sample"
    lossless: bool = True
    trees: bool = False
    greedy_only: bool = False

    def __call__(self, draft: Draft, log_p: Float[Array, "N V"], noise: Noise) -> AcceptResult:
        return law.sample(self, draft, log_p, noise)

    def stop_law(
        self, draft: Draft, log_p: Float[Array, "N V"]
    ) -> tuple[Float[Array, " N"], Float[Array, "N V"]]:
        """Log-probability that the chain ends at each node; aux is the draft's law."""
        log_q = law.proposal(draft, log_p.shape[-1])
        accept = jnp.minimum(law.log_ratio(draft, log_p, log_q), 0.0)
        reached = jnp.concatenate([jnp.zeros((1,), accept.dtype), jnp.cumsum(accept)])
        goes_on = jnp.concatenate([accept, jnp.full((1,), -jnp.inf, accept.dtype)])
        return reached + law.log_difference(jnp.zeros_like(goes_on), goes_on), log_q

    def residual(
        self,
        draft: Draft,
        log_p: Float[Array, "N V"],
        aux: Float[Array, "N V"],
        node: Int[Array, ""],
    ) -> Float[Array, " V"]:
        """[p - q]+ after ``node``; p itself below the last node."""
        return law.unless_empty(law.log_difference(log_p[node], aux[node]), log_p[node])

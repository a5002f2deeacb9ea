"""Typical acceptance: a draft stands where the target finds it plausible enough. Not lossless.

Cai et al., "Medusa: simple LLM inference acceleration framework with multiple decoding heads",
arXiv 2401.10774, section 2.3.
"""

from dataclasses import dataclass

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from specjax import tree
from specjax.accept import law
from specjax.noise import Noise
from specjax.types import AcceptResult, Draft


@dataclass(frozen=True)
class Typical:
    """Accepts the longest path of tokens with p > min(threshold, scale exp(-entropy of p)).

    The next token is drawn from p. What is accepted does not depend on chance, so the output's
    law is not the target's: tokens that are drafted and typical come too often. Of two paths of
    one length the more likely stands.
    """

    threshold: float = 0.09
    scale: float = 0.3
    draws: str = "top_k"
    lossless: bool = False
    trees: bool = True
    greedy_only: bool = False

    def __call__(self, draft: Draft, log_p: Float[Array, "N V"], noise: Noise) -> AcceptResult:
        return law.sample(self, draft, log_p, noise)

    def stop_law(
        self, draft: Draft, log_p: Float[Array, "N V"]
    ) -> tuple[Float[Array, " N"], tuple[()]]:
        """0 at the node where the path ends, for certain, and -inf at all others."""
        possible = log_p > -jnp.inf
        entropy = -jnp.sum(jnp.where(possible, jnp.exp(log_p) * log_p, 0.0), axis=-1)
        enough = jnp.minimum(jnp.log(self.threshold), jnp.log(self.scale) - entropy)
        into = law.log_into(draft, log_p)
        typical = (into > enough[jnp.maximum(draft.parents, 0)]).at[0].set(True)
        reach = tree.ancestors(draft.parents)
        stands = reach[:, 0] & jnp.all(typical | ~reach, axis=-1)
        depth = jnp.where(stands, jnp.sum(reach, axis=-1) - 1, -1)
        deepest = jnp.where(depth == jnp.max(depth), tree.path_sum(reach, into), -jnp.inf)
        here = jnp.arange(depth.shape[0]) == jnp.argmax(deepest)
        return jnp.where(here, 0.0, -jnp.inf).astype(log_p.dtype), ()

    def residual(
        self, draft: Draft, log_p: Float[Array, "N V"], aux: tuple[()], node: Int[Array, ""]
    ) -> Float[Array, " V"]:
        """p after ``node``."""
        return log_p[node]

"""Sample-and-match verification of deterministic trees.

The posterior of EAGLE (arXiv 2401.15077) for drafts that were not sampled, in closed form: draw
from the target once at each node and go down if a child carries the token.
"""

from dataclasses import dataclass

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from specjax import tree
from specjax.accept import law
from specjax.noise import Noise
from specjax.types import NO_PARENT, AcceptResult, Draft


@dataclass(frozen=True)
class Matching:
    """Accepts the path that the target's own samples take; optimal for deterministic children.

    The children must not depend on chance (top-k, copied tokens): those drawn from a law are
    verified without loss too, but fewer of them are accepted than by a rule that reads the law.
    """

    draws: str = "top_k"
    lossless: bool = True
    trees: bool = True
    greedy_only: bool = False

    def __call__(self, draft: Draft, log_p: Float[Array, "N V"], noise: Noise) -> AcceptResult:
        return law.sample(self, draft, log_p, noise)

    def stop_law(
        self, draft: Draft, log_p: Float[Array, "N V"]
    ) -> tuple[Float[Array, " N"], Bool[Array, "N V"]]:
        """log p(path) + log(1 - sum of p over the children); aux marks the children's tokens."""
        reach = tree.ancestors(draft.parents)
        path = tree.path_sum(reach, law.log_into(draft, log_p))
        children = _children(draft, log_p.shape[-1])
        elsewhere = jnp.sum(jnp.where(children, 0.0, jnp.exp(log_p)), axis=-1)
        log_stop = path + jnp.log(elsewhere)
        return jnp.where(reach[:, 0], log_stop, -jnp.inf), children

    def residual(
        self,
        draft: Draft,
        log_p: Float[Array, "N V"],
        aux: Bool[Array, "N V"],
        node: Int[Array, ""],
    ) -> Float[Array, " V"]:
        """p after ``node`` without the tokens of its children."""
        return law.unless_empty(jnp.where(aux[node], -jnp.inf, log_p[node]), log_p[node])


def _children(draft: Draft, vocabulary: int) -> Bool[Array, "N V"]:
    """Which tokens the children of each node carry."""
    nodes = draft.parents.shape[0]
    row = jnp.where(draft.parents == NO_PARENT, nodes, draft.parents)
    marks = jnp.zeros((nodes, vocabulary), bool)
    return marks.at[row, draft.tokens].set(True, mode="drop")

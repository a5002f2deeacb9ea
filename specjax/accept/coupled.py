"""Coupled verification: draft and target share the noise of each position.

Daliri, Musco and Suresh, "Coupling without communication and drafter-invariant speculative
decoding", arXiv 2408.07978.
"""

from dataclasses import dataclass

import jax
from jaxtyping import Array, Float

from specjax import tree
from specjax.noise import Noise
from specjax.sampling import first_argmax
from specjax.types import AcceptResult, Draft
from specjax.walk import walk


@dataclass(frozen=True)
class Coupled:
    """The token after each node is argmax(log p + g_t), g_t the noise of its position alone.

    That is plain sampling with the same key, whatever the drafter: equivalence is ``==``. On a
    chain it accepts somewhat fewer drafts than `Rejection`; on trees the drafter takes the top-k
    of log q + g_t.
    """

    draws: str = "coupled"
    lossless: bool = True
    trees: bool = True
    greedy_only: bool = False

    def __call__(self, draft: Draft, log_p: Float[Array, "N V"], noise: Noise) -> AcceptResult:
        vocabulary = log_p.shape[-1]
        depth = tree.depth(draft.parents)
        perturbation = jax.vmap(lambda level: noise.token(level, vocabulary))(depth)
        return walk(draft, first_argmax(log_p + perturbation))

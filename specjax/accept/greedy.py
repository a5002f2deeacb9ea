"""Greedy verification: the longest path of the target's most likely tokens."""

from dataclasses import dataclass

from jaxtyping import Array, Float

from specjax.noise import Noise
from specjax.sampling import first_argmax
from specjax.types import AcceptResult, Draft
from specjax.walk import walk


@dataclass(frozen=True)
class Greedy:
    """Emits plain greedy decoding's tokens, token for token; ties go to the lowest id.

    Meant for temperature 0, where every rule decides the same. It ignores temperature, so
    `specjax.generate` and `LLM` refuse it for rows that sample.
    """

    draws: str = "top_k"
    lossless: bool = True
    trees: bool = True
    greedy_only: bool = True

    def __call__(self, draft: Draft, log_p: Float[Array, "N V"], noise: Noise) -> AcceptResult:
        return walk(draft, first_argmax(log_p))

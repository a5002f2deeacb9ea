"""Prompt lookup: copy what followed the last n tokens when they occurred before.

Saxena, "Prompt lookup decoding" (2023). The whole search runs on the device.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from specjax import tree
from specjax.draft.host import Built, Host
from specjax.types import Context, Draft, Feedback

LONGEST = 64


@dataclass(frozen=True)
class NGram:
    """Looks for the longest suffix of the context, at most ``prompt_lookup_max`` tokens.

    Prompt and output are searched, in O(L n). Among the matches of the longest n it takes the
    most recent that leaves ``num_speculative_tokens`` to copy, else the one that leaves most. A
    row without a match of ``prompt_lookup_min`` tokens drafts nothing, and a round in which no
    row drafts is a plain step.
    """

    num_speculative_tokens: int = 5
    prompt_lookup_min: int = 2
    prompt_lookup_max: int = 4
    has_law: bool = False
    is_chain: bool = True
    taps: tuple[int, ...] = ()
    needs: tuple[str, ...] = ()
    reranks: bool = False
    forwards: int = 0

    def __post_init__(self):
        if self.num_speculative_tokens < 1:
            raise ValueError(
                f"num_speculative_tokens is {self.num_speculative_tokens}: it must be at least 1"
            )
        if not 1 <= self.prompt_lookup_min <= self.prompt_lookup_max:
            raise ValueError(
                f"prompt_lookup_min={self.prompt_lookup_min} and prompt_lookup_max="
                f"{self.prompt_lookup_max}: need 1 <= prompt_lookup_min <= prompt_lookup_max"
            )
        if self.prompt_lookup_max > LONGEST:
            raise ValueError(
                f"prompt_lookup_max is {self.prompt_lookup_max}: it must be at most {LONGEST}, for "
                "every length is a comparison of its own"
            )

    @property
    def num_nodes(self) -> int:
        return self.num_speculative_tokens + 1

    @property
    def max_depth(self) -> int:
        return self.num_speculative_tokens

    @property
    def widths(self) -> tuple[int, ...]:
        return (1, self.num_nodes)

    def init(self, params, prompt: Context, features, slots: int) -> tuple[()]:
        return ()

    def draft(self, params, state, context: Context, choose) -> tuple[Draft, tuple[()]]:
        tokens, count = jax.vmap(self._row)(context.tokens, context.length)
        return Draft(tokens=tokens, parents=tree.padded_chain(count, self.num_nodes)), ()

    def update(self, params, state, feedback: Feedback) -> tuple[()]:
        return ()

    def _row(
        self, tokens: Int[Array, " L"], length: Int[Array, ""]
    ) -> tuple[Int[Array, " N"], Int[Array, ""]]:
        """One row's nodes, the root first, and how many tokens were found to copy."""
        start, found = self._search(tokens, length)
        count = jnp.where(found, jnp.minimum(length - start, self.num_speculative_tokens), 0)
        offset = jnp.arange(self.num_nodes)
        source = jnp.where(offset == 0, length - 1, start + offset - 1)
        return jnp.where(offset <= count, tokens.at[source].get(mode="clip"), 0), count

    def _search(self, tokens, length) -> tuple[Int[Array, ""], Array]:
        """Where the continuation of the best match begins, and whether there is one."""
        buffer = tokens.shape[0]
        place = jnp.arange(buffer)
        run, matched = jnp.ones((buffer,), bool), jnp.zeros((buffer,), jnp.int32)
        for back in range(1, self.prompt_lookup_max + 1):
            shifted = jnp.pad(tokens, (back, 0))[:buffer]
            last = tokens.at[jnp.maximum(length - back, 0)].get(mode="clip")
            run &= (shifted == last) & (place >= back)
            matched += run
        matched = jnp.where(place < length, matched, 0)
        longest = jnp.max(matched)
        best = matched == jnp.maximum(longest, 1)
        roomy = best & (place <= length - self.num_speculative_tokens)
        recent = jnp.max(jnp.where(roomy, place, -1))
        longest_copy = jnp.min(jnp.where(best, place, buffer))
        return jnp.where(recent >= 0, recent, longest_copy), longest >= self.prompt_lookup_min


def build(
    host: Host,
    *,
    num_speculative_tokens: int = 5,
    prompt_lookup_min: int = 2,
    prompt_lookup_max: int = 4,
) -> Built:
    """Prompt lookup; has no parameters."""
    return Built(NGram(num_speculative_tokens, prompt_lookup_min, prompt_lookup_max), None)

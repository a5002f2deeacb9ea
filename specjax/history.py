"""What the sampling parameters remember: a row's committed tokens, and a node's own ancestors.

Counts are kept once a row and carried by the loop; what a node has drafted above it is put on top
of them at those few tokens. Siblings and rejected drafts never enter.
"""

import typing
from dataclasses import replace
from typing import Self

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Int

from specjax import tree
from specjax.grammar import advance
from specjax.sampling import Sampling
from specjax.types import NO_TOKEN, Context, Draft


@typing.no_type_check
@struct.dataclass
class Seen:
    """What is carried of the committed tokens; each part None where no parameter asks for it.

    Attributes:
        counts: how often each token stands in the output.
        prompted: which tokens stand in the prompt.
        grammar_state: the state of each row's grammar after its output.
    """

    counts: Int[Array, "B V"] | None = None
    prompted: Bool[Array, "B V"] | None = None
    grammar_state: Int[Array, " B"] | None = None

    @classmethod
    def of_prompts(cls, sampling: Sampling, prompt: Context, vocabulary: int) -> Self:
        """Nothing emitted yet."""
        batch = prompt.length.shape[0]
        seen = cls()
        if sampling.penalties is not None:
            column = jnp.arange(prompt.tokens.shape[1])
            inside = column < prompt.length[:, None]
            ids = jnp.where(inside, prompt.tokens, vocabulary)
            marks = jnp.zeros((batch, vocabulary), bool)
            prompted = marks.at[jnp.arange(batch)[:, None], ids].set(True, mode="drop")
            seen = replace(
                seen, counts=jnp.zeros((batch, vocabulary), jnp.int32), prompted=prompted
            )
        if sampling.grammar is not None:
            seen = replace(seen, grammar_state=sampling.grammar_start)
        return seen

    def after(
        self, sampling: Sampling, emitted: Int[Array, "B D"], count: Int[Array, " B"]
    ) -> Self:
        """With the first ``count`` emitted tokens of each row committed."""
        tokens = jnp.where(jnp.arange(emitted.shape[1]) < count[:, None], emitted, NO_TOKEN)
        seen = self
        if self.counts is not None:
            row = jnp.arange(tokens.shape[0])[:, None]
            column = jnp.where(tokens == NO_TOKEN, self.counts.shape[1], tokens)
            seen = replace(seen, counts=self.counts.at[row, column].add(1, mode="drop"))
        if self.grammar_state is not None:
            state = _advanced(sampling, self.grammar_state[:, None], tokens[:, None])[:, 0]
            seen = replace(seen, grammar_state=state)
        return seen


@typing.no_type_check
@struct.dataclass
class History:
    """What came before the next token of each of ``N`` nodes of each row.

    ``path`` holds the tokens drafted between the root and a node, the node's own last, padded with
    -1 at its end.
    """

    context: Context
    prompt_length: Int[Array, " B"]
    seen: Seen
    path: Int[Array, "B N D"]

    def output_length(self) -> Int[Array, "B N"]:
        """Tokens of output before the next one."""
        drafted = jnp.sum(self.path != NO_TOKEN, axis=-1)
        return (self.context.length - self.prompt_length)[:, None] + drafted

    def grammar_state(self, sampling: Sampling) -> Int[Array, "B N"]:
        """The state of the row's grammar at each node, along the node's own path."""
        batch, nodes, _ = self.path.shape
        assert self.seen.grammar_state is not None
        state = jnp.broadcast_to(self.seen.grammar_state[:, None], (batch, nodes))
        return _advanced(sampling, state, self.path)

    def last_of_output(self, count: int) -> Int[Array, "B N {count}"]:
        """The last ``count`` tokens of output, oldest first; -1 where the output is shorter."""
        end = self.context.length[:, None] + jnp.sum(self.path != NO_TOKEN, axis=-1)
        place = end[:, :, None] + jnp.arange(-count, 0)
        return jnp.where(place >= self.prompt_length[:, None, None], self._at(place), NO_TOKEN)

    def of_each_node(self) -> "Past":
        """What a user's function is told of each node: fields [B N L+D], [B N], [B N]."""
        length = self.context.length[:, None] + jnp.sum(self.path != NO_TOKEN, axis=-1)
        place = jnp.arange(self.context.tokens.shape[1] + self.path.shape[2])
        place = jnp.broadcast_to(place, (*length.shape, place.shape[0]))
        tokens = jnp.where(place < length[..., None], self._at(place), NO_TOKEN)
        prompt_length = jnp.broadcast_to(self.prompt_length[:, None], length.shape)
        return Past(tokens, length, prompt_length)

    def _at(self, place: Int[Array, "B N J"]) -> Int[Array, "B N J"]:
        """The token at absolute positions of each node's own sequence."""
        rows, nodes, _ = place.shape
        buffer, depth = self.context.tokens.shape[1], self.path.shape[2]
        committed = jnp.take_along_axis(
            self.context.tokens, jnp.clip(place, 0, buffer - 1).reshape(rows, -1), axis=1
        ).reshape(place.shape)
        if depth == 0:
            return committed
        beyond = place - self.context.length[:, None, None]
        drafted = jnp.take_along_axis(self.path, jnp.clip(beyond, 0, depth - 1), axis=2)
        return jnp.where(beyond >= 0, drafted, committed)


@typing.no_type_check
@struct.dataclass
class Past:
    """All that came before one token, for a user's ``logits_processor(logits, past)``.

    ``tokens`` holds prompt, output and, while a draft is verified, the drafted tokens above this
    one: ``length`` tokens, of which the first ``prompt_length`` are the prompt, then -1.
    """

    tokens: Int[Array, " L"]
    length: Int[Array, ""]
    prompt_length: Int[Array, ""]


def drafted_paths(draft: Draft, depth: int) -> Int[Array, "B N {depth}"]:
    """The tokens from below the root down to each node of a draft, padded with -1."""

    def of_row(tokens, parents):
        reach = tree.ancestors(parents)
        level = tree.depth(parents)
        at_depth = reach[:, None, :] & (level == jnp.arange(1, depth + 1)[:, None])[None]
        token = jnp.max(jnp.where(at_depth, tokens, NO_TOKEN), axis=-1)
        return jnp.where(reach[:, :1], token, NO_TOKEN)

    return jax.vmap(of_row)(draft.tokens, draft.parents)


def _advanced(sampling, state, tokens):
    for place in range(tokens.shape[-1]):
        state = advance(sampling.grammar, state, tokens[..., place])
    return state

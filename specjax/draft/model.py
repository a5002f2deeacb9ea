"""A smaller model as the drafter, with a KV cache of its own.

Leviathan, Kalman and Matias, arXiv 2211.17192; Chen et al., arXiv 2302.01318.
"""

import typing
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from flax import struct
from jax import lax
from jaxtyping import Array, Float

from specjax import tree
from specjax.draft.host import Built, Host
from specjax.prefill import prefill
from specjax.types import NO_TOKEN, ROOT, Context, Draft, Feedback, Target


@typing.no_type_check
@struct.dataclass
class ModelState:
    """The draft model's cache: always two tokens short of the context, between rounds."""

    cache: Any


@dataclass(frozen=True)
class ModelDrafter:
    """Draws a chain of ``num_speculative_tokens`` tokens from a draft model.

    Every round begins by feeding it the last two committed tokens, so that a fully and a partly
    accepted draft leave its cache alike. ``vocab_size`` is the target's: narrower draft logits
    are filled with -inf, wider ones cut. Drafting stops where the draft model's own context of
    ``max_context`` tokens ends.
    """

    model: Target
    num_speculative_tokens: int
    vocab_size: int
    max_context: int
    prefill_chunk: int = 64
    has_law: bool = True
    is_chain: bool = True
    taps: tuple[int, ...] = ()
    needs: tuple[str, ...] = ()
    reranks: bool = False

    def __post_init__(self):
        if self.num_speculative_tokens < 1:
            raise ValueError(
                f"num_speculative_tokens is {self.num_speculative_tokens}: it must be at least 1"
            )

    @property
    def num_nodes(self) -> int:
        return self.num_speculative_tokens + 1

    @property
    def max_depth(self) -> int:
        return self.num_speculative_tokens

    @property
    def widths(self) -> tuple[int, ...]:
        return (self.num_nodes,)

    @property
    def forwards(self) -> int:
        return self.num_speculative_tokens

    def init(self, params, prompt: Context, features, slots: int) -> ModelState:
        """Forwards the prompt but its last token; ``prompt`` ends with the first token drawn."""
        cache = self.model.init_cache(prompt.tokens.shape[0], slots)
        cached = Context(prompt.tokens, jnp.maximum(prompt.length - 2, 0))
        # A chunk wider than the slack would be clamped, and destroy committed slots in silence.
        chunk = min(self.prefill_chunk, slots - prompt.tokens.shape[1])
        return ModelState(prefill(self.model, params, cached, cache, chunk=chunk).cache)

    def draft(
        self, params, state: ModelState, context: Context, choose
    ) -> tuple[Draft, ModelState]:
        steps = self.num_speculative_tokens
        batch = context.tokens.shape[0]
        place = context.length[:, None] + jnp.arange(-2, 0)
        last_two = jnp.take_along_axis(context.tokens, jnp.maximum(place, 0), axis=1)
        first = self._propose(
            params,
            last_two,
            state.cache,
            jnp.full((batch, steps), NO_TOKEN, jnp.int32),
            jnp.int32(ROOT),
            choose,
        )

        def body(carry, node):
            token, cache, path = carry
            token, cache, path, law = self._propose(params, token, cache, path, node, choose)
            return (token, cache, path), law

        carry, laws = lax.scan(body, first[:3], jnp.arange(1, steps))
        _, cache, path = carry
        tokens = jnp.concatenate([last_two[:, 1:], path], axis=1)
        room = jnp.clip(self.max_context - context.length, 0, steps)
        draft = Draft(
            tokens=tokens,
            parents=tree.padded_chain(room, self.num_nodes),
            log_q=None if first[3] is None else _stack_laws(first[3], laws),
        )
        return draft, ModelState(cache.rollback(steps + 1))

    def update(self, params, state: ModelState, feedback: Feedback) -> ModelState:
        return ModelState(state.cache.commit(None, feedback.count))

    def _propose(self, params, tokens, cache, path, node, choose):
        """One draft forward and the child it leads to: (token, cache, path, law)."""
        batch, block = tokens.shape
        last = jnp.full((batch,), block - 1, jnp.int32)
        out = self.model(params, tokens, None, cache, logits_at=last)
        cache = out.cache.commit(None, jnp.full((batch,), block, jnp.int32))
        nodes = jnp.broadcast_to(node, (batch, 1))
        chosen, _, law = choose(self._fit(out.logits), nodes, path[:, None], 1)
        token = chosen[:, :, 0]
        return token, cache, lax.dynamic_update_slice(path, token, (0, node)), law

    def _fit(self, logits: Float[Array, "B M _"]) -> Float[Array, "B M V"]:
        missing = max(self.vocab_size - logits.shape[-1], 0)
        wide = jnp.pad(logits, ((0, 0), (0, 0), (0, missing)), constant_values=-jnp.inf)
        return wide[..., : self.vocab_size]


def _stack_laws(
    first: Float[Array, "B 1 V"], later: Float[Array, "steps B 1 V"]
) -> Float[Array, "B N V"]:
    """The laws below each node of the chain, -inf below its last."""
    leaf = jnp.full_like(first, -jnp.inf)
    return jnp.concatenate([first, jnp.moveaxis(later[:, :, 0], 0, 1), leaf], axis=1)


def build(host: Host, *, model: Any, num_speculative_tokens: int = 5) -> Built:
    """A second checkpoint as the drafter; its tokenizer must be the target's."""
    loaded = host.load(model)
    drafter = ModelDrafter(
        model=loaded.target,
        num_speculative_tokens=num_speculative_tokens,
        vocab_size=host.vocab_size,
        max_context=loaded.max_context,
        prefill_chunk=host.prefill_chunk,
    )
    return Built(drafter, loaded.params)

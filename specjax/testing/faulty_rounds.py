"""Rounds with one fault each, around `specjax.loop.step`."""

from dataclasses import replace

import jax.numpy as jnp

from specjax import loop
from specjax.types import NO_TOKEN, RUNNING, STOPPED, SpecState


def bonus_after_end(
    target, params, drafter, drafter_params, rule, request, state: SpecState
) -> SpecState:
    """A round that looks for the end after it has emitted: what followed the end stays."""
    blind = replace(request, eos_ids=jnp.full_like(request.eos_ids, NO_TOKEN))
    after = loop.step(target, params, drafter, drafter_params, rule, blind, state)
    place = jnp.arange(after.context.tokens.shape[1])
    new = (place >= state.context.length[:, None]) & (place < after.context.length[:, None])
    is_end = jnp.any(after.context.tokens[:, :, None] == request.eos_ids[:, None], axis=-1)
    ended = jnp.any(new & is_end, axis=1) & (state.finish == RUNNING)
    return replace(after, finish=jnp.where(ended, STOPPED, after.finish))


def rejected_drafts_counted(
    target, params, drafter, drafter_params, rule, request, state: SpecState
) -> SpecState:
    """A round after which the penalties count rejected drafts as output. Chains only."""
    after = loop.step(target, params, drafter, drafter_params, rule, request, state)
    accepted = jnp.maximum(after.context.length - state.context.length - 1, 0)
    tokens = after.draft_state.tokens[:, 1:]
    rejected = jnp.where(state.done, 0, tokens.shape[1] - accepted)
    seen = after.seen.after(request.sampling, tokens[:, ::-1], rejected)
    return replace(after, seen=seen)

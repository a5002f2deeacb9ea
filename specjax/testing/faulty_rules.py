"""Acceptance rules with one fault each, as a rule and a function that replaces a part of it.

The faults are those that shipped elsewhere: each leaves the output plausible and its law wrong.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from specjax import noise as roles
from specjax.accept import law
from specjax.noise import Noise
from specjax.sampling import first_argmax
from specjax.types import NO_PARENT, ROOT, AcceptResult, Draft


def _stop_law(rule, draft, log_p):
    return rule.stop_law(draft, log_p)


def _residual(rule, draft, log_p, aux, node):
    return rule.residual(draft, log_p, aux, node)


@dataclass(frozen=True)
class FaultyRule:
    """A rule with one part replaced by a module-level function, which is given the rule first.

    ``stops`` and ``follows`` take the place of ``stop_law`` and ``residual`` of a rule in law form,
    and decide by them. ``decides`` takes the place of the decision alone, out of sight of the
    rule's exact law.
    """

    rule: Any
    stops: Callable[..., tuple[Float[Array, " N"], Any]] = _stop_law
    follows: Callable[..., Float[Array, " V"]] = _residual
    decides: Callable[..., AcceptResult] | None = None

    @property
    def draws(self) -> str:
        return self.rule.draws

    @property
    def lossless(self) -> bool:
        return False

    @property
    def trees(self) -> bool:
        return self.rule.trees

    @property
    def greedy_only(self) -> bool:
        return self.rule.greedy_only

    def __call__(self, draft: Draft, log_p: Float[Array, "N V"], noise: Noise) -> AcceptResult:
        if self.decides is not None:
            return self.decides(self.rule, draft, log_p, noise)
        return law.sample(self, draft, log_p, noise)

    def stop_law(self, draft: Draft, log_p: Float[Array, "N V"]) -> tuple[Float[Array, " N"], Any]:
        return self.stops(self.rule, draft, log_p)

    def residual(
        self, draft: Draft, log_p: Float[Array, "N V"], aux: Any, node: Int[Array, ""]
    ) -> Float[Array, " V"]:
        return self.follows(self.rule, draft, log_p, aux, node)


def target_for_residual(rule, draft, log_p, aux, node):
    """After a rejection, draws from the target's law: what was rejected may come again."""
    return log_p[node]


def softmaxed_residual(rule, draft, log_p, aux, node):
    """Puts the residual's mass through a softmax instead of dividing it by its sum."""
    return jnp.exp(rule.residual(draft, log_p, aux, node))


def unscaled_residual(rule, draft, log_p, aux, node):
    """[P - Q]+ after a block, where [p_i P - Q]+ is right."""
    _, log_q = aux
    return law.unless_empty(law.log_difference(log_p[node], log_q[node]), log_p[node])


def row_before(rule, draft, log_p, aux, node):
    """The token after a node, from the law after its parent."""
    return rule.residual(draft, jnp.concatenate([log_p[:1], log_p[:-1]]), aux, node)


def stops_by_prefix(rule, draft, log_p):
    """Accepts each node of a block with p_i, where h_i is right before the last."""
    _, aux = rule.stop_law(draft, log_p)
    log_reach, _ = aux
    given_up = law.log_difference(jnp.zeros_like(log_reach), log_reach)
    from_here = jnp.cumsum(given_up[::-1])[::-1]
    later = jnp.concatenate([from_here[1:], jnp.zeros_like(log_reach[:1])])
    return log_reach + later, aux


def impossible_stops(rule, draft, log_p):
    """Gives a node of probability 0 a little: an epsilon in a logarithm."""
    log_stop, aux = rule.stop_law(draft, log_p)
    return jax.nn.log_softmax(jnp.maximum(log_stop, jnp.log(1e-3))), aux


def padding_below_root(rule, draft, log_p):
    """Takes padding for children of the root, as an index of -1 clipped to 0 does."""
    parents = jnp.maximum(draft.parents, ROOT).at[ROOT].set(NO_PARENT)
    return rule.stop_law(replace(draft, parents=parents), log_p)


def padding_in_chain(rule, draft, log_p):
    """Takes the padding of a chain for drafted tokens."""
    index = jnp.arange(draft.parents.shape[-1])
    parents = jnp.where(draft.parents == NO_PARENT, index - 1, draft.parents)
    return rule.stop_law(replace(draft, parents=parents), log_p)


def last_sibling_first(rule, draft, log_p):
    """Verifies siblings against the order in which they were drawn."""
    nodes = draft.parents.shape[0]
    index = jnp.arange(nodes)
    place = jnp.where(index == ROOT, ROOT, nodes - index)
    # Node i stands where node `place[i]` stood: parents no longer come first, siblings reversed.
    parents = draft.parents[place]
    moved = Draft(
        draft.tokens[place],
        jnp.where(parents == NO_PARENT, NO_PARENT, place[parents]),
        None if draft.log_q is None else draft.log_q[place],
    )
    log_stop, aux = rule.stop_law(moved, log_p[place])
    return log_stop[place], aux[place]


def fresh_noise(rule, draft: Draft, log_p, noise: Noise) -> AcceptResult:
    """Draws the next token anew: that draft and target disagreed is then forgotten."""
    result = rule(draft, log_p, noise)
    node = result.path[result.num_accepted]
    anew = log_p[node] + noise.accept(log_p.shape[-1])
    return result.replace(next_token=first_argmax(anew))


def accepts_by_draft_noise(rule, draft, log_p, noise: Noise) -> AcceptResult:
    """Acceptance and the draws below the root share a key."""
    shared = roles.draft(noise.key, noise.root, jnp.int32(ROOT), log_p.shape[0])
    return law.sample_by(rule, draft, log_p, shared, noise)


def accepts_by_row(rule, draft, log_p, noise: Noise) -> AcceptResult:
    """The acceptance noise is the same in every round of a row."""
    same = Noise(noise.key, jnp.zeros_like(noise.root)).accept(log_p.shape[0])
    return law.sample_by(rule, draft, log_p, same, noise)


def token_noise_by_round(rule, draft, log_p, noise: Noise) -> AcceptResult:
    """The token noise is keyed by the round and the depth, not by the token's position."""
    round_key = jax.random.fold_in(noise.key, noise.root)
    return rule(draft, log_p, Noise(round_key, jnp.zeros_like(noise.root)))

"""Traversal verification: a tree of drafts is judged from its leaves to its root.

Weng et al., "Traversal verification for speculative tree decoding", arXiv 2505.12398.
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Int

from specjax import tree
from specjax.accept import law, siblings
from specjax.noise import Noise
from specjax.types import NO_PARENT, ROOT, AcceptResult, Draft


@dataclass(frozen=True)
class Traversal:
    """Takes the leaves in turn, accepts the whole path to one or cuts it off and goes on.

    `Block` on chains; on trees it accepts more than `Recursive` on average, since a path that is
    likely as a whole stands although a token on it would have been rejected. Point masses are
    matched as `Matching` does.
    """

    draws: str = "sample"
    lossless: bool = True
    trees: bool = True
    greedy_only: bool = False

    def __call__(self, draft: Draft, log_p: Float[Array, "N V"], noise: Noise) -> AcceptResult:
        return law.sample(self, draft, log_p, noise)

    def stop_law(
        self, draft: Draft, log_p: Float[Array, "N V"]
    ) -> tuple[Float[Array, " N"], Float[Array, "N V"]]:
        """Log-probability that the path ends at each node; aux is what p has become there."""
        nodes = draft.parents.shape[0]
        log_q = siblings.proposals(draft, log_p)
        descent = _descent(draft, log_p, log_q)

        def leave(step, carry):
            left_p, left_q, log_reach, log_left, log_stop = carry
            leaf = descent.leaving[step]
            parent, token = draft.parents[leaf], draft.tokens[leaf]
            p, q, reach = left_p[parent], left_q[parent], log_reach[parent]
            left = law.log_difference(reach + p, siblings.law_of_child(q, token))
            kept = law.log_kept(jnp.sum(jnp.exp(left)), reach)
            p, q = jax.nn.log_softmax(law.unless_empty(left, p)), siblings.without(q, token)
            stands = log_reach[leaf]
            following = descent.following[leaf]
            enters = _log_reach(kept, p, q, draft.tokens.at[following].get(mode="clip"))
            # Padding and the root have no parent to write to.
            row = jnp.where(parent == NO_PARENT, nodes, parent)
            return (
                left_p.at[row].set(p, mode="drop"),
                left_q.at[row].set(q, mode="drop"),
                descent.enter(following, enters, log_reach.at[row].set(kept, mode="drop")),
                log_left + law.log_difference(jnp.zeros_like(stands), stands),
                log_stop.at[leaf].set(log_left + stands),
            )

        zero, never = jnp.zeros((), log_p.dtype), jnp.full((nodes,), -jnp.inf, log_p.dtype)
        start = (log_p, log_q, descent.enter(ROOT, zero, never), zero, never)
        left_p, _, _, _, log_stop = lax.fori_loop(0, nodes, leave, start)
        return log_stop, left_p

    def residual(
        self,
        draft: Draft,
        log_p: Float[Array, "N V"],
        aux: Float[Array, "N V"],
        node: Int[Array, ""],
    ) -> Float[Array, " V"]:
        """p after ``node`` as the paths cut off below it have left it."""
        return aux[node]


class _Descent(NamedTuple):
    """The walk over one tree: in which order nodes are left, and what is entered when.

    Entering a node enters its first child, that one's first child, and so on. On the way down
    from ``top`` with log p the log p of a node is min(log p + shift, cap).
    """

    leaving: Int[Array, " N"]
    following: Int[Array, " N"]
    top: Int[Array, " N"]
    shift: Float[Array, " N"]
    cap: Float[Array, " N"]

    def enter(
        self, node: Int[ArrayLike, ""], log_p: Float[Array, ""], log_reach: Float[Array, " N"]
    ) -> Float[Array, " N"]:
        """log p of all nodes once ``node`` and the first children below it are entered."""
        return jnp.where(self.top == node, jnp.minimum(log_p + self.shift, self.cap), log_reach)


def _descent(draft: Draft, log_p: Float[Array, "N V"], log_q: Float[Array, "N V"]) -> _Descent:
    nodes = draft.parents.shape[0]
    index = jnp.arange(nodes)
    order = siblings.order(draft, log_q)
    reach = tree.ancestors(draft.parents)
    same_parent = tree.siblings(draft.parents)
    earlier = same_parent & (order < order[:, None])
    size = jnp.sum(reach, axis=0)
    before = jnp.sum(jnp.where(earlier, size, 0), axis=1)
    place = tree.path_sum(reach, before) + size
    follows = same_parent & (order == order[:, None] + 1)
    first = (order == 0) & (draft.parents != NO_PARENT)

    def below(node, carry):
        top, shift, cap = carry
        parent, token = draft.parents[node], draft.tokens[node]
        ratio = log_p[parent, token] - siblings.law_of_child(log_q[parent], token)[token]
        return (
            top.at[node].set(jnp.where(first[node], top[parent], node)),
            shift.at[node].set(jnp.where(first[node], shift[parent] + ratio, 0.0)),
            cap.at[node].set(jnp.where(first[node], jnp.minimum(cap[parent] + ratio, 0.0), 0.0)),
        )

    zeros = jnp.zeros((nodes,), log_p.dtype)
    top, shift, cap = lax.fori_loop(1, nodes, below, (index, zeros, zeros))
    return _Descent(
        leaving=jnp.argsort(jnp.where(reach[:, ROOT], place, nodes + 1 + index)),
        following=jnp.where(jnp.any(follows, axis=1), jnp.argmax(follows, axis=1), nodes),
        top=top,
        shift=shift,
        cap=cap,
    )


def _log_reach(log_reach, log_p, log_q, token) -> Float[Array, ""]:
    """log min(p P/Q, 1) of the child that carries ``token``."""
    drawn_from = siblings.law_of_child(log_q, token)
    return jnp.minimum(log_reach + log_p[token] - drawn_from[token], 0.0)

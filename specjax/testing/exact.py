"""The exact law of one round of a rule in law form: every draft, every stop, every next token.

A context is what has been emitted since the root. Contexts are numbered like the nodes of a
complete V-ary tree, level by level: the root is 0, and token ``t`` after context ``c`` leads to
``V c + t + 1``. An array [C, V] over the contexts of fewer than ``depth`` tokens holds a law of
sequences of ``depth`` tokens.

Letters beyond those of `specjax.types`: ``C`` contexts, ``X`` drafts enumerated.
"""

import functools
import itertools
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, ArrayLike, Bool, Float, Int

from specjax import tree
from specjax.accept import RULES
from specjax.accept.law import Law
from specjax.testing.joint import continuations
from specjax.testing.quick_compilation import jit_quickly
from specjax.types import NO_PARENT, ROOT, Draft

# How siblings are drawn, where that is no matter of the target's noise.
DRAWS = ("sample", "top_k", "top_and_one")
# How far from 1 a law may sum that was normalised in float32.
ROUNDING = 1e-4


class RoundLaw(NamedTuple):
    """What a round emits, continued with the target to the depth of its law, and accepts."""

    joint: Float[Array, " sequences"]
    mean_accepted: Float[Array, ""]


class ExactLaw(NamedTuple):
    """What one round of a rule emits, what the target would, and how far apart that is at most."""

    error: float
    joint: Float[Array, " sequences"]
    target: Float[Array, " sequences"]
    mean_accepted: float


def exact_law(
    rule: Any,
    log_p: Float[ArrayLike, "C V"],
    log_q: Float[ArrayLike, "C V"],
    parents: Int[ArrayLike, " N"],
    draws: str | None = None,
) -> ExactLaw:
    """The exact law of one round of ``rule`` over a tree drawn from the law ``log_q``, in float64.

    ``rule`` is one, or a registered name. ``log_p`` and ``log_q`` hold a law for each context of
    fewer than D tokens, D - 1 at least the depth of the tree; a lossless rule's error is below
    1e-9. ``parents`` are -1 at the root and at padding, and before their children. ``draws`` is how
    the tree is drawn, None being the way that the rule wants. Raises ValueError for a rule that is
    no law, a tree that it doesn't take, and laws that are none or not of these contexts.
    """
    rule = _rule(rule)
    laws = tuple(np.asarray(law, np.float64) for law in (log_p, log_q))
    parents, draws = np.asarray(parents), draws or rule.draws
    if draws not in DRAWS:
        raise ValueError(f"unknown draws {draws!r}; known: {', '.join(DRAWS)}")
    for name, law in zip(("log_p", "log_q"), laws, strict=True):
        _require_laws(name, law)
    if laws[0].shape != laws[1].shape:
        raise ValueError(
            f"log_p has shape {laws[0].shape}, log_q {laws[1].shape}: give both the same contexts"
        )
    _require_tree(parents, rule, *laws[0].shape)
    with jax.enable_x64(True):
        shape = jnp.asarray(parents, jnp.int32)
        joint, target, accepted = _exact(rule, draws, *map(jnp.asarray, laws), shape)
        error = float(jnp.max(jnp.abs(joint - target)))
        return ExactLaw(error, joint, target, float(accepted))


def _rule(rule: Any) -> Any:
    if isinstance(rule, str):
        if rule not in RULES:
            raise ValueError(f"unknown rule {rule!r}; known: {', '.join(RULES)}")
        rule = RULES[rule]
    if not hasattr(rule, "stop_law"):
        raise ValueError(
            f"{type(rule).__name__} is no law but a function of the noise: compare its tokens"
        )
    return rule


def _require_laws(name: str, law: Float[np.ndarray, "..."]) -> None:
    """Raises ValueError unless ``law`` are log-laws [C, V] of all contexts to some depth."""
    if law.ndim != 2 or not law.size:
        raise ValueError(f"{name} has shape {law.shape}: give [C, V], a law for each context")
    contexts, vocabulary = law.shape
    whole = (num_contexts(vocabulary, depth) for depth in itertools.count(1))
    if next(number for number in whole if number >= contexts) != contexts:
        raise ValueError(
            f"{name} has laws of {contexts} contexts: give those of all contexts of fewer than D "
            f"tokens, 1, {1 + vocabulary}, {num_contexts(vocabulary, 3)} and so on"
        )
    with np.errstate(over="ignore"):
        total = np.exp(law).sum(axis=1)
    if not np.all(np.abs(total - 1) <= ROUNDING):
        context = int(np.argmax(~(np.abs(total - 1) <= ROUNDING)))
        raise ValueError(
            f"{name} at context {context} sums to {total[context]:.6g}, not 1: give the logarithms "
            "of probabilities"
        )


def _require_tree(
    parents: Int[np.ndarray, "..."], rule: Any, contexts: int, vocabulary: int
) -> None:
    """Raises ValueError unless ``parents`` are a tree for ``rule`` that the contexts reach past."""
    is_list = parents.ndim == 1 and parents.size and np.issubdtype(parents.dtype, np.integer)
    if not is_list or parents[0] != NO_PARENT:
        raise ValueError(f"parents is {parents.tolist()}: give the index of each node's, -1 first")
    index = np.arange(parents.size)
    if np.any(parents < NO_PARENT) or np.any(parents >= index):
        raise ValueError(
            f"parents is {parents.tolist()}: give each node a parent that comes before it, or -1"
        )
    has_parent = parents != NO_PARENT
    if not getattr(rule, "trees", True) and np.any(has_parent & (parents != index - 1)):
        raise ValueError(
            f"{type(rule).__name__} takes chains only, and parents is {parents.tolist()}: give a "
            "chain, or choose a rule for trees"
        )
    most = int(np.max(np.bincount(parents[has_parent]), initial=0))
    if most > vocabulary:
        raise ValueError(
            f"a node has {most} children, more than the {vocabulary} tokens: draft fewer"
        )
    needed = num_contexts(vocabulary, int(tree.depth(jnp.asarray(parents)).max()) + 1)
    if contexts < needed:
        raise ValueError(
            f"log_p and log_q have laws of {contexts} contexts, and a tree of this depth reaches "
            f"{needed}: give them all"
        )


@functools.partial(jit_quickly, static_argnums=(0, 1))
def _exact(rule, draws, log_p, log_q, parents):
    result = round_law(rule, *drawn_drafts(log_q, parents, draws), log_p)
    return result.joint, joint_law(log_p), result.mean_accepted


def num_contexts(vocabulary: int, depth: int) -> int:
    """Contexts of fewer than ``depth`` tokens."""
    return sum(vocabulary**level for level in range(depth))


def joint_law(log_p: Float[Array, "C V"]) -> Float[Array, " sequences"]:
    """Probabilities of all sequences, the last token counting fastest."""
    nothing_emitted = jnp.zeros((_num_nodes(log_p),), log_p.dtype).at[ROOT].set(1.0)
    return _continue(nothing_emitted, log_p)


def round_law(
    law: Law, draft: Draft, log_weight: Float[Array, " X"], log_p: Float[Array, "C V"]
) -> RoundLaw:
    """Sums weight(draft) * stop(node | draft) * residual(token | draft, node).

    ``draft`` holds all drafts [X, N] with their log-probabilities, ``log_p`` the target's law,
    deep enough for the token after the deepest node. A lossless rule's ``joint`` is
    `joint_law` of ``log_p``; everything keeps the dtype of ``log_p``.
    """
    vocabulary = log_p.shape[-1]

    def of_draft(draft, log_weight):
        context = _contexts(draft, vocabulary)
        seen = log_p.at[context].get(mode="clip")
        log_stop, aux = law.stop_law(draft, seen)
        residual = jax.vmap(lambda node: law.residual(draft, seen, aux, node))
        follows = jax.nn.softmax(residual(jnp.arange(context.shape[0])), axis=-1)
        stop = jnp.exp(log_weight + log_stop)
        mass = jnp.where(stop[:, None] > 0, stop[:, None] * follows, 0.0)
        emitted = vocabulary * context[:, None] + jnp.arange(vocabulary) + 1
        return emitted, mass, jnp.sum(stop * tree.depth(draft.parents))

    emitted, mass, accepted = jax.vmap(of_draft)(draft, log_weight)
    reached = jnp.zeros((_num_nodes(log_p),), log_p.dtype).at[emitted].add(mass, mode="drop")
    return RoundLaw(_continue(reached, log_p), jnp.sum(accepted))


def drawn_drafts(
    log_q: Float[Array, "C V"], parents: Int[Array, " N"], draws: str = "sample"
) -> tuple[Draft, Float[Array, " X"]]:
    """All drafts of one shape and their log-probabilities when proposed by the law ``log_q``.

    Siblings are drawn as a rule with this ``draws`` has them drawn, in index order; "coupled" is
    not among them, since it depends on the target's noise. Those beyond the support of their law
    are uniform over the tokens left, and so are the tokens of padding nodes.
    """
    vocabulary = log_q.shape[-1]
    nodes = parents.shape[0]
    tokens = jnp.pad(continuations(vocabulary, nodes - 1), ((0, 0), (1, 0)))
    chosen = _chosen(parents, draws)

    def of_tokens(tokens):
        bare = Draft(tokens, parents)
        laws = log_q.at[_contexts(bare, vocabulary)].get(mode="clip")
        weights = jax.vmap(lambda node: _log_weight(bare, laws, chosen, node))(jnp.arange(1, nodes))
        if draws == "top_and_one":
            laws = _without_chosen(bare, laws, chosen)
        return Draft(tokens, parents, laws), jnp.sum(weights)

    draft, log_weight = jax.vmap(of_tokens)(tokens)
    return (replace(draft, log_q=None) if draws == "top_k" else draft), log_weight


def fixed_draft(
    tokens: Int[Array, " N"], parents: Int[Array, " N"], dtype=jnp.float64
) -> tuple[Draft, Float[Array, " X"]]:
    """The one draft of a drafter that leaves nothing to chance, with probability 1."""
    return Draft(tokens[None], parents[None]), jnp.zeros((1,), dtype)


def _chosen(parents: Int[Array, " N"], draws: str) -> Bool[Array, " N"]:
    """Which nodes are the most likely of what is left, instead of drawn."""
    index = jnp.arange(parents.shape[0])
    has_later_sibling = jnp.any((parents == parents[:, None]) & (index > index[:, None]), axis=1)
    return {
        "sample": jnp.zeros_like(has_later_sibling),
        "top_k": jnp.ones_like(has_later_sibling),
        "top_and_one": has_later_sibling,
    }[draws]


def _log_weight(draft: Draft, laws: Float[Array, "N V"], chosen, node) -> Float[Array, ""]:
    """Log-probability of one node's token, given the nodes before it."""
    parent, token = draft.parents[node], draft.tokens[node]
    index = jnp.arange(draft.parents.shape[0])
    taken = _tokens_of(draft, (draft.parents == parent) & (index < node), laws.shape[-1])
    left = jnp.where(taken, 0.0, jnp.exp(laws[jnp.maximum(parent, ROOT)]))
    possible = jnp.any(left > 0)
    best = jnp.where(jnp.arange(laws.shape[-1]) == jnp.argmax(left), 1.0, 0.0)
    left = jnp.where(possible & chosen[node], best, left)
    left = jnp.where(possible, left, jnp.where(taken, 0.0, 1.0))
    drawn = jnp.log(left[token]) - jnp.log(jnp.sum(left))
    return jnp.where(parent == NO_PARENT, -jnp.log(1.0 * laws.shape[-1]), drawn)


def _without_chosen(draft: Draft, laws: Float[Array, "N V"], chosen) -> Float[Array, "N V"]:
    """The laws from which drawn children came: without the tokens of those chosen before."""

    def of_node(node, log_q):
        taken = _tokens_of(draft, (draft.parents == node) & chosen, log_q.shape[-1])
        left = jnp.where(taken, -jnp.inf, log_q)
        total = jax.nn.logsumexp(left)
        return left - jnp.where(total > -jnp.inf, total, 0.0)

    return jax.vmap(of_node)(jnp.arange(laws.shape[0]), laws)


def _tokens_of(draft: Draft, chosen: Bool[Array, " N"], vocabulary: int) -> Bool[Array, " V"]:
    return jnp.any(chosen[:, None] & (draft.tokens[:, None] == jnp.arange(vocabulary)), axis=0)


def _contexts(draft: Draft, vocabulary: int) -> Int[Array, " N"]:
    """The context at each node of one draft; at padding, that of a child of the root."""

    def place(node, context):
        parent = context[jnp.maximum(draft.parents[node], ROOT)]
        return context.at[node].set(vocabulary * parent + draft.tokens[node] + 1)

    nodes = draft.tokens.shape[0]
    return lax.fori_loop(1, nodes, place, jnp.zeros((nodes,), draft.tokens.dtype))


def _num_nodes(log_p) -> int:
    """Contexts and the whole sequences beyond them."""
    contexts, vocabulary = log_p.shape
    return vocabulary * contexts + 1


def _continue(reached: Float[Array, " nodes"], log_p: Float[Array, "C V"]) -> Float[Array, " _"]:
    """Lets what has been emitted go on by the target's law until every sequence is whole."""
    contexts, vocabulary = log_p.shape
    first, size = 0, 1
    while first < contexts:
        here = slice(first, first + size)
        flow = reached[here, None] * jnp.exp(log_p[here])
        first, size = vocabulary * first + 1, vocabulary * size
        reached = reached.at[first : first + size].add(flow.reshape(-1))
    return reached[first:]

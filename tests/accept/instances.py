"""Random pairs of a target's and a draft's law, in kinds that rules have been wrong about."""

import jax
import jax.numpy as jnp
import numpy as np

from specjax.sampling import Sampling, log_probs
from specjax.types import NO_PARENT

PROCESS = jax.jit(log_probs)


def _softmax(logits):
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def _random(rng, shape):
    return _softmax(1.5 * rng.standard_normal(shape)), _softmax(1.5 * rng.standard_normal(shape))


def _equal(rng, shape):
    law = _random(rng, shape)[0]
    return law, law


def _tied(rng, shape):
    """Few distinct probabilities: ties inside each law, and p = q for single tokens."""
    return tuple(_softmax(np.log(rng.integers(1, 3, shape))) for _ in range(2))


def _sparse(rng, shape):
    """Zeros in both laws, each with at least one token possible."""
    laws = []
    for law in _random(rng, shape):
        kept = rng.random(shape) < 0.6
        kept |= np.arange(shape[-1]) == rng.integers(shape[-1], size=(*shape[:-1], 1))
        laws.append(law * kept / (law * kept).sum(-1, keepdims=True))
    return tuple(laws)


def _disjoint(rng, shape):
    """No token that both laws can draw."""
    target, draft = _random(rng, shape)
    draw_low = np.arange(shape[-1]) < rng.integers(1, shape[-1], size=(*shape[:-1], 1))
    target, draft = target * draw_low, draft * ~draw_low
    return target / target.sum(-1, keepdims=True), draft / draft.sum(-1, keepdims=True)


def _tiny(rng, shape):
    """Probabilities down to 1e-100, far below what rounding leaves of a sum."""
    return tuple(_softmax(rng.uniform(-230, 0, shape)) for _ in range(2))


def _processed(target_settings, draft_settings):
    """Both laws out of `specjax.sampling.log_probs`."""

    def kind(rng, shape):
        laws = []
        for settings in (target_settings, draft_settings):
            logits = jnp.asarray(2 * rng.standard_normal((1, shape[0], shape[1])))
            law = np.exp(np.asarray(PROCESS(Sampling.create(1, **settings), logits), np.float64))
            laws.append((law / law.sum(-1, keepdims=True))[0])
        return tuple(laws)

    return kind


KINDS = {
    "random": _random,
    "equal": _equal,
    "tied": _tied,
    "sparse": _sparse,
    "disjoint": _disjoint,
    "tiny": _tiny,
    "greedy target": _processed({"temperature": 0.0}, {}),
    "greedy draft": _processed({}, {"temperature": 0.0}),
    "both greedy": _processed({"temperature": 0.0}, {"temperature": 0.0}),
    "truncated": _processed({"top_k": 2}, {"top_p": 0.7}),
}


def law_pairs(seed, contexts, vocabulary, repeats):
    """(log_p, log_q), each [kinds * repeats, contexts, V] in float64, all kinds in turn."""
    rng = np.random.default_rng(seed)
    pairs = [kind(rng, (contexts, vocabulary)) for _ in range(repeats) for kind in KINDS.values()]
    with np.errstate(divide="ignore"):
        return tuple(jnp.asarray(np.log(np.stack(laws))) for laws in zip(*pairs, strict=True))


def padded_chains(seed, rows, nodes):
    """Parents of chains of every length, from a root without a child to the full one."""
    drafted = np.random.default_rng(seed).permutation(np.arange(rows) % nodes)
    index = np.arange(nodes)
    return jnp.asarray(np.where(index <= drafted[:, None], index - 1, NO_PARENT), jnp.int32)


def random_trees(seed, rows, nodes, vocabulary):
    """Parents and tokens of trees with distinct siblings, some nodes padding: both [rows, nodes].

    A node whose parent is full, or that was chosen for it, is padding; whole rows may be.
    """
    rng = np.random.default_rng(seed)
    parents = np.full((rows, nodes), NO_PARENT, np.int32)
    tokens = rng.integers(vocabulary, size=(rows, nodes)).astype(np.int32)
    for row in range(rows):
        padding = rng.choice([0.0, 0.3, 1.0], p=[0.5, 0.45, 0.05])
        for node in range(1, nodes):
            parent = rng.integers(node)
            taken = tokens[row, parents[row] == parent]
            left = np.setdiff1d(np.arange(vocabulary), taken)
            if rng.random() >= padding and left.size:
                parents[row, node], tokens[row, node] = parent, rng.choice(left)
    return jnp.asarray(parents), jnp.asarray(tokens)

"""The sampling transforms once more, by full sorts in NumPy: an oracle for `specjax.sampling`."""

import numpy as np
from jaxtyping import Float

GREEDY_BELOW = 1e-5


def log_probs(
    logits: Float[np.ndarray, " V"],
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> Float[np.ndarray, " V"]:
    """The log-law of one row in float64: temperature, min-p, top-k, top-p, in this order.

    Ties go to the lowest id. A temperature below 1e-5 is the point mass on the maximum.
    """
    logits = np.asarray(logits, np.float64)
    vocabulary = logits.shape[0]
    if temperature < GREEDY_BELOW:
        return np.where(np.arange(vocabulary) == np.argmax(logits), 0.0, -np.inf)
    law = _normalise(logits / temperature)
    if min_p > 0:
        law = _keep(law, np.exp(law) >= min_p * np.exp(law.max()))
    if 0 < top_k < vocabulary:
        law = _keep(law, _rank(law) < top_k)
    if top_p < 1:
        ranked = np.exp(np.sort(law)[::-1])
        before = np.concatenate([[0.0], np.cumsum(ranked)[:-1]])
        law = _keep(law, (before < top_p)[_rank(law)])
    return law


def _rank(law):
    """Place of each token when the most likely come first, the lowest id among equals."""
    rank = np.empty(law.shape[0], np.int64)
    rank[np.argsort(-law, kind="stable")] = np.arange(law.shape[0])
    return rank


def _keep(law, kept):
    return _normalise(np.where(kept, law, -np.inf))


def _normalise(law):
    shifted = law - law.max()
    return shifted - np.log(np.exp(shifted).sum())

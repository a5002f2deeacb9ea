"""Language models that are a table, so that their laws can be written down.

Each of `TABLES` is a target and a draft model over a vocabulary of 3 that look at the last two
tokens. They are alike in shape, so they share compiled programs.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from specjax.recompute import Recompute
from specjax.testing import reference

VOCABULARY = 3
PROMPT = (0, 1, 2, 0, 1)
DEPTH = 4


def second_order(params: Float[Array, "V V V"], tokens: Int[Array, "B S"]) -> Float[Array, "B S V"]:
    """Logits that depend on the last two tokens: a function for `specjax.recompute.Recompute`.

    ``params[a, b]`` are the logits after ``a`` then ``b``; before the first token stands a 0.
    """
    before = jnp.pad(tokens, ((0, 0), (1, 0)))[:, :-1]
    return params[before, tokens]


@dataclass(frozen=True, eq=False)
class Table:
    """A target and a draft model that are tables of logits, and the exact law of the target.

    ``logits[a, b]`` are those after ``a`` then ``b``; -inf is probability 0. ``about`` says what
    the table is hard about.
    """

    about: str
    logits: Float[np.ndarray, "V V V"]
    draft_logits: Float[np.ndarray, "V V V"]
    prompt: tuple[int, ...] = PROMPT

    @property
    def vocabulary(self) -> int:
        return self.logits.shape[-1]

    @property
    def target(self) -> Recompute:
        """The target, and as well the draft model: they differ in parameters only."""
        return Recompute(second_order)

    @property
    def params(self) -> Float[Array, "V V V"]:
        return jnp.asarray(self.logits, jnp.float32)

    @property
    def draft_params(self) -> Float[Array, "V V V"]:
        return jnp.asarray(self.draft_logits, jnp.float32)

    def law(self, depth: int = DEPTH, **parameters: Any) -> Float[np.ndarray, "..."]:
        """Probability [V, ..., V] of each sequence of ``depth`` tokens after the prompt.

        ``parameters`` are those of `specjax.testing.reference.log_probs`. A sequence that has come
        to one of ``stop_token_ids`` repeats it to the end.
        """
        law = np.zeros((self.vocabulary,) * depth)
        sequences = reference.sequence_law(self._next_logits, self.prompt, depth, **parameters)
        for sequence, probability in sequences.items():
            law[sequence] = probability
        return law

    def _next_logits(self, contexts):
        return self.logits[contexts[:, -2], contexts[:, -1]]


def laws_apart(
    seed: int, shape: tuple[int, ...], lowest: float = 0.2, highest: float = 0.5
) -> tuple[Float[Array, "*shape"], Float[Array, "*shape"]]:
    """Log-probabilities of a target and a draft law, one each per context.

    In every context they are between ``lowest`` and ``highest`` apart in total variation: near
    enough to accept often, far enough that a wrong residual shows. The last axis of ``shape`` is
    the vocabulary.
    """
    target, draft = (np.log(laws) for laws in _apart(seed, shape, lowest, highest))
    return jnp.asarray(target, jnp.float32), jnp.asarray(draft, jnp.float32)


def _apart(seed, shape, lowest=0.2, highest=0.5):
    rng = np.random.default_rng(seed)
    vocabulary = shape[-1]
    pairs = [_pair_apart(rng, vocabulary, lowest, highest) for _ in range(np.prod(shape[:-1]))]
    return tuple(np.stack(laws).reshape(shape) for laws in zip(*pairs, strict=True))


def _pair_apart(rng, vocabulary, lowest, highest):
    while True:
        target, draft = rng.dirichlet(np.full(vocabulary, 2.0), size=2)
        inside = lowest < np.abs(target - draft).sum() / 2 < highest
        if inside and min(target.min(), draft.min()) > 0.02:
            return target, draft


SHAPE = (VOCABULARY,) * 3


def _table(about: str, target, draft) -> Table:
    """From two sets of laws that broadcast to [V, V, V]."""
    return Table(about, _logits(target), _logits(draft))


def _logits(laws):
    with np.errstate(divide="ignore"):
        return np.log(np.broadcast_to(laws, SHAPE)).astype(np.float32)


def _without(laws, lacking):
    """The laws renormalised without one token each: ``lacking[a, b]``."""
    kept = np.where(np.arange(VOCABULARY) == lacking[..., None], 0.0, laws)
    return kept / kept.sum(-1, keepdims=True)


def _rare(laws, rare, probability):
    """The laws with one token each made rare."""
    return (1 - probability) * _without(laws, rare) + probability * np.eye(VOCABULARY)[rare]


def _trigram():
    return _table("every context has its own law", *_apart(11, SHAPE))


def _markov():
    return _table("only the last token counts", *_apart(12, SHAPE[1:]))


def _counting():
    next_token = np.eye(VOCABULARY)[(np.arange(VOCABULARY) + 1) % VOCABULARY]
    return _table("the target is certain: last + 1", next_token, 0.6 * next_token + 0.4 / 3)


def _ties():
    rng = np.random.default_rng(13)
    ties = [rng.permuted(np.broadcast_to([0.25, 0.25, 0.5], SHAPE), axis=-1) for _ in range(2)]
    return _table("equal probabilities, and p = q for single tokens", *ties)


def _equal():
    law = _apart(14, SHAPE)[0]
    return _table("p = q everywhere: the residual is empty", law, law)


def _zeros():
    rng, (target, draft) = np.random.default_rng(15), _apart(15, SHAPE)
    lacking, unproposed = rng.integers(VOCABULARY, size=(2, *SHAPE[:-1]))
    return _table(
        "tokens that p or q never draws", _without(target, lacking), _without(draft, unproposed)
    )


def _near_zeros():
    rng, (target, draft) = np.random.default_rng(16), _apart(16, SHAPE)
    rare, unlikely = rng.integers(VOCABULARY, size=(2, *SHAPE[:-1]))
    return _table(
        "probabilities near 0 in p and in q",
        _rare(target, rare, 2e-3),
        _rare(draft, unlikely, 1e-6),
    )


def _point_masses():
    rng, (target, _) = np.random.default_rng(17), _apart(17, SHAPE)
    certain, guess = rng.integers(VOCABULARY, size=(2, *SHAPE[:-1]))
    sure = (np.arange(VOCABULARY) == 2)[:, None, None]
    target = np.where(sure, np.eye(VOCABULARY)[certain], target)
    return _table(
        "the draft is certain, the target now and then", target, np.eye(VOCABULARY)[guess]
    )


def _disjoint():
    rng, (target, _) = np.random.default_rng(18), _apart(18, SHAPE)
    lacking = rng.integers(VOCABULARY, size=SHAPE[:-1])
    return _table(
        "no token that both can draw", _without(target, lacking), np.eye(VOCABULARY)[lacking]
    )


TABLES: Mapping[str, Table] = MappingProxyType(
    {
        "trigram": _trigram(),
        "markov": _markov(),
        "counting": _counting(),
        "ties": _ties(),
        "equal": _equal(),
        "zeros": _zeros(),
        "near_zeros": _near_zeros(),
        "point_masses": _point_masses(),
        "disjoint": _disjoint(),
    }
)

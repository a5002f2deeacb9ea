"""Language models that are a table, so that their laws can be written down."""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int


def second_order(params: Float[Array, "V V V"], tokens: Int[Array, "B S"]) -> Float[Array, "B S V"]:
    """Logits that depend on the last two tokens: a function for `specjax.recompute.Recompute`.

    ``params[a, b]`` are the logits after ``a`` then ``b``; before the first token stands a 0.
    """
    before = jnp.pad(tokens, ((0, 0), (1, 0)))[:, :-1]
    return params[before, tokens]


def laws_apart(
    seed: int, shape: tuple[int, ...], lowest: float = 0.2, highest: float = 0.5
) -> tuple[Float[Array, "*shape"], Float[Array, "*shape"]]:
    """Log-probabilities of a target and a draft law, one each per context.

    In every context they are between ``lowest`` and ``highest`` apart in total variation: near
    enough to accept often, far enough that a wrong residual shows. The last axis of ``shape`` is
    the vocabulary.
    """
    rng = np.random.default_rng(seed)
    vocabulary = shape[-1]
    pairs = [_pair_apart(rng, vocabulary, lowest, highest) for _ in range(np.prod(shape[:-1]))]
    target, draft = (np.log(np.stack(laws)).reshape(shape) for laws in zip(*pairs, strict=True))
    return jnp.asarray(target, jnp.float32), jnp.asarray(draft, jnp.float32)


def _pair_apart(rng, vocabulary, lowest, highest):
    while True:
        target, draft = rng.dirichlet(np.full(vocabulary, 2.0), size=2)
        inside = lowest < np.abs(target - draft).sum() / 2 < highest
        if inside and min(target.min(), draft.min()) > 0.02:
            return target, draft

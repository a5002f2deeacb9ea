"""Drawing the children of draft nodes: the drafter proposes logits, this draws.

The tokens and the law they were drawn from come out of one float array, processed with the row's
own sampling parameters, so a drafter can neither draw from another law than it reports nor report
another than it drew from.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, Key

from specjax import noise
from specjax.history import History
from specjax.sampling import Sampling, first_argmax, log_probs, renormalised
from specjax.shaping import shape
from specjax.types import NO_TOKEN, Choose


def chooser(
    draws: str,
    sampling: Sampling,
    keys: Key[Array, " B"],
    root: Int[Array, " B"],
    history_of: Callable[[Int[Array, "B M D"]], History | None] = lambda path: None,
) -> Choose:
    """The `Choose` of one round, for a rule that wants ``draws`` and roots at ``root``.

    ``history_of`` tells what came before the children of nodes with these drafted ancestors.
    """
    draw = _DRAWS[draws]

    def choose(logits, node, path, width=1):
        logits = shape(sampling, logits.astype(jnp.float32), history_of(path))
        law, perturbed = lax.cond(
            jnp.all(sampling.greedy),
            lambda: (logits, logits),
            lambda: draw(sampling, keys, root, logits, node, path, width),
        )
        tokens = _largest(perturbed, logits, width)
        score = _score(sampling.greedy, law, logits, tokens)
        return tokens, score, _REPORTED[draws](law, tokens)

    return choose


def _drawn(sampling, logits, perturb):
    law = log_probs(sampling, logits)
    return law, law + perturb(logits.shape[-1])


def _sample(sampling, keys, root, logits, node, path, width):
    def perturb(size):
        per_parent = jax.vmap(noise.draft, in_axes=(None, None, 0, None))
        return jax.vmap(per_parent, in_axes=(0, 0, 0, None))(keys, root, node, size)

    return _drawn(sampling, logits, perturb)


def _coupled(sampling, keys, root, logits, node, path, width):
    position = root[:, None] + jnp.sum(path != NO_TOKEN, axis=-1) + 1

    def perturb(size):
        per_parent = jax.vmap(noise.token, in_axes=(None, 0, None))
        return jax.vmap(per_parent, in_axes=(0, 0, None))(keys, position, size)

    return _drawn(sampling, logits, perturb)


def _top_k(sampling, keys, root, logits, node, path, width):
    law = log_probs(sampling, logits)
    return law, law


def _top_and_one(sampling, keys, root, logits, node, path, width):
    """The most likely, best first, ahead of one drawn from the rest."""
    law, perturbed = _sample(sampling, keys, root, logits, node, path, width)
    _, top = lax.top_k(law, width - 1)
    ahead = jnp.put_along_axis(
        perturbed, top, AHEAD - jnp.arange(width - 1.0), axis=-1, inplace=False
    )
    return law, jnp.where(law > -jnp.inf, ahead, -jnp.inf)


def _rest(law, tokens):
    """The law of the last child, drawn when the others were taken out; -inf if none is left."""
    taken_out = jnp.put_along_axis(law, tokens[..., :-1], -jnp.inf, axis=-1, inplace=False)
    return renormalised(taken_out)


def _all(law, tokens):
    return law


def _nothing(law, tokens):
    return None


# Above any log-probability with its noise, and exact in float32 with a rank taken off.
AHEAD = 1e6

_DRAWS = {"sample": _sample, "coupled": _coupled, "top_k": _top_k, "top_and_one": _top_and_one}
_REPORTED = {"sample": _all, "coupled": _nothing, "top_k": _nothing, "top_and_one": _rest}
WAYS = tuple(_DRAWS)


def _largest(
    perturbed: Float[Array, "B M V"], logits: Float[Array, "B M V"], width: int
) -> Int[Array, "B M {width}"]:
    """The ``width`` largest entries; where they run out, the largest logits of those left."""
    if width == 1:
        return first_argmax(perturbed)[..., None]
    possible = jnp.isfinite(perturbed)
    drawn = lax.top_k(jnp.where(possible, perturbed, -jnp.inf), width)[1]
    # Tokens of logit -inf are spare, too, and must come before those drawn already.
    left = jnp.maximum(logits, jnp.finfo(logits.dtype).min)
    spare = lax.top_k(jnp.where(possible, -jnp.inf, left), width)[1]
    rank, found = jnp.arange(width), jnp.sum(possible, axis=-1, keepdims=True)
    instead = jnp.take_along_axis(spare, jnp.maximum(rank - found, 0), axis=-1)
    return jnp.where(rank < found, drawn, instead).astype(jnp.int32)


def _score(greedy, law, logits, tokens):
    """Log-probability under the law where finite; below all of those, logits before truncation."""
    under_law = jnp.take_along_axis(law, tokens, axis=-1)
    raw = jnp.take_along_axis(jax.nn.log_softmax(logits, axis=-1), tokens, axis=-1)
    drawn = jnp.isfinite(under_law) & ~greedy[:, None, None]
    return jnp.where(drawn, under_law, jnp.where(greedy[:, None, None], raw, raw - 1e6))

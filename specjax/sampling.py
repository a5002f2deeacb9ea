"""From logits to the law that is sampled: one function for draft, target, residual and plain steps.

What is done to logits before is `specjax.shaping`'s. Here temperature comes first, then
`specjax.truncation`. All values are traced, one a row, so greedy, sampled and differently truncated
rows share one compiled call.
"""

import typing
from collections.abc import Callable
from typing import Any, Self

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from specjax.grammar import Grammar
from specjax.penalties import Penalties
from specjax.row_values import integers, numbers, of_rows
from specjax.truncation import Truncation, truncated

GREEDY_BELOW = 1e-5
OPTIONAL = ("truncation", "bias", "penalties", "min_tokens", "bad_words", "grammar", "processor")
WITHOUT_HISTORY = ("truncation", "bias")


@typing.no_type_check
@struct.dataclass
class Sampling:
    """Sampling parameters, a row each.

    Those that are None are absent from what is compiled; the others are traced.

    Attributes:
        temperature: below 1e-5 is greedy.
        truncation: top-k, top-p and min-p.
        bias: added to the logits; -inf bans a token. At least one token must be left.
        penalties: for what prompt and output hold already.
        min_tokens: tokens of output before any of ``ends`` may come; an EOS id that is not among
            them may come at once, and ends the row. They come too where nothing else is left.
        ends: the ids that ``min_tokens`` holds back, padded with -1.
        bad_words: token sequences that the output must not hold, padded with -1 at their start;
            one is completed only where nothing else is left.
        grammar: the automaton that the output follows, all rows' grammars in one. Make it of a
            vocabulary without what ``bias`` bans: where the two leave nothing, it gives way.
        grammar_start: the state that each row's output starts from.
        processed: the rows whose logits ``processor`` changes.
        processor: ``processor(logits [V], past) -> logits [V]``, a hashable function in JAX of one
            token's logits and its `specjax.history.Past`; static. NaN counts as -inf, and where it
            leaves no token at all, by -inf or NaN throughout, the logits stay as they were.
    """

    temperature: Float[Array, " B"]
    truncation: Truncation | None = None
    bias: Float[Array, "B V"] | None = None
    penalties: Penalties | None = None
    min_tokens: Int[Array, " B"] | None = None
    ends: Int[Array, "B Z"] | None = None
    bad_words: Int[Array, "B Q J"] | None = None
    grammar: Grammar | None = None
    grammar_start: Int[Array, " B"] | None = None
    processed: Bool[Array, " B"] | None = None
    processor: Callable[..., Array] | None = struct.field(pytree_node=False, default=None)

    @classmethod
    def create(
        cls,
        batch: int,
        *,
        temperature=1.0,
        top_k=None,
        top_p=None,
        min_p=None,
        repetition_penalty=None,
        presence_penalty=None,
        frequency_penalty=None,
        bias=None,
        min_tokens=None,
        ends=None,
        bad_words=None,
        grammar=None,
        grammar_start=None,
        processor=None,
        processed=True,
    ) -> Self:
        """Parameters for ``batch`` rows, from values for all of them or one value a row.

        Raises ValueError for values of another type or of other rows; `specjax.generate` checks
        their ranges.
        """

        def given(make, name, value, axes=""):
            return None if value is None else of_rows(name, make(name, value), batch, axes)

        if min_tokens is not None and ends is None:
            raise ValueError("min_tokens needs ends, the ids that it holds back")
        if grammar is None and grammar_start is not None:
            raise ValueError("grammar_start needs grammar, whose state it is")
        if grammar is not None and grammar_start is None:
            grammar_start = grammar.start
        return cls(
            temperature=of_rows("temperature", numbers("temperature", temperature), batch),
            truncation=_part(Truncation, batch, top_k=top_k, top_p=top_p, min_p=min_p),
            bias=given(numbers, "bias", bias, "V"),
            penalties=_part(
                Penalties,
                batch,
                repetition=repetition_penalty,
                presence=presence_penalty,
                frequency=frequency_penalty,
            ),
            min_tokens=given(integers, "min_tokens", min_tokens),
            ends=given(integers, "ends", ends, "Z"),
            bad_words=given(integers, "bad_words", bad_words, "Q J"),
            grammar=grammar,
            grammar_start=given(integers, "grammar_start", grammar_start),
            processed=None
            if processor is None
            else of_rows("processed", jnp.asarray(processed, bool), batch),
            processor=processor,
        )

    @property
    def greedy(self) -> Bool[Array, " B"]:
        return self.temperature < GREEDY_BELOW

    @property
    def parts(self) -> tuple[str, ...]:
        """Which of the optional parts are present."""
        return tuple(name for name in OPTIONAL if getattr(self, name) is not None)

    @property
    def looks_back(self) -> bool:
        """Whether any parameter depends on the tokens that came before."""
        return any(name not in WITHOUT_HISTORY for name in self.parts)


def _part(kind: Any, batch: int, **values: Any) -> Any:
    """What any of ``values`` makes of a part, the rest by its own defaults; None where none is."""
    given = {name: value for name, value in values.items() if value is not None}
    return kind.create(batch, **given) if given else None


def first_argmax(values: Float[Array, "*B V"]) -> Int[Array, "*B"]:
    """The lowest index of the maximum of each vector; NaN counts as -inf.

    Two reductions, which XLA vectorises on a CPU, unlike its ``argmax``.
    """
    values = jnp.where(jnp.isnan(values), -jnp.inf, values)
    best = jnp.max(values, axis=-1, keepdims=True)
    index = lax.broadcasted_iota(jnp.int32, values.shape, values.ndim - 1)
    return jnp.min(jnp.where(values == best, index, values.shape[-1] - 1), axis=-1)


def renormalised(law: Float[Array, "*S V"]) -> Float[Array, "*S V"]:
    """A log-law of which tokens were taken out, summing to 1 again; -inf throughout if all were."""
    total = jax.nn.logsumexp(law, axis=-1, keepdims=True)
    return law - jnp.where(total > -jnp.inf, total, 0.0)


def log_probs(sampling: Sampling, logits: Float[Array, "B N V"]) -> Float[Array, "B N V"]:
    """Log-probabilities of the law that each row samples from, in the dtype of ``logits``.

    A greedy row's law is the point mass on the lowest-indexed maximum. Probability 0 is -inf.
    """
    logits = jnp.where(jnp.isnan(logits), -jnp.inf, logits)
    greedy = sampling.greedy
    temperature = jnp.where(greedy, 1.0, sampling.temperature).astype(logits.dtype)
    # Shifted before the division, which rounds the largest entry differently here and there.
    law = logits - jnp.max(logits, axis=-1, keepdims=True)
    law = jax.nn.log_softmax(law / temperature[:, None, None], axis=-1)
    if sampling.truncation is not None:
        law = truncated(sampling.truncation, law, greedy)
    return lax.cond(jnp.any(greedy), _point_mass, lambda _, law, __: law, greedy, law, logits)


def _point_mass(greedy, law, logits):
    index = lax.broadcasted_iota(jnp.int32, law.shape, law.ndim - 1)
    peak = jnp.where(index == first_argmax(logits)[..., None], 0.0, -jnp.inf).astype(law.dtype)
    return jnp.where(greedy[:, None, None], peak, law)

"""Everything that shapes the law once more, in plain NumPy: an oracle for `specjax.sampling`.

One vector at a time, by full sorts and dictionaries, with vLLM's names, meanings and order; and
from there the law of whole sequences.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from numbers import Integral
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from specjax.sampling_params import SamplingParams, require_integer

GREEDY_BELOW = 1e-5
# Parameters that are here what they are in `SamplingParams`: the others are token ids in place of
# text, a table in place of a grammar, and a function of NumPy arrays.
AS_REQUESTED = (
    *("temperature", "top_k", "top_p", "min_p", "min_tokens", "stop_token_ids", "logit_bias"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty"),
    *("allowed_token_ids", "banned_token_ids", "num_speculative_tokens"),
)

Sequences = dict[tuple[int, ...], float]


def sequence_law(
    next_logits: Callable[[np.ndarray], Any],
    prompt: Sequence[int],
    depth: int,
    *,
    stop_token_ids: Sequence[int] = (),
    **parameters: Any,
) -> Sequences:
    """Probabilities of all sequences of ``depth`` tokens that may follow ``prompt``.

    ``next_logits(contexts [N, L]) -> [N, V]`` is asked once a level, for the contexts that can
    occur: with ``top_k`` a model of any vocabulary has a law of at most ``top_k ** depth``
    sequences. ``parameters`` are those of `log_probs`. A sequence that has come to one of
    ``stop_token_ids`` repeats it to the end. Raises ValueError for values that `SamplingParams`
    refuses, for token ids beyond the vocabulary, and for logits that are no law or leave no token.
    """
    require_integer("depth", depth, at_least=1)
    shaping: dict[str, Any] = parameters | {"stop_token_ids": stop_token_ids}
    require_in_range(shaping)
    law: Sequences = {(): 1.0}
    for _ in range(depth):
        contexts = np.array([[*prompt, *output] for output in law], np.int32)
        each_logits = _asked(next_logits, contexts)
        require_in_vocabulary(shaping, each_logits.shape[1])
        longer: Sequences = {}
        for (output, mass), logits in zip(law.items(), each_logits, strict=True):
            if output and output[-1] in stop_token_ids:
                longer[(*output, output[-1])] = mass
                continue
            log_p = log_probs(logits, prompt=prompt, output=output, **shaping)
            for token in np.flatnonzero(log_p > -np.inf).tolist():
                longer[(*output, token)] = mass * float(np.exp(log_p[token]))
        law = longer
    return law


def require_in_range(parameters: Mapping[str, Any]) -> None:
    """Raises ValueError for a value that `SamplingParams` refuses."""
    requested = {name: value for name, value in parameters.items() if name in AS_REQUESTED}
    # The law of the first tokens is the same, however many follow.
    SamplingParams(max_tokens=sys.maxsize, **requested)


def require_in_vocabulary(parameters: Mapping[str, Any], vocabulary: int) -> None:
    """Raises ValueError for a ban or a bias of a token id that is none of 0 to ``vocabulary`` - 1.

    Stop ids and bad words beyond it never come, and may pad others.
    """
    for name in ("allowed_token_ids", "banned_token_ids", "logit_bias"):
        ids = parameters.get(name)
        for id in () if ids is None else ids:
            if not isinstance(id, Integral) or not 0 <= int(id) < vocabulary:
                raise ValueError(
                    f"{name} has the token id {id!r}: the vocabulary has {vocabulary}, 0 to "
                    f"{vocabulary - 1}"
                )


def _asked(next_logits, contexts) -> Float[np.ndarray, "N V"]:
    logits = np.asarray(next_logits(contexts), np.float64)
    if logits.ndim != 2 or len(logits) != len(contexts):
        raise ValueError(
            f"next_logits returned shape {logits.shape} for {len(contexts)} contexts: return "
            "[N, V], a row each"
        )
    return logits


def log_probs(
    logits: Float[np.ndarray, " V"],
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    *,
    prompt: Sequence[int] = (),
    output: Sequence[int] = (),
    logits_processor: Callable[[np.ndarray, np.ndarray], Any] | None = None,
    **shaping: Any,
) -> Float[np.ndarray, " V"]:
    """The log-law of one row in float64, after ``prompt`` and the ``output`` so far.

    ``shaping`` goes to `shaped_logits`; then come the user's processor, which is given the logits
    and all tokens so far, and temperature, min-p, top-k, top-p, in this order. Ties go to the
    lowest id. A temperature below 1e-5 is the point mass on the maximum. Raises ValueError for
    logits that are NaN or +inf, or leave no token.
    """
    logits = shaped_logits(np.asarray(logits, np.float64), prompt, output, **shaping)
    if logits_processor is not None:
        history = np.array([*prompt, *output], np.int32)
        logits = np.asarray(logits_processor(logits, history), np.float64)
    _require_some(logits, output)
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


def shaped_logits(
    logits: Float[np.ndarray, " V"],
    prompt: Sequence[int],
    output: Sequence[int],
    *,
    allowed_token_ids: Sequence[int] | None = None,
    banned_token_ids: Sequence[int] = (),
    grammar: Int[np.ndarray, "Q V"] | None = None,
    bad_words: Sequence[Sequence[int]] = (),
    min_tokens: int = 0,
    stop_token_ids: Sequence[int] = (),
    logit_bias: Mapping[int, float] | None = None,
    repetition_penalty: float = 1.0,
    frequency_penalty: float = 0.0,
    presence_penalty: float = 0.0,
) -> Float[np.ndarray, " V"]:
    """Logits after bans, biases and penalties, in vLLM's order.

    Allowed and banned ids; a ``grammar``, the next state of each state and token, or -1 where the
    token may not come, from state 0 on; bad words, each a list of ids whose last one is banned
    where the output ends with the others; no end (``stop_token_ids``, EOS among them) before
    ``min_tokens``; biases; the repetition penalty over prompt and output; frequency and presence
    penalties over the output. The last three bans yield where they would leave no token at all.
    """
    logits = logits.copy()
    if allowed_token_ids is not None:
        logits = _without(logits, set(range(logits.shape[0])) - set(allowed_token_ids))
    logits = _without(logits, banned_token_ids)
    if grammar is not None:
        logits = _unless_empty(np.where(_allowed(grammar, output), logits, -np.inf), logits)
    completed = [word[-1] for word in bad_words if _ends_with(output, word[:-1])]
    logits = _unless_empty(_without(logits, completed), logits)
    if len(output) < min_tokens:
        logits = _unless_empty(_without(logits, stop_token_ids), logits)
    for token, bias in (logit_bias or {}).items():
        logits[token] += bias
    for token in {*prompt, *output}:
        seen = logits[token]
        logits[token] = seen / repetition_penalty if seen > 0 else seen * repetition_penalty
    for token in set(output):
        logits[token] -= frequency_penalty * list(output).count(token) + presence_penalty
    return logits


def _require_some(logits, output) -> None:
    after = f"after the output {list(output)}"
    if not np.all(logits < np.inf):
        raise ValueError(f"{after} a logit is NaN or +inf: mend the model or logits_processor")
    if not np.any(logits > -np.inf):
        raise ValueError(f"{after} no token is left, each logit is -inf: allow one that can come")


def _allowed(grammar, output):
    state = 0
    for token in output:
        state = grammar[state, token] if state >= 0 else state
    return (grammar[state] >= 0) & (state >= 0)


def _ends_with(output, tokens) -> bool:
    return list(output[len(output) - len(tokens) :]) == list(tokens)


def _without(logits, tokens):
    return np.where(np.isin(np.arange(logits.shape[0]), list(tokens)), -np.inf, logits)


def _unless_empty(logits, otherwise):
    return logits if np.any(logits > -np.inf) else otherwise


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

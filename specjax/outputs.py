"""What a generation gives back, in the names of vLLM's outputs."""

import math
from dataclasses import dataclass

import numpy as np

from specjax.metrics import Metrics
from specjax.types import Scores


@dataclass(frozen=True)
class TokenLogprobs:
    """What target and rule thought of one token of the output.

    Attributes:
        token_id: the token.
        logprob: its log-probability under the model's own law, before any sampling parameter.
        processed_logprob: the same under the law that was sampled; 0 where that is greedy.
        top: the most likely token ids under the model's own law and their log-probabilities, most
            likely first.
        acceptance_probability: how likely a draft was to stand here; None where none was drafted.
    """

    token_id: int
    logprob: float
    processed_logprob: float
    top: dict[int, float]
    acceptance_probability: float | None


@dataclass(frozen=True)
class CompletionOutput:
    """One sample of a prompt.

    ``finish_reason`` is "stop" (EOS, a stop id or string), "length", or "abort" where the run was
    interrupted. ``stop_reason`` is the stop string or id that ended it, None for EOS.
    ``token_ids`` go up to and including the token that completed the stop; ``logprobs`` has an
    entry for each of them, where they were asked for.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str
    stop_reason: str | int | None
    metrics: Metrics
    logprobs: list[TokenLogprobs] | None = None


@dataclass(frozen=True)
class RequestOutput:
    """A prompt and its samples."""

    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]

    @property
    def text(self) -> str:
        """The first sample's text."""
        return self.outputs[0].text

    @property
    def token_ids(self) -> list[int]:
        """The first sample's tokens."""
        return self.outputs[0].token_ids

    @property
    def metrics(self) -> Metrics:
        """The first sample's measures."""
        return self.outputs[0].metrics


@dataclass(frozen=True)
class Delta:
    """News of one sample in a stream; ``output`` is the whole of it, with its last delta."""

    request: int
    index: int
    text: str
    token_ids: list[int]
    output: CompletionOutput | None = None

    @property
    def finish_reason(self) -> str | None:
        return None if self.output is None else self.output.finish_reason


def token_logprobs(
    scores: Scores | None, token_ids: list[int], alternatives: int | None
) -> list[TokenLogprobs] | None:
    """Those of one output, from its `Scores`; None where none were asked for."""
    if alternatives is None:
        return None
    if scores is None:
        return []
    parts = scores.raw, scores.processed, scores.top_ids, scores.top, scores.acceptance
    columns = [np.asarray(part).tolist() for part in parts]
    return [
        TokenLogprobs(
            token_id=token,
            logprob=raw,
            processed_logprob=processed,
            top=dict(zip(ids[:alternatives], values[:alternatives], strict=True)),
            acceptance_probability=None if math.isnan(acceptance) else acceptance,
        )
        for token, raw, processed, ids, values, acceptance in zip(token_ids, *columns, strict=False)
    ]

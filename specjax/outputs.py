"""What a generation gives back, in the names of vLLM's outputs."""

from dataclasses import dataclass

from specjax.metrics import Metrics


@dataclass(frozen=True)
class CompletionOutput:
    """One sample of a prompt.

    ``finish_reason`` is "stop" (EOS, a stop id or string), "length", or "abort" where the run was
    interrupted. ``stop_reason`` is the stop string or id that ended it, None for EOS.
    ``token_ids`` go up to and including the token that completed the stop.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str
    stop_reason: str | int | None
    metrics: Metrics


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

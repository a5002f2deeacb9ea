"""The same prompts with speculation off and on, interleaved, medians and ratios.

Clock drift between two runs of one program exceeds most gains worth measuring, so the two
alternate prompt by prompt, and every speed-up is a ratio of medians of one run.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from specjax.bench.prompts import BenchPrompt
from specjax.bench.table import table
from specjax.llm import LLM
from specjax.outputs import CompletionOutput
from specjax.sampling_params import SamplingParams

REPEATS = 3
PAYS, LOSES = 1.05, 0.97
LONGER_WINDOW = 0.8


@dataclass(frozen=True)
class Pair:
    """One prompt's outputs, plain and speculative, over the repeats."""

    kind: str
    plain: list[CompletionOutput]
    speculative: list[CompletionOutput]

    @property
    def identical(self) -> bool:
        return self.plain[0].token_ids == self.speculative[0].token_ids

    @property
    def plain_speed(self) -> float:
        return _median(self.plain, "tokens_per_second")

    @property
    def speculative_speed(self) -> float:
        return _median(self.speculative, "tokens_per_second")


@dataclass(frozen=True)
class Summary:
    """Medians over the prompts of one kind."""

    kind: str
    prompts: int
    plain_tokens_per_second: float
    tokens_per_second: float
    speedup: float | None
    tpot_ms: float
    ttft_ms: float
    acceptance_rate: float
    tokens_per_target_forward: float
    acceptance_by_position: list[float]
    identical: int
    verdict: str


def compare(
    plain: LLM,
    speculative: LLM,
    prompts: Sequence[BenchPrompt],
    params: SamplingParams,
    *,
    repeats: int = REPEATS,
    on_step: Callable[[], Any] = lambda: None,
) -> list[Pair]:
    """Measures each prompt ``repeats`` times each way, alternating, after one warm-up each."""
    ids = [prompt.token_ids(plain.tokenizer) for prompt in prompts]
    for one in ids:
        for engine in (plain, speculative):
            _run(engine, one, params)
            on_step()
    pairs = [Pair(prompt.kind, [], []) for prompt in prompts]
    for _ in range(repeats):
        for pair, one in zip(pairs, ids, strict=True):
            pair.plain.append(_run(plain, one, params))
            on_step()
            pair.speculative.append(_run(speculative, one, params))
            on_step()
    return pairs


def summarise(pairs: Sequence[Pair]) -> list[Summary]:
    """One summary a kind, in the order in which the kinds appear."""
    kinds = dict.fromkeys(pair.kind for pair in pairs)
    return [_summary(kind, [pair for pair in pairs if pair.kind == kind]) for kind in kinds]


def report(summaries: Sequence[Summary], promises_identity: bool) -> str:
    """The table and the verdicts, as Markdown."""
    header = [
        *("prompts", "n", "plain tok/s", "tok/s", "speed-up", "TPOT ms", "TTFT ms"),
        *("acceptance", "tokens/forward", "identical"),
    ]
    rows = [
        (
            one.kind,
            one.prompts,
            f"{one.plain_tokens_per_second:.1f}",
            f"{one.tokens_per_second:.1f}",
            "none" if one.speedup is None else f"{one.speedup:.2f}x",
            f"{one.tpot_ms:.1f}",
            f"{one.ttft_ms:.0f}",
            f"{one.acceptance_rate:.2f}",
            f"{one.tokens_per_target_forward:.2f}",
            f"{one.identical}/{one.prompts}" if promises_identity else "not promised",
        )
        for one in summaries
    ]
    verdicts = [f"{one.kind}: {one.verdict}" for one in summaries]
    return "\n".join([table(header, rows), "", *verdicts])


def complete(
    engine: LLM, prompts: Sequence[list[int]], params: SamplingParams
) -> list[CompletionOutput]:
    """The first sample of each prompt. Raises KeyboardInterrupt where one was interrupted.

    `LLM.generate` hands out what is there; what is compared must be whole.
    """
    outputs = [one.outputs[0] for one in engine.generate(prompts, params, use_tqdm=False)]
    if any(output.finish_reason == "abort" for output in outputs):
        raise KeyboardInterrupt
    return outputs


def _run(engine: LLM, ids: list[int], params: SamplingParams) -> CompletionOutput:
    return complete(engine, [ids], params)[0]


def _summary(kind: str, pairs: list[Pair]) -> Summary:
    outputs = [pair.speculative[0] for pair in pairs]
    # An output of one token, or none beyond EOS, has no speed.
    timed = [pair for pair in pairs if pair.plain_speed and pair.speculative_speed]
    speedups = [pair.speculative_speed / pair.plain_speed for pair in timed]
    speedup = statistics.median(speedups) if speedups else None
    counts = [output.metrics.counts for output in outputs]
    drafted = np.sum([one.drafted for one in counts], axis=0)
    accepted = np.sum([one.accepted for one in counts], axis=0)
    by_position = [float(a / d) if d else 0.0 for a, d in zip(accepted, drafted, strict=True)]
    rounds = sum(one.rounds for one in counts)
    return Summary(
        kind=kind,
        prompts=len(pairs),
        plain_tokens_per_second=statistics.median(pair.plain_speed for pair in pairs),
        tokens_per_second=statistics.median(pair.speculative_speed for pair in pairs),
        speedup=speedup,
        tpot_ms=1e3 * statistics.median(_median(pair.speculative, "tpot") for pair in pairs),
        ttft_ms=1e3 * statistics.median(_median(pair.speculative, "ttft") for pair in pairs),
        acceptance_rate=float(accepted.sum() / max(drafted.sum(), 1)),
        tokens_per_target_forward=sum(one.emitted for one in counts) / max(rounds, 1),
        acceptance_by_position=by_position,
        identical=sum(pair.identical for pair in pairs),
        verdict=_verdict(speedup, by_position),
    )


def _verdict(speedup: float | None, by_position: list[float]) -> str:
    if speedup is None:
        return "no output has a second token: ask for more tokens"
    if speedup < LOSES:
        return f"does not pay here ({speedup:.2f}x): decode plainly, or draft fewer tokens"
    if by_position and by_position[-1] > LONGER_WINDOW:
        longer = 2 * len(by_position)
        return (
            f"pays ({speedup:.2f}x); the last draft position is still accepted "
            f"{by_position[-1]:.0%} of the time: try a longer window (num_speculative_tokens="
            f"{longer})"
        )
    if speedup < PAYS:
        return f"makes no difference here ({speedup:.2f}x)"
    return f"pays ({speedup:.2f}x)"


def _median(outputs: list[CompletionOutput], measure: str) -> float:
    return statistics.median(getattr(output.metrics, measure) for output in outputs)

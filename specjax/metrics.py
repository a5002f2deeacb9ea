"""What a generation cost and what speculation gained, each measure defined once.

All counts are over rounds: the first token, drawn by prefill, belongs to none.
"""

from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np

from specjax.types import Stats, Trace


@dataclass(frozen=True)
class Counts:
    """`specjax.types.Stats` of one row, on the host."""

    rounds: int
    emitted: int
    drafted: np.ndarray
    accepted: np.ndarray
    draft_forwards: int
    truncated: int

    @classmethod
    def of_row(cls, stats: Stats, row: int) -> Self:
        """Row ``row`` of device counts already fetched to the host."""
        return cls(
            rounds=int(stats.rounds[row]),
            emitted=int(stats.emitted[row]),
            drafted=np.asarray(stats.drafted[row], np.int64),
            accepted=np.asarray(stats.accepted[row], np.int64),
            draft_forwards=int(stats.draft_forwards[row]),
            truncated=int(stats.truncated[row]),
        )

    def cut(self, after: Self, trace: Trace, row: int, kept: int) -> Self:
        """Counts of a chunk that began with these and ended with ``after``, cut at a stop string.

        Of the tokens that the chunk's rounds emitted the first ``kept`` stand. Later ones of the
        round of the last of them count as truncated; rounds that ran on because the host had not
        looked yet count in nothing, so that no count depends on how many they were.
        """
        if kept == after.emitted - self.emitted:
            return after
        counts, depth = self, np.arange(1, len(self.drafted) + 1)
        forwards = (after.draft_forwards - self.draft_forwards) // max(
            after.rounds - self.rounds, 1
        )
        beyond = 0
        for emitted, drafted in zip(trace.emitted[:, row], trace.drafted[:, row], strict=True):
            if kept == 0:
                break
            stands = min(kept, int(emitted))
            counts = replace(
                counts,
                rounds=counts.rounds + 1,
                emitted=counts.emitted + stands,
                drafted=counts.drafted + (depth <= drafted),
                accepted=counts.accepted + (depth <= min(int(emitted) - 1, stands)),
                draft_forwards=counts.draft_forwards + forwards,
            )
            kept, beyond = kept - stands, int(emitted) - stands
        if counts.rounds == after.rounds:  # the device too cut this round, at EOS or the budget
            beyond += after.truncated - self.truncated
        return replace(counts, truncated=self.truncated + beyond)


@dataclass(frozen=True)
class Metrics:
    """Measures of one sample.

    Attributes:
        prompt_tokens: length of the prompt.
        output_tokens: tokens of the output, the first one included.
        ttft: seconds from the start of the prefill to the first token.
        decode_seconds: seconds from the first token to the chunk in which the sample ended.
        counts: per-position counts over the rounds.
    """

    prompt_tokens: int
    output_tokens: int
    ttft: float
    decode_seconds: float
    counts: Counts

    @property
    def acceptance_rate(self) -> float:
        """Accepted drafts / drafted tokens; 0 where nothing was drafted."""
        drafted = int(self.counts.drafted.sum())
        return int(self.counts.accepted.sum()) / drafted if drafted else 0.0

    @property
    def acceptance_by_position(self) -> list[float]:
        """For each draft position, accepted / drafted there."""
        pairs = zip(self.counts.accepted, self.counts.drafted, strict=True)
        return [float(accepted / drafted) if drafted else 0.0 for accepted, drafted in pairs]

    @property
    def mean_accepted_tokens(self) -> float:
        """Accepted drafts a round, the bonus not counted."""
        return int(self.counts.accepted.sum()) / max(self.counts.rounds, 1)

    @property
    def tokens_per_target_forward(self) -> float:
        """Tokens emitted a round, the bonus counted: vLLM's mean acceptance length."""
        return self.counts.emitted / self.counts.rounds if self.counts.rounds else 1.0

    @property
    def target_forwards(self) -> int:
        """Target forwards after prefill: one a round."""
        return self.counts.rounds

    @property
    def tpot(self) -> float:
        """Seconds an output token after the first."""
        return self.decode_seconds / max(self.output_tokens - 1, 1)

    @property
    def tokens_per_second(self) -> float:
        """Decoding speed: tokens after the first / seconds after the first."""
        return (self.output_tokens - 1) / self.decode_seconds if self.decode_seconds else 0.0

    def as_dict(self) -> dict[str, Any]:
        """All measures as JSON values."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "output_tokens": self.output_tokens,
            "ttft": self.ttft,
            "tpot": self.tpot,
            "tokens_per_second": self.tokens_per_second,
            "rounds": self.counts.rounds,
            "drafted": self.counts.drafted.tolist(),
            "accepted": self.counts.accepted.tolist(),
            "acceptance_rate": self.acceptance_rate,
            "acceptance_by_position": self.acceptance_by_position,
            "mean_accepted_tokens": self.mean_accepted_tokens,
            "tokens_per_target_forward": self.tokens_per_target_forward,
            "target_forwards": self.target_forwards,
            "draft_forwards": self.counts.draft_forwards,
            "truncated": self.counts.truncated,
        }

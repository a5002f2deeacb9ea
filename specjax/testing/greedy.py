"""The numerics of greedy output: each token re-scored by the plain model, each difference sorted.

A block of drafted tokens and a single token are different matrix products, so nearly tied tokens
may swap. A token that is not the plain model's best is a near-tie where its logit is within the
dtype's step of the best: 1e-4 in float32, two steps of a 16-bit format at that magnitude. Anything
farther is a fault.
"""

import dataclasses
import functools
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int
from tqdm.auto import tqdm

from specjax.bench.compare import complete
from specjax.bench.findings import write_json
from specjax.bench.prompts import bundled_prompts
from specjax.bench.table import table
from specjax.compilation_cache import enable_compilation_cache
from specjax.llm import LLM
from specjax.sampling import first_argmax
from specjax.sampling_params import SamplingParams
from specjax.testing.identity import NEAR_TIE, speculation
from specjax.types import Target

STEPS = 2
CHUNK = 64
ROWS_AT_ONCE = 4


@dataclass(frozen=True)
class Difference:
    """A token that is not the plain model's best: by how much its logit is below, and the step."""

    row: int
    position: int
    token: int
    best: int
    gap: float
    step: float

    @property
    def is_fault(self) -> bool:
        return not self.gap <= self.step


@dataclass(frozen=True)
class GreedyReport:
    """How greedy output stands to the plain model's own best tokens."""

    tokens: int
    near_ties: tuple[Difference, ...]
    faults: tuple[Difference, ...]

    @property
    def passed(self) -> bool:
        return not self.faults

    @property
    def widest(self) -> float:
        """The largest gap below the best, 0 where every token is the best."""
        return max((one.gap for one in (*self.near_ties, *self.faults)), default=0.0)

    def __str__(self) -> str:
        best = self.tokens - len(self.near_ties) - len(self.faults)
        lines = [
            f"{self.tokens} tokens: {best} the plain model's best, "
            f"{len(self.near_ties)} near-ties, {len(self.faults)} faults"
        ]
        lines += [
            f"  fault: row {one.row}, position {one.position}: token {one.token} is {one.gap:.3g} "
            f"below token {one.best} (a step is {one.step:.2g})"
            for one in self.faults
        ]
        return "\n".join(lines)


def greedy_report(
    target: Target,
    params: Any,
    tokens: Int[Any, "B L"],
    prompt_length: Int[Any, " B"],
    length: Int[Any, " B"],
    *,
    dtype: DTypeLike = jnp.float32,
) -> GreedyReport:
    """Re-scores the output ``tokens[prompt_length:length]`` of each row, given its own past.

    ``target`` and ``params`` are the plain model, ``dtype`` what it computes in. Unlike a
    comparison with plain output it goes on after the first difference. Raises ValueError where a
    row has no prompt, where its output ends before it begins or beyond the array, and where no row
    has any.
    """
    tokens, prompt_length, length = (np.asarray(one) for one in (tokens, prompt_length, length))
    _require_output(tokens, prompt_length, length)
    width = -(-tokens.shape[1] // CHUNK) * CHUNK
    tokens = np.pad(tokens, ((0, 0), (0, width - tokens.shape[1])))
    differences = []
    for first in range(0, len(tokens), ROWS_AT_ONCE):
        some = tokens[first : first + ROWS_AT_ONCE]
        padded = np.pad(some, ((0, ROWS_AT_ONCE - len(some)), (0, 0)))
        scores = _scores(target, params, jnp.asarray(padded, jnp.int32))
        best, top, own = (np.asarray(part)[: len(some)] for part in scores)
        place = np.arange(width) + 1  # the position that each score is about
        emitted = (place >= prompt_length[first : first + len(some), None]) & (
            place < length[first : first + len(some), None]
        )
        after = np.roll(some, -1, axis=1)
        for row, column in np.argwhere(emitted & (best != after)):
            differences.append(
                Difference(
                    row=int(first + row),
                    position=int(column + 1),
                    token=int(after[row, column]),
                    best=int(best[row, column]),
                    gap=float(top[row, column] - own[row, column]),
                    step=_step(float(top[row, column]), dtype),
                )
            )
    return GreedyReport(
        tokens=int(np.sum(length - prompt_length)),
        near_ties=tuple(one for one in differences if not one.is_fault),
        faults=tuple(one for one in differences if one.is_fault),
    )


def _require_output(tokens, prompt_length, length) -> None:
    if tokens.ndim != 2 or not prompt_length.shape == length.shape == tokens.shape[:1]:
        raise ValueError(
            f"tokens has shape {tokens.shape}, prompt_length {prompt_length.shape} and length "
            f"{length.shape}: give [B, L], [B] and [B]"
        )
    wrong = (prompt_length < 1) | (length < prompt_length) | (length > tokens.shape[1])
    if np.any(wrong):
        row = int(np.argmax(wrong))
        raise ValueError(
            f"row {row} has prompt_length {prompt_length[row]} and length {length[row]} of "
            f"{tokens.shape[1]} tokens: give 1 <= prompt_length <= length, prompt and output, "
            f"<= {tokens.shape[1]}"
        )
    if not np.any(length > prompt_length):
        raise ValueError("no row has any output to be scored: length is that of prompt and output")


def _step(logit: float, dtype: DTypeLike) -> float:
    """How far apart two logits may be and still be the same number, more or less."""
    if jnp.finfo(dtype).bits >= 32:
        return NEAR_TIE
    spacing = float(jnp.finfo(dtype).eps) * 2.0 ** np.floor(np.log2(max(abs(logit), 1e-3)))
    return STEPS * spacing


@functools.partial(jax.jit, static_argnames="target")
def _scores(
    target: Target, params: Any, tokens: Int[Array, "B L"]
) -> tuple[Int[Array, "B L"], Float[Array, "B L"], Float[Array, "B L"]]:
    """After each token: the best next one, its logit, and the logit of the one that came."""
    batch, width = tokens.shape
    after = jnp.roll(tokens, -1, axis=1)

    def blocks(x):
        return jnp.moveaxis(x.reshape(batch, width // CHUNK, CHUNK), 1, 0)

    def score(cache, block):
        here, next_token = block
        out = target(params, here, None, cache)
        logits = out.logits.astype(jnp.float32)
        own = jnp.take_along_axis(logits, next_token[..., None], axis=-1)[..., 0]
        scored = first_argmax(logits), jnp.max(logits, axis=-1), own
        return out.cache.commit(None, jnp.full((batch,), CHUNK, jnp.int32)), scored

    _, scored = lax.scan(score, target.init_cache(batch, width), (blocks(tokens), blocks(after)))
    return jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1).reshape(batch, width), scored)


@dataclass(frozen=True)
class Finding:
    """One setting's report over all prompts."""

    dtype: str
    method: str
    num_speculative_tokens: int
    batch: int
    tokens: int
    near_ties: int
    faults: int
    widest_gap: float


def certify(
    *,
    model: str,
    dtypes: Sequence[str],
    methods: Sequence[str],
    exit_layer: int | None,
    windows: Sequence[int],
    batches: Sequence[int],
    num_prompts: int,
    max_tokens: int,
    output: Path | None,
    max_model_len: int | None = None,
) -> int:
    """Reports every setting in every dtype, and prints the table; returns 1 if there is a fault.

    Raises ValueError for a setting that cannot be, before anything is compiled.
    """
    prompts = bundled_prompts(num_prompts)
    configs = {
        (method, window): speculation(method, window, exit_layer)
        for method in methods
        for window in windows
    }
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    enable_compilation_cache()
    findings, reports = [], []
    total = len(dtypes) * len(configs) * len(batches)
    with tqdm(total=total, unit=" settings", delay=2, leave=False) as bar:
        for dtype in dtypes:
            plain = LLM(model, dtype=dtype, max_model_len=max_model_len, max_num_seqs=1)
            ids = [prompt.token_ids(plain.tokenizer) for prompt in prompts]
            for (method, window), config in configs.items():
                for batch in batches:
                    engine = LLM(
                        plain.model,
                        speculative_config=config,
                        max_model_len=max_model_len,
                        max_num_seqs=batch,
                    )
                    report = _report(plain, ids, complete(engine, ids, params))
                    reports.append(report)
                    findings.append(_finding(plain, method, window, batch, report))
                    bar.update()
    return _conclude(findings, reports, model, output)


def _report(plain: LLM, prompts, outputs) -> GreedyReport:
    rows = [[*prompt, *one.token_ids] for prompt, one in zip(prompts, outputs, strict=True)]
    tokens = np.zeros((len(rows), max(map(len, rows))), np.int32)
    for row, ids in zip(tokens, rows, strict=True):
        row[: len(ids)] = ids
    return greedy_report(
        plain.model.target,
        plain.model.params,
        tokens,
        np.array([len(prompt) for prompt in prompts]),
        np.array([len(row) for row in rows]),
        dtype=plain.model.dtype,
    )


def _finding(plain: LLM, method, window, batch, report: GreedyReport) -> Finding:
    return Finding(
        dtype=jnp.dtype(plain.model.dtype).name,
        method=method,
        num_speculative_tokens=window,
        batch=batch,
        tokens=report.tokens,
        near_ties=len(report.near_ties),
        faults=len(report.faults),
        widest_gap=report.widest,
    )


def _conclude(findings: list[Finding], reports, model, output: Path | None) -> int:
    header = ["dtype", "method", "K", "batch", "tokens", "near-ties", "faults", "widest gap"]
    rows = [
        (*dataclasses.astuple(one)[:-1], f"{one.widest_gap:.2g}" if one.widest_gap else "0")
        for one in findings
    ]
    print(f"{model}: greedy output, each token re-scored by the plain model\n")
    print(table(header, rows))
    for one, report in zip(findings, reports, strict=True):
        if not report.passed:
            print(f"\n{one.dtype}, {one.method}, K={one.num_speculative_tokens}: {report}")
    tokens, ties = sum(one.tokens for one in findings), sum(one.near_ties for one in findings)
    faults = sum(one.faults for one in findings)
    verdict = "NOT the plain model's output" if faults else "the plain model's best, or nearly tied"
    print(f"\n{verdict}: {tokens} tokens, {ties} near-ties, {faults} faults")
    if output is not None:
        write_json(output, [dataclasses.asdict(one) for one in findings])
        print(f"wrote {output}", file=sys.stderr)
    return 1 if faults else 0

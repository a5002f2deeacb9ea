"""Token identity: greedy and coupled speculation emit plain decoding's tokens, one for one.

In float32 a difference is excused only where plain decoding itself was nearly tied: its two
largest values of log p (plus the position's noise, when coupled) closer than `NEAR_TIE`. Such
near-ties are counted and printed; a block and a single token round differently, nothing more.
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
from jax import lax
from jaxtyping import Array, Float, Int, Key
from tqdm.auto import tqdm

from specjax import noise
from specjax.bench.compare import complete
from specjax.bench.findings import write_json
from specjax.bench.prompts import bundled_prompts
from specjax.bench.table import table
from specjax.compilation_cache import enable_compilation_cache
from specjax.llm import LLM
from specjax.prefill import prefill
from specjax.requests import seed_key
from specjax.sampling import Sampling, log_probs
from specjax.sampling_params import SamplingParams
from specjax.speculative_config import SpeculativeConfig
from specjax.types import Context, Target

NEAR_TIE = 1e-4
EXCUSED_PER_TOKEN = 1e-4


@dataclass(frozen=True)
class Finding:
    """One setting's comparison over all prompts."""

    method: str
    num_speculative_tokens: int
    batch: int
    mode: str
    tokens: int
    prompts: int
    identical: int
    near_ties: int
    faults: int
    acceptance_rate: float
    tokens_per_target_forward: float


def certify(
    *,
    model: str,
    dtype: str,
    methods: Sequence[str],
    exit_layer: int | None,
    windows: Sequence[int],
    batches: Sequence[int],
    num_prompts: int,
    max_tokens: int,
    temperature: float,
    seed: int,
    output: Path | None,
    max_model_len: int | None = None,
) -> int:
    """Compares every setting with plain decoding of one prompt at a time, and prints the table.

    Returns 0 if every difference is a near-tie and there is at most one in 10,000 tokens, else 1.
    Raises ValueError for a setting that cannot be, before anything is compiled.
    """
    prompts = bundled_prompts(num_prompts)
    configs = {
        (method, window): speculation(method, window, exit_layer, rule="coupled")
        for method in methods
        for window in windows
    }
    enable_compilation_cache()
    plain = LLM(model, dtype=dtype, max_model_len=max_model_len, max_num_seqs=1)
    engines = {
        (method, window, batch): LLM(
            plain.model, speculative_config=config, max_model_len=max_model_len, max_num_seqs=batch
        )
        for (method, window), config in configs.items()
        for batch in batches
    }
    ids = [prompt.token_ids(plain.tokenizer) for prompt in prompts]
    modes = {
        "greedy": _params(0.0, max_tokens, seed),
        "coupled": _params(temperature, max_tokens, seed),
    }
    settings = [(mode, *setting) for mode in modes for setting in engines]
    findings = []
    with tqdm(total=len(modes) + len(settings), unit=" settings", delay=2, leave=False) as bar:
        expected = {}
        for mode, params in modes.items():
            expected[mode] = complete(plain, ids, params)
            bar.update()
        for mode, method, window, batch in settings:
            got = complete(engines[method, window, batch], ids, modes[mode])
            key = _key(seed)
            faults = [
                _difference(plain, key, modes[mode], one, expected[mode][place], got[place])
                for place, one in enumerate(ids)
            ]
            findings.append(_finding(method, window, batch, mode, got, faults))
            bar.update()
    return _conclude(findings, model, plain.model.dtype, output)


def speculation(
    method: str, window: int, exit_layer: int | None, rule: str | None = None
) -> SpeculativeConfig:
    """How a setting of the command line drafts; ``exit_layer`` is for the method that takes one."""
    options: dict[str, Any] = {"method": method, "num_speculative_tokens": window, "rule": rule}
    if method == "early_exit":
        options["exit_layer"] = exit_layer
    return SpeculativeConfig.parse(options)


def _params(temperature, max_tokens, seed) -> SamplingParams:
    return SamplingParams(
        temperature=temperature, max_tokens=max_tokens, seed=seed, ignore_eos=True
    )


def _key(seed: int) -> Key[Array, ""]:
    """The key of a request's first sample, as `LLM` derives it."""
    return jax.random.fold_in(seed_key(seed), 0)


def _difference(plain: LLM, key, params, prompt, expected, got) -> float | None:
    """How far apart plain decoding's two best tokens were at the first difference; None if none."""
    if expected.token_ids == got.token_ids:
        return None
    pairs = zip(expected.token_ids, got.token_ids, strict=False)
    place = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
    if place is None:
        return float("inf")
    context = [*prompt, *expected.token_ids[:place]]
    buffer = plain.max_model_len if len(context) > 512 else 512
    tokens = jnp.zeros((1, buffer), jnp.int32).at[0, : len(context)].set(jnp.asarray(context))
    model = plain.model
    return float(
        top_two_gap(
            model.target,
            model.params,
            tokens,
            jnp.int32(len(context)),
            key,
            Sampling.create(1, temperature=params.temperature),
        )
    )


@functools.partial(jax.jit, static_argnames="target")
def top_two_gap(
    target: Target,
    params: Any,
    tokens: Int[Array, "1 L"],
    length: Int[Array, ""],
    key: Key[Array, ""],
    sampling: Sampling,
) -> Float[Array, ""]:
    """How far the best next token is ahead of the second best, under plain decoding.

    For a greedy row in log-probability, for a sampled one in log-probability plus noise.
    """
    chunk = 64
    cache = target.init_cache(1, tokens.shape[1] + chunk)
    logits = prefill(target, params, Context(tokens, length[None]), cache, chunk=chunk).logits
    logits = logits.astype(jnp.float32)
    perturbation = noise.token(key, length, logits.shape[-1])
    sampled = log_probs(sampling, logits[:, None])[0, 0] + perturbation
    greedy = jax.nn.log_softmax(logits[0])
    best = lax.top_k(jnp.where(sampling.greedy, greedy, sampled), 2)[0]
    return best[0] - best[1]


def _finding(method, window, batch, mode, got, faults) -> Finding:
    counts = [output.metrics.counts for output in got]
    drafted = sum(int(one.drafted.sum()) for one in counts)
    different = [gap for gap in faults if gap is not None]
    return Finding(
        method=method,
        num_speculative_tokens=window,
        batch=batch,
        mode=mode,
        tokens=sum(len(output.token_ids) for output in got),
        prompts=len(got),
        identical=len(got) - len(different),
        near_ties=sum(gap < NEAR_TIE for gap in different),
        faults=sum(not gap < NEAR_TIE for gap in different),
        acceptance_rate=sum(int(one.accepted.sum()) for one in counts) / max(drafted, 1),
        tokens_per_target_forward=sum(one.emitted for one in counts)
        / max(sum(one.rounds for one in counts), 1),
    )


def _conclude(findings: list[Finding], model, dtype, output: Path | None) -> int:
    header = [
        *("mode", "method", "K", "batch", "tokens", "identical", "near-ties", "faults"),
        *("acceptance", "tokens/forward"),
    ]
    rows = [
        (
            one.mode,
            one.method,
            one.num_speculative_tokens,
            one.batch,
            one.tokens,
            f"{one.identical}/{one.prompts}",
            one.near_ties,
            one.faults,
            f"{one.acceptance_rate:.2f}",
            f"{one.tokens_per_target_forward:.2f}",
        )
        for one in findings
    ]
    print(f"{model}, {dtype}, against plain decoding of one prompt at a time\n")
    print(table(header, rows))
    tokens = sum(one.tokens for one in findings)
    ties, faults = sum(one.near_ties for one in findings), sum(one.faults for one in findings)
    sound = faults == 0 and ties <= tokens * EXCUSED_PER_TOKEN
    verdict = "identical" if sound else "NOT identical"
    print(f"\n{verdict}: {tokens} tokens, {ties} near-ties (gap < {NEAR_TIE}), {faults} faults")
    if output is not None:
        write_json(output, [dataclasses.asdict(one) for one in findings])
        print(f"wrote {output}", file=sys.stderr)
    return 0 if sound else 1

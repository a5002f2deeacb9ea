"""``specjax bench``: load, measure, report."""

import dataclasses
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
from tqdm.auto import tqdm

from specjax.bench import machine as machine_costs
from specjax.bench import peer as peers_bench
from specjax.bench.compare import compare, report, summarise
from specjax.bench.findings import write_json
from specjax.bench.prompts import read_prompts
from specjax.compilation_cache import enable_compilation_cache
from specjax.llm import LLM
from specjax.sampling_params import SamplingParams
from specjax.speculative_config import SpeculativeConfig


def bench(
    *,
    model: str,
    dtype: str,
    quantization: str | None,
    max_model_len: int | None,
    speculative_config: Mapping[str, Any],
    prompts: str | None,
    params: SamplingParams,
    repeats: int,
    output: Path | None,
    machine: bool,
    peer: str | None,
) -> int:
    """Measures, prints the table and the verdicts, and writes ``output``; returns 0.

    Raises ValueError for what cannot be measured, before the model is loaded.
    """
    if repeats < 1:
        raise ValueError(f"repeats is {repeats}: it must be at least 1")
    if peer not in (None, "transformers"):
        raise ValueError(f"unknown peer {peer!r}: the one that is measured is 'transformers'")
    wanted = read_prompts(prompts)
    if SpeculativeConfig.parse(speculative_config).method == "none":
        raise ValueError("method 'none' is plain decoding, against which others are measured")
    enable_compilation_cache()
    plain = LLM(model, dtype=dtype, quantization=quantization, max_model_len=max_model_len)
    speculative = LLM(
        plain.model, speculative_config=speculative_config, max_model_len=max_model_len
    )
    steps = 2 * len(wanted) * (repeats + 1)
    with tqdm(total=steps, desc="measuring", unit=" runs", delay=2, leave=False) as bar:
        pairs = compare(
            plain, speculative, wanted, params, repeats=repeats, on_step=lambda: bar.update()
        )
    summaries = summarise(pairs)
    promised = params.temperature == 0 or speculative.speculative_config.rule == "coupled"
    weights = getattr(plain.model.target, "quantization", None)
    kind = plain.model.dtype + (f" with {weights} weights" if weights else "")
    print(f"{model}, {kind}, {jax.devices()[0].device_kind}, batch 1, medians of")
    print(f"{repeats} interleaved runs, {_describe(speculative.speculative_config)}\n")
    print(report(summaries, promised))
    costs = None
    if machine:
        costs = machine_costs.measure(plain, speculative)
        print(f"\n{machine_costs.report(costs)}")
    peers = None
    if peer is not None:
        peers = _compare_with_peer(plain, speculative, wanted, params, repeats)
    if output is not None:
        _write(output, summaries, pairs, costs, peers)
        print(f"\nwrote {output}", file=sys.stderr)
    return 0


def _compare_with_peer(plain, speculative, wanted, params, repeats):
    import transformers

    steps = 4 * len(wanted) * (repeats + 1)
    with tqdm(total=steps, desc="Transformers", unit=" runs", delay=2, leave=False) as bar:
        summaries = peers_bench.compare_with_transformers(
            plain,
            speculative,
            wanted,
            max_tokens=params.max_tokens,
            repeats=repeats,
            on_step=lambda: bar.update(),
        )
    print(f"\n{peers_bench.report(summaries, transformers.__version__)}")
    return summaries


def _describe(config: SpeculativeConfig) -> str:
    options = ", ".join(f"{key}={value}" for key, value in config.options.items())
    return f"{config.method}({options}), rule {config.rule or 'default'}"


def _write(path, summaries, pairs, costs, peers) -> None:
    runs = [
        {
            "kind": pair.kind,
            "identical": pair.identical,
            "plain": [one.metrics.as_dict() for one in pair.plain],
            "speculative": [one.metrics.as_dict() for one in pair.speculative],
        }
        for pair in pairs
    ]
    found = {"summaries": [dataclasses.asdict(one) for one in summaries], "runs": runs}
    if costs is not None:
        found["machine"] = dataclasses.asdict(costs)
    if peers is not None:
        found["transformers"] = [dataclasses.asdict(one) for one in peers]
    write_json(path, found)

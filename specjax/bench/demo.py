"""The demonstration: three tasks, plain and with n-gram speculation, compared token by token."""

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

from specjax.bench.compare import complete
from specjax.bench.prompts import BenchPrompt, read_prompts
from specjax.bench.table import table
from specjax.checkpoint import Model
from specjax.llm import LLM
from specjax.outputs import CompletionOutput
from specjax.sampling_params import SamplingParams

MODES = {
    "greedy": (0.0, None),
    "T=0.8 coupled": (0.8, "coupled"),
}
NEXT = """\
What to try next
  specjax generate "Why is the sky blue?" --stream
  specjax generate "..." --method early_exit --exit-layer 15 --temperature 0.7
  specjax bench --num-speculative-tokens 10
  specjax certify --identity
  notebooks/01_quickstart.ipynb"""


class Result(NamedTuple):
    """One task in one mode, both ways."""

    task: str
    mode: str
    plain: CompletionOutput
    speculative: CompletionOutput


def tasks() -> dict[str, BenchPrompt]:
    """Summarise a text, edit code, chat."""
    wanted = {"summarise": "summarise", "edit code": "edit", "chat": "open"}
    prompts = read_prompts()
    return {
        task: next(prompt for prompt in prompts if _task(prompt) == kind)
        for task, kind in wanted.items()
    }


def demo(
    model: Model,
    *,
    max_tokens: int,
    seed: int,
    max_model_len: int | None = None,
    write: Callable[[str], Any] = sys.stdout.write,
) -> bool:
    """Runs the demonstration; True if every pair of outputs is identical."""
    results = []
    for mode, (temperature, rule) in MODES.items():
        config = {"method": "ngram", "num_speculative_tokens": 5, "rule": rule}
        plain, speculative = (
            LLM(model, speculative_config=one, max_model_len=max_model_len)
            for one in (None, config)
        )
        params = SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=seed)
        asked = {task: one.token_ids(model.tokenizer) for task, one in tasks().items()}
        write(f"[compiling for {mode}; the second run finds it in the cache]\n")
        for engine in (plain, speculative):
            for ids in asked.values():
                engine.warmup(max_tokens=len(ids) + max_tokens)
        for task, ids in asked.items():
            write(f"\n--- {task}, {mode}, n-gram ---\n")
            results.append(
                Result(
                    task,
                    mode,
                    plain=complete(plain, [ids], params)[0],
                    speculative=_stream(speculative, ids, params, write),
                )
            )
    write(f"\n\n{_table(results)}\n\n{NEXT}\n")
    return all(one.plain.token_ids == one.speculative.token_ids for one in results)


def _task(prompt: BenchPrompt) -> str:
    return prompt.kind if prompt.kind == "open" else _extractive_task(prompt)


def _extractive_task(prompt: BenchPrompt) -> str:
    content = prompt.prompt or prompt.messages[-1]["content"]
    return "edit" if "```" in content else "summarise"


def _stream(engine: LLM, ids, params, write) -> CompletionOutput:
    output = None
    for delta in engine.stream([ids], params):
        write(delta.text)
        sys.stdout.flush()
        output = delta.output or output
    assert output is not None
    return output


def _table(results: list[Result]) -> str:
    header = [
        *("task", "mode", "plain tok/s", "n-gram tok/s", "TPOT ms", "TTFT ms", "acceptance"),
        *("tokens/forward", "speed-up", "output identical"),
    ]
    return table(header, [_row(one) for one in results])


def _row(result: Result):
    plain, speculative = result.plain.metrics, result.speculative.metrics
    return (
        result.task,
        result.mode,
        f"{plain.tokens_per_second:.1f}",
        f"{speculative.tokens_per_second:.1f}",
        f"{1e3 * speculative.tpot:.1f}",
        f"{1e3 * speculative.ttft:.0f}",
        f"{speculative.acceptance_rate:.2f}",
        f"{speculative.tokens_per_target_forward:.2f}",
        f"{speculative.tokens_per_second / max(plain.tokens_per_second, 1e-9):.2f}x",
        _identity(result.plain.token_ids, result.speculative.token_ids),
    )


def _identity(plain: list[int], speculative: list[int]) -> str:
    if plain == speculative:
        return f"yes, {len(plain)} tokens"
    same = next(
        (i for i, (a, b) in enumerate(zip(plain, speculative, strict=False)) if a != b),
        min(len(plain), len(speculative)),
    )
    return f"no, from token {same}"

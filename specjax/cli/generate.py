"""``specjax generate``: one prompt, answered."""

import json
import sys
from pathlib import Path

from specjax.cli.options import (
    model_options,
    sampling_options,
    sampling_params,
    speculation_options,
    speculative_config,
)


def add(commands) -> None:
    command = commands.add_parser("generate", help="answer one prompt")
    command.set_defaults(command=run)
    command.add_argument("prompt", help="the prompt; - reads it from standard input")
    model_options(command)
    speculation_options(command)
    sampling_options(command, max_tokens=128)
    command.add_argument("--n", type=int, default=1, help="samples of the prompt")
    command.add_argument("--stop", action="append", default=[], help="end at this string")
    command.add_argument("--raw", action="store_true", help="continue the prompt, no chat template")
    command.add_argument("--stream", action="store_true", help="print the text as it comes")
    command.add_argument("--regex", metavar="PATTERN", help="the answer matches it")
    command.add_argument("--json-schema", metavar="FILE", help="the answer is valid under it")
    command.add_argument("--json", action="store_true", help="print text, ids and metrics as JSON")
    command.add_argument(
        "--logprobs", type=int, metavar="N", help="with --json: each token's, and N alternatives"
    )


def run(options) -> int:
    from specjax.compilation_cache import enable_compilation_cache
    from specjax.llm import LLM
    from specjax.speculative_config import SpeculativeConfig

    if options.stream and options.json:
        raise ValueError("--stream prints text as it comes and --json one object: choose one")
    if options.logprobs is not None and not options.json:
        raise ValueError("--logprobs are part of the JSON output: add --json")
    params = sampling_params(
        options,
        n=options.n,
        stop=tuple(options.stop),
        logprobs=options.logprobs,
        structured_outputs=_structure(options),
    )
    config = speculative_config(options)
    SpeculativeConfig.parse(config)
    enable_compilation_cache()
    llm = LLM(
        options.model,
        speculative_config=config,
        dtype=options.dtype,
        quantization=options.quantization,
        max_model_len=options.max_model_len,
    )
    text = sys.stdin.read() if options.prompt == "-" else options.prompt
    prompt = _prompt(llm, text, options.raw)
    if options.stream:
        return _print_stream(llm, prompt, params)
    result = llm.generate([prompt], params, use_tqdm=sys.stderr.isatty())[0]
    if options.json:
        print(json.dumps(_as_json(text, result), indent=2))
    else:
        print("\n".join(output.text for output in result.outputs))
    if any(output.finish_reason == "abort" for output in result.outputs):
        raise KeyboardInterrupt  # what there was is printed; the exit status says it is not all
    return 0


def _structure(options) -> dict | None:
    if options.regex is not None and options.json_schema is not None:
        raise ValueError("--regex and --json-schema both say what the answer is: choose one")
    if options.json_schema is not None:
        return {"json": Path(options.json_schema).read_text()}
    return None if options.regex is None else {"regex": options.regex}


def _prompt(llm, text: str, raw: bool):
    if raw or llm.tokenizer.chat_template is None:
        return text
    if not text.strip():
        raise ValueError("the prompt is empty: give some text, or - to read standard input")
    return llm.tokenizer.apply_chat_template([{"role": "user", "content": text}])


def _print_stream(llm, prompt, params) -> int:
    for delta in llm.stream([prompt], params):
        if params.n > 1 and delta.text:
            print(f"[{delta.index}] {delta.text!r}", flush=True)
        else:
            print(delta.text, end="", flush=True)
    print()
    return 0


def _as_json(prompt: str, result) -> dict:
    return {
        "prompt": prompt,
        "prompt_token_ids": result.prompt_token_ids,
        "outputs": [
            {
                "index": output.index,
                "text": output.text,
                "token_ids": output.token_ids,
                "finish_reason": output.finish_reason,
                "stop_reason": output.stop_reason,
                "metrics": output.metrics.as_dict(),
                **({} if output.logprobs is None else {"logprobs": _logprobs(output)}),
            }
            for output in result.outputs
        ],
    }


def _logprobs(output) -> list[dict]:
    from dataclasses import asdict

    return [asdict(entry) for entry in output.logprobs]

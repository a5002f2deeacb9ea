"""The command line: ``specjax generate | demo | bench | certify | convert``.

Faults of the user end in one line that names fault and remedy, and exit status 1. Nothing heavy is
imported before the arguments are understood.
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from specjax import __version__

MODEL = "smollm2-135m-instruct"
INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit status."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if arguments[:1] == ["convert"]:  # argparse hands no options on to another parser
        return _convert(arguments[1:])
    options = _parser().parse_args(arguments)
    try:
        status = options.command(options)
        sys.stdout.flush()  # a reader that has gone is noticed here, not at the exit
        return status
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # What is still buffered must not fail once more when the interpreter flushes it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except (ValueError, OSError, ModuleNotFoundError) as fault:
        if os.environ.get("SPECJAX_TRACEBACK"):
            raise
        print(f"specjax: {_sentence(fault)}", file=sys.stderr)
        return 1


def _sentence(fault: BaseException) -> str:
    if isinstance(fault, OSError) and fault.strerror:
        return f"{fault.filename}: {fault.strerror}" if fault.filename else fault.strerror
    return " ".join(str(fault).split())


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="specjax", description="Lossless speculative decoding in JAX and Flax."
    )
    parser.add_argument("--version", action="version", version=f"specjax {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_generate(commands)
    _add_demo(commands)
    _add_bench(commands)
    _add_certify(commands)
    _add_convert(commands)
    return parser


def _add_generate(commands) -> None:
    command = commands.add_parser("generate", help="answer one prompt")
    command.set_defaults(command=_generate)
    command.add_argument("prompt", help="the prompt; - reads it from standard input")
    _model_options(command)
    _speculation_options(command)
    _sampling_options(command, max_tokens=128)
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


def _add_demo(commands) -> None:
    command = commands.add_parser("demo", help="three tasks, plain and speculative, compared")
    command.set_defaults(command=_demo)
    _model_options(command)
    command.add_argument("--max-tokens", type=int, default=96)
    command.add_argument("--seed", type=int, default=0)


def _add_bench(commands) -> None:
    command = commands.add_parser("bench", help="measure speculation against plain decoding")
    command.set_defaults(command=_bench)
    command.add_argument(
        "--prompts", metavar="FILE.jsonl", help="a JSON line a prompt; default: the bundled twelve"
    )
    _model_options(command)
    _speculation_options(command, method="ngram")
    _sampling_options(command, max_tokens=128)
    command.add_argument("--repeats", type=int, default=3, help="timed runs of each prompt")
    command.add_argument("--json", metavar="OUT", help="also write the measures here")
    command.add_argument(
        "--machine", action="store_true", help="also measure bandwidth and what a round costs"
    )
    command.add_argument(
        "--peer", metavar="transformers", help="also measure Transformers on the same prompts"
    )


def _add_certify(commands) -> None:
    command = commands.add_parser(
        "certify",
        help="prove that speculation leaves the output's law alone",
        description="Without --identity or --greedy: the equivalence certificate of all rules, "
        "drafters and sampling parameters, on models whose laws are known.",
    )
    command.set_defaults(command=_certify)
    kind = command.add_mutually_exclusive_group()
    kind.add_argument(
        "--identity",
        action="store_const",
        const="identity",
        dest="kind",
        help="greedy and coupled output is plain output, token for token",
    )
    kind.add_argument(
        "--greedy",
        action="store_const",
        const="greedy",
        dest="kind",
        help="greedy output re-scored by the plain model: near-ties and faults",
    )
    command.add_argument("--seed", type=int)
    command.add_argument("--json", metavar="OUT", help="where to write the findings")
    ours = command.add_argument_group("the certificate")
    ours.add_argument("--rule", nargs="+", metavar="RULE", help="certify these rules only")
    ours.add_argument("--drafter", nargs="+", metavar="DRAFTER", help="with these drafters only")
    ours.add_argument(
        "--budget", choices=("fast", "full"), help="fast (default): finds a TV of 1%%"
    )
    ours.add_argument("--claim", choices=("lossless", "lossy"), help="what the rules must be")
    ours.add_argument("--markdown", metavar="OUT", help="where to write the table")
    ours.add_argument(
        "--model", help="certify this checkpoint on its own law, with the drafters that it allows"
    )
    ours.add_argument("--dtype", help="float32; --greedy without it: float32 and bfloat16")
    models = command.add_argument_group(
        "--identity and --greedy", f"These need a checkpoint; without --model it is {MODEL}."
    )
    models.add_argument("--max-model-len", type=int, help="most tokens of prompt and output")
    models.add_argument("--max-tokens", type=int)
    models.add_argument("--num-prompts", type=int)
    models.add_argument("--num-speculative-tokens", type=int, nargs="+", metavar="K")
    models.add_argument("--batch", type=int, nargs="+", metavar="ROWS")
    models.add_argument("--method", nargs="+", metavar="METHOD")
    models.add_argument("--exit-layer", type=int, help="for --method early_exit")
    models.add_argument("--temperature", type=float, help="of the coupled half of --identity")


# The options of each kind of certificate, and their defaults.
_SPECULATION = {
    "model": MODEL,
    "max_model_len": None,
    "max_tokens": 128,
    "num_prompts": 12,
    "num_speculative_tokens": [1, 2, 5, 10],
    "batch": [1, 4],
    "method": ["ngram"],
    "exit_layer": None,
    "json": None,
}
_CERTIFY_OPTIONS = {
    "law": {
        "rule": [],
        "drafter": [],
        "budget": "fast",
        "claim": "lossless",
        "model": None,
        "dtype": "float32",
        "seed": 0,
        "json": "specjax-certificate.json",
        "markdown": "specjax-certificate.md",
    },
    "identity": _SPECULATION | {"dtype": "float32", "temperature": 0.8, "seed": 0},
    "greedy": _SPECULATION | {"dtype": None},
}


def _add_convert(commands) -> None:
    commands.add_parser("convert", help="convert a checkpoint; see specjax convert --help")


def _model_options(command, dtype="auto") -> None:
    command.add_argument(
        "--model", default=MODEL, help=f"a name, folder or .gguf file (default: {MODEL})"
    )
    command.add_argument("--dtype", default=dtype, help="auto, float32, bfloat16 or float16")
    command.add_argument("--quantization", help="int8 or int4: keep the weights in these")
    command.add_argument("--max-model-len", type=int, help="most tokens of prompt and output")


def _speculation_options(command, method=None) -> None:
    command.add_argument("--method", default=method, help="ngram, draft_model, early_exit or none")
    command.add_argument("--num-speculative-tokens", type=int, metavar="K")
    command.add_argument("--prompt-lookup-min", type=int, metavar="N")
    command.add_argument("--prompt-lookup-max", type=int, metavar="N")
    command.add_argument("--draft-model", metavar="MODEL", help="for --method draft_model")
    command.add_argument("--exit-layer", type=int, help="for --method early_exit")
    command.add_argument(
        "--rule",
        help="block, rejection, matching, coupled, greedy, for trees recursive or traversal, or "
        "typical, which is lossy",
    )


def _sampling_options(command, max_tokens) -> None:
    command.add_argument("--temperature", type=float, default=0.0, help="0 (default) is greedy")
    command.add_argument("--top-p", type=float, default=1.0)
    command.add_argument("--top-k", type=int, default=0)
    command.add_argument("--min-p", type=float, default=0.0)
    command.add_argument("--repetition-penalty", type=float, default=1.0, help="1 is off")
    command.add_argument("--presence-penalty", type=float, default=0.0)
    command.add_argument("--frequency-penalty", type=float, default=0.0)
    command.add_argument("--seed", type=int, default=0)
    command.add_argument("--max-tokens", type=int, default=max_tokens)
    command.add_argument("--min-tokens", type=int, default=0)


def _speculative_config(options) -> dict:
    return {
        "method": options.method,
        "num_speculative_tokens": options.num_speculative_tokens,
        "prompt_lookup_min": options.prompt_lookup_min,
        "prompt_lookup_max": options.prompt_lookup_max,
        "model": options.draft_model,
        "exit_layer": options.exit_layer,
        "rule": options.rule,
    }


def _sampling_params(options, **more):
    from specjax.sampling_params import SamplingParams

    return SamplingParams(
        temperature=options.temperature,
        top_p=options.top_p,
        top_k=options.top_k,
        min_p=options.min_p,
        repetition_penalty=options.repetition_penalty,
        presence_penalty=options.presence_penalty,
        frequency_penalty=options.frequency_penalty,
        seed=options.seed,
        max_tokens=options.max_tokens,
        min_tokens=options.min_tokens,
        **more,
    )


def _generate(options) -> int:
    from specjax.compilation_cache import enable_compilation_cache
    from specjax.llm import LLM
    from specjax.speculative_config import SpeculativeConfig

    if options.stream and options.json:
        raise ValueError("--stream prints text as it comes and --json one object: choose one")
    if options.logprobs is not None and not options.json:
        raise ValueError("--logprobs are part of the JSON output: add --json")
    params = _sampling_params(
        options,
        n=options.n,
        stop=tuple(options.stop),
        logprobs=options.logprobs,
        structured_outputs=_structure(options),
    )
    config = _speculative_config(options)
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
    return _status(result.outputs)


def _structure(options) -> dict | None:
    if options.regex is not None and options.json_schema is not None:
        raise ValueError("--regex and --json-schema both say what the answer is: choose one")
    if options.json_schema is not None:
        return {"json": Path(options.json_schema).read_text()}
    return None if options.regex is None else {"regex": options.regex}


def _status(outputs) -> int:
    """Of an interrupted command, where an output is not whole."""
    if any(output.finish_reason == "abort" for output in outputs):
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    return 0


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


def _demo(options) -> int:
    from specjax.bench.demo import demo
    from specjax.checkpoint import load
    from specjax.compilation_cache import enable_compilation_cache

    enable_compilation_cache()
    model = load(options.model, dtype=options.dtype, quantization=options.quantization)
    same = demo(
        model,
        max_tokens=options.max_tokens,
        seed=options.seed,
        max_model_len=options.max_model_len,
    )
    return 0 if same else 1


def _bench(options) -> int:
    from specjax.bench import run

    return run.bench(
        model=options.model,
        dtype=options.dtype,
        quantization=options.quantization,
        max_model_len=options.max_model_len,
        speculative_config=_speculative_config(options),
        prompts=options.prompts,
        params=_sampling_params(options),
        repeats=options.repeats,
        output=_writable(options.json),
        machine=options.machine,
        peer=options.peer,
    )


def _certify(options) -> int:
    kind = options.kind or "law"
    known = _CERTIFY_OPTIONS[kind]
    every = {name for names in _CERTIFY_OPTIONS.values() for name in names}
    for name in sorted(every - set(known)):
        if getattr(options, name) is not None:
            flag = f"--{name.replace('_', '-')}"
            whom = "the certificate of laws" if kind == "law" else f"--{kind}"
            raise ValueError(f"{flag} means nothing to {whom}: leave it out")
    given = {name: getattr(options, name) for name in known}
    chosen = {name: known[name] if value is None else value for name, value in given.items()}
    return {"law": _certify_law, "identity": _certify_identity, "greedy": _certify_greedy}[kind](
        argparse.Namespace(**chosen)
    )


def _certify_law(options) -> int:
    from specjax.testing import certification

    files = {"json": options.json, "markdown": options.markdown}
    common = {"budget": options.budget, "seed": options.seed}
    if options.model is None:
        return certification.run(
            **files, **common, rules=options.rule, drafters=options.drafter, claim=options.claim
        )
    if options.rule or options.drafter or options.claim != "lossless":
        raise ValueError("--model has checks of its own: leave out --rule, --drafter and --claim")
    return certification.run(**files, **common, model=options.model, dtype=options.dtype)


def _certify_identity(options) -> int:
    from specjax.testing import identity

    return identity.certify(
        **_speculation(options),
        dtype=options.dtype,
        temperature=options.temperature,
        seed=options.seed,
    )


def _certify_greedy(options) -> int:
    from specjax.testing import greedy

    dtypes = ["float32", "bfloat16"] if options.dtype is None else [options.dtype]
    return greedy.certify(**_speculation(options), dtypes=dtypes)


def _speculation(options) -> dict:
    return {
        "model": options.model,
        "methods": options.method,
        "exit_layer": options.exit_layer,
        "windows": options.num_speculative_tokens,
        "batches": options.batch,
        "num_prompts": options.num_prompts,
        "max_tokens": options.max_tokens,
        "output": _writable(options.json),
        "max_model_len": options.max_model_len,
    }


def _convert(arguments: list[str]) -> int:
    from ckpt_convert.__main__ import main as convert

    return convert(arguments)


def _writable(path: str | None) -> Path | None:
    """A path to write to, refused before minutes of measuring rather than after."""
    if path is None:
        return None
    from specjax.bench.findings import writable

    return writable(path)


if __name__ == "__main__":
    raise SystemExit(main())

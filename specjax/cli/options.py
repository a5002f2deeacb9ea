"""The options that several commands share, and what they make of them."""

from pathlib import Path

MODEL = "smollm2-135m-instruct"


def model_options(command, dtype="auto") -> None:
    command.add_argument(
        "--model", default=MODEL, help=f"a name, folder or .gguf file (default: {MODEL})"
    )
    command.add_argument("--dtype", default=dtype, help="auto, float32, bfloat16 or float16")
    command.add_argument("--quantization", help="int8 or int4: keep the weights in these")
    command.add_argument("--max-model-len", type=int, help="most tokens of prompt and output")


def speculation_options(command, method=None) -> None:
    command.add_argument("--method", default=method, help="ngram, draft_model, early_exit or none")
    command.add_argument("--num-speculative-tokens", type=int, metavar="K")
    command.add_argument("--prompt-lookup-min", type=int, metavar="N")
    command.add_argument("--prompt-lookup-max", type=int, metavar="N")
    command.add_argument("--draft-model", metavar="MODEL", help="for --method draft_model")
    command.add_argument("--exit-layer", type=int, help="for --method early_exit")
    command.add_argument(
        "--rule",
        help="of acceptance: block, rejection, coupled, ...; a name that is none lists them all",
    )


def sampling_options(command, max_tokens) -> None:
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


def speculative_config(options) -> dict:
    return {
        "method": options.method,
        "num_speculative_tokens": options.num_speculative_tokens,
        "prompt_lookup_min": options.prompt_lookup_min,
        "prompt_lookup_max": options.prompt_lookup_max,
        "model": options.draft_model,
        "exit_layer": options.exit_layer,
        "rule": options.rule,
    }


def sampling_params(options, **more):
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


def writable(path: str | None) -> Path | None:
    """A path to write to, refused before minutes of measuring rather than after."""
    if path is None:
        return None
    from specjax.bench import findings

    return findings.writable(path)

"""``specjax bench``: speculation measured against plain decoding."""

from specjax.cli.options import (
    model_options,
    sampling_options,
    sampling_params,
    speculation_options,
    speculative_config,
    writable,
)


def add(commands) -> None:
    command = commands.add_parser("bench", help="measure speculation against plain decoding")
    command.set_defaults(command=run)
    command.add_argument(
        "--prompts", metavar="FILE.jsonl", help="a JSON line a prompt; default: the bundled twelve"
    )
    model_options(command)
    speculation_options(command, method="ngram")
    sampling_options(command, max_tokens=128)
    command.add_argument("--repeats", type=int, default=3, help="timed runs of each prompt")
    command.add_argument("--json", metavar="OUT", help="also write the measures here")
    command.add_argument(
        "--machine", action="store_true", help="also measure bandwidth and what a round costs"
    )
    command.add_argument(
        "--peer", metavar="transformers", help="also measure Transformers on the same prompts"
    )


def run(options) -> int:
    from specjax.bench.run import bench

    return bench(
        model=options.model,
        dtype=options.dtype,
        quantization=options.quantization,
        max_model_len=options.max_model_len,
        speculative_config=speculative_config(options),
        prompts=options.prompts,
        params=sampling_params(options),
        repeats=options.repeats,
        output=writable(options.json),
        machine=options.machine,
        peer=options.peer,
    )

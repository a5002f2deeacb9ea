"""``specjax demo``: three tasks, plain and speculative, compared."""

from specjax.cli.options import model_options


def add(commands) -> None:
    command = commands.add_parser("demo", help="three tasks, plain and speculative, compared")
    command.set_defaults(command=run)
    model_options(command)
    command.add_argument("--max-tokens", type=int, default=96)
    command.add_argument("--seed", type=int, default=0)


def run(options) -> int:
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

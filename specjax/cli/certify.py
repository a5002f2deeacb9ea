"""``specjax certify``: that speculation leaves the output's law alone, proven in three ways."""

import argparse

from specjax.cli.options import MODEL, writable

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
        "dtype": None,
        "seed": 0,
        "json": "specjax-certificate.json",
        "markdown": "specjax-certificate.md",
    },
    "identity": _SPECULATION | {"dtype": "float32", "temperature": 0.8, "seed": 0},
    "greedy": _SPECULATION | {"dtype": None},
}


def add(commands) -> None:
    command = commands.add_parser(
        "certify",
        help="prove that speculation leaves the output's law alone",
        description="Without --identity or --greedy: the equivalence certificate of all rules, "
        "drafters and sampling parameters, on models whose laws are known.",
    )
    command.set_defaults(command=run)
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


def run(options) -> int:
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
        if options.dtype is not None:
            raise ValueError("--dtype is of a checkpoint: give --model, or leave it out")
        return certification.run(
            **files, **common, rules=options.rule, drafters=options.drafter, claim=options.claim
        )
    if options.rule or options.drafter or options.claim != "lossless":
        raise ValueError("--model has checks of its own: leave out --rule, --drafter and --claim")
    return certification.run(
        **files, **common, model=options.model, dtype=options.dtype or "float32"
    )


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
        "output": writable(options.json),
        "max_model_len": options.max_model_len,
    }

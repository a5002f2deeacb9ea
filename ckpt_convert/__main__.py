"""``python -m ckpt_convert SRC DST``: convert a checkpoint by hand, look into it, write it back."""

import argparse
import json
import os
import sys
from collections.abc import Callable
from typing import Any

DTYPES = ("auto", "float32", "bfloat16", "float16")


def convert_parser() -> argparse.ArgumentParser:
    made = _parser(
        "",
        "Convert a Hugging Face folder or a GGUF file into a specjax checkpoint.",
        epilog="Two more commands: 'inspect SRC' says what a source holds and what stands against "
        "converting it; 'export SRC DST' writes a checkpoint back as a Hugging Face folder.",
    )
    _add_source(made)
    made.add_argument("destination", help="the checkpoint folder to write")
    _add_dtype(made)
    made.add_argument(
        "--shard-for",
        metavar="MESH",
        help="2x4 or data=2,model=4: each device of such a mesh will read its own bytes only",
    )
    _add_choices(made)
    made.add_argument(
        "--quantize", choices=["int8", "int4"], help="keep the matrices in small integers"
    )
    made.add_argument(
        "--force", action="store_true", help="replace a checkpoint at the destination"
    )
    _add_json(made, "destination")
    return made


def inspect_parser() -> argparse.ArgumentParser:
    made = _parser("inspect", "Say what a checkpoint holds, and all its faults; writes nothing.")
    _add_source(made)
    _add_dtype(made)
    _add_choices(made)
    _add_json(made, "what was found")
    return made


def export_parser() -> argparse.ArgumentParser:
    made = _parser("export", "Write a specjax checkpoint in another format.")
    made.add_argument("source", help="a checkpoint folder")
    made.add_argument("destination", help="the folder to write")
    made.add_argument("--format", default="hf", choices=["hf"], help="hf: Hugging Face safetensors")
    _add_json(made, "destination")
    return made


def _parser(command: str, description: str, epilog: str | None = None) -> argparse.ArgumentParser:
    return argparse.ArgumentParser(
        prog=f"python -m ckpt_convert {command}".strip(), description=description, epilog=epilog
    )


def _add_source(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "source",
        help="a folder with config.json and safetensors, a model's or a drafter's, or a .gguf file",
    )


def _add_dtype(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--dtype",
        default="auto",
        choices=DTYPES,
        help="auto: as the source has it, float32 for a quantised GGUF",
    )


def _add_choices(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("drafters", "what no flag in a drafter's files may settle")
    group.add_argument(
        "--drafter", action="store_true", help="take the drafter inside a model's checkpoint (MTP)"
    )
    group.add_argument(
        "--layout",
        choices=["fill-in", "anchor-first"],
        help="of a drafted block: each mask is its own place's token, or each slot the next one's",
    )
    group.add_argument(
        "--taps",
        metavar="{after-layer,hidden-states,1,15,28}",
        help="what the tapped layers' numbers count, layers' outputs or the streams entering them; "
        "or the numbers of the layers whose outputs are tapped",
    )
    group.add_argument(
        "--embedding",
        choices=["raw", "scaled"],
        help="rows as they are, or times the square root of their width, as Gemma has them",
    )


def _choices(options: argparse.Namespace) -> dict[str, Any]:
    from ckpt_convert.drafters import Choices

    said = Choices(layout=options.layout, taps=options.taps, embedding=options.embedding)
    return {"drafter": options.drafter, "choices": said}


def _add_json(parser: argparse.ArgumentParser, what: str) -> None:
    parser.add_argument("--json", action="store_true", help=f"print one object: {what}, or error")


def main(arguments: list[str] | None = None) -> int:
    """Do what the command line says; returns the exit status, 1 after a one-line error."""
    arguments = sys.argv[1:] if arguments is None else arguments
    commands = {"inspect": (inspect_parser, _inspect), "export": (export_parser, _export)}
    name = arguments[0] if arguments else ""
    parser, command = commands.get(name, (convert_parser, _convert))
    options = parser().parse_args(arguments[1:] if name in commands else arguments)
    # Conversion computes nothing: it must not claim an accelerator that another process uses.
    os.environ["JAX_PLATFORMS"] = "cpu"
    return _reported(command, options)


def _reported(command: Callable[[argparse.Namespace], int], options: argparse.Namespace) -> int:
    from ckpt_convert.errors import ConversionError

    try:
        return command(options)
    except (ConversionError, OSError, MemoryError) as fault:
        return _fail(_sentence(fault), options.json)
    except KeyboardInterrupt:
        return _fail("interrupted; nothing was written", options.json)


def _convert(options: argparse.Namespace) -> int:
    from ckpt_convert.conversion import convert

    conversion = convert(
        options.source,
        options.destination,
        dtype=options.dtype,
        shard_for=options.shard_for,
        quantize=options.quantize,
        overwrite=options.force,
        **_choices(options),
        found=_silent if options.json else _say,
    )
    print(json.dumps({"destination": str(conversion.destination)}) if options.json else conversion)
    return 0


def _inspect(options: argparse.Namespace) -> int:
    from ckpt_convert.conversion import inspect

    finding = inspect(options.source, dtype=options.dtype, **_choices(options))
    print(json.dumps(finding.as_json(), ensure_ascii=False) if options.json else finding)
    return 1 if finding.faults else 0


def _export(options: argparse.Namespace) -> int:
    from ckpt_convert.hf_export import export

    done = export(options.source, options.destination)
    print(json.dumps({"destination": str(done.destination)}) if options.json else done)
    return 0


def _say(what: object) -> None:
    print(what, flush=True)  # before the bar, which goes to the other stream


def _silent(what: object) -> None:
    pass


def _sentence(fault: BaseException) -> str:
    if isinstance(fault, MemoryError):
        return "not enough memory for one copy of the model; try --dtype bfloat16"
    return " ".join(str(fault).split())


def _fail(message: str, as_json: bool) -> int:
    if as_json:
        print(json.dumps({"error": message}))
    else:
        print(f"error: {message}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())

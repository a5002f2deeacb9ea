"""``python -m ckpt_convert SRC DST``: convert a checkpoint by hand."""

import argparse
import json
import os
import sys


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m ckpt_convert",
        description="Convert a Hugging Face folder or a GGUF file into a specjax checkpoint.",
    )
    made.add_argument("source", help="a folder with config.json and safetensors, or a .gguf file")
    made.add_argument("destination", help="the checkpoint folder to write")
    made.add_argument(
        "--dtype",
        default="auto",
        choices=["auto", "float32", "bfloat16", "float16"],
        help="auto: as the source has it, float32 for a quantised GGUF",
    )
    made.add_argument(
        "--quantize", choices=["int8", "int4"], help="keep the matrices in small integers"
    )
    made.add_argument(
        "--force", action="store_true", help="replace a checkpoint at the destination"
    )
    made.add_argument(
        "--json", action="store_true", help="print one JSON object: destination, or error"
    )
    return made


def main(arguments: list[str] | None = None) -> int:
    """Convert as the command line says; returns the exit status, 1 after a one-line error."""
    options = parser().parse_args(arguments)
    # Conversion computes nothing: it must not claim an accelerator that another process uses.
    os.environ["JAX_PLATFORMS"] = "cpu"
    from ckpt_convert.conversion import convert
    from ckpt_convert.errors import ConversionError

    try:
        conversion = convert(
            options.source,
            options.destination,
            dtype=options.dtype,
            quantize=options.quantize,
            overwrite=options.force,
        )
    except (ConversionError, OSError, MemoryError) as fault:
        return _fail(_sentence(fault), options.json)
    except KeyboardInterrupt:
        return _fail("interrupted; nothing was written", options.json)
    report = {"destination": str(conversion.destination)}
    print(json.dumps(report) if options.json else conversion)
    return 0


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

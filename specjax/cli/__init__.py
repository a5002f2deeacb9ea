"""The command line: ``specjax generate | demo | bench | certify | convert``.

Faults of the user end in one line that names fault and remedy, and exit status 1. Nothing heavy is
imported before the arguments are understood.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from specjax import __version__
from specjax.cli import bench, certify, convert, demo, generate

COMMANDS = (generate, demo, bench, certify, convert)
INTERRUPTED = 130
READER_GONE = 141


def program() -> NoReturn:
    """The process: runs `main`, and leaves."""
    status = main()
    if status == INTERRUPTED:
        # Threads of XLA may be compiling still, and do not survive that what they use is torn down.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit status."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if arguments[:1] == ["convert"]:  # argparse hands no options on to another parser
        return convert.run(arguments[1:])
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
        return READER_GONE
    except (ValueError, OSError, ImportError) as fault:
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
    for command in COMMANDS:
        command.add(commands)
    return parser

"""The real checkpoint, and the converter as a process of its own."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import ckpt_convert


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """SmolLM2-135M-Instruct, converted; fetched on a machine's first run."""
    return ckpt_convert.resolve("smollm2-135m-instruct")


@pytest.fixture(scope="session")
def converter_environment() -> dict[str, str]:
    return os.environ | {
        "PYTHONPATH": str(Path(ckpt_convert.__file__).parents[1]),
        "JAX_PLATFORMS": "cpu",
    }


@pytest.fixture(scope="session")
def run_converter(converter_environment) -> Callable[..., subprocess.CompletedProcess]:
    """`run_converter(source, destination, ...)`: the command line, as a user starts it."""

    def run(*arguments, **options) -> subprocess.CompletedProcess:
        command = [sys.executable, "-m", "ckpt_convert", *map(str, arguments)]
        return subprocess.run(
            command, capture_output=True, text=True, env=converter_environment, **options
        )

    return run

"""The package as it is shipped."""

import json
import re
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

import specjax

pytestmark = pytest.mark.fast

HEAVY = ("flax.nnx", "gguf", "orbax", "outlines_core", "tokenizers", "torch", "transformers")
CATCH_ALLS = {"utils.py", "common.py", "base.py", "config.py", "helpers.py", "misc.py"}


@pytest.fixture(scope="module")
def package() -> Path:
    return Path(specjax.__file__).parent


@pytest.fixture(scope="module")
def project() -> dict:
    return tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]


@pytest.mark.parametrize("module", ["specjax", "ckpt_convert", "specjax.cli"])
def test_import_loads_nothing_heavy(module):
    script = f"import json, sys, {module}; print(json.dumps(sorted(sys.modules)))"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    loaded = set(json.loads(run.stdout))
    assert module in loaded
    assert loaded.isdisjoint(HEAVY)


def test_public_names_are_no_modules():
    """Nor after the module of the same name was imported, as `LLM` does."""
    script = (
        "import specjax.llm; from specjax import *; "
        "print([one.__name__ for one in (LLM, Model, Recompute, Sampling, SamplingParams)], "
        "[one.__qualname__ for one in (generate, load)])"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert all(name in run.stdout for name in specjax.__all__)


def test_types_are_shipped(package):
    assert (package / "py.typed").is_file()


def test_only_the_two_packages_are_installed():
    files = metadata.files("specjax")
    assert files is not None
    folders = {file.parts[0] for file in files if file.suffix == ".py"}
    assert folders == {"specjax", "ckpt_convert"}


def test_console_script_starts():
    (script,) = (
        entry
        for entry in metadata.distribution("specjax").entry_points
        if entry.group == "console_scripts"
    )
    assert script.name == "specjax"
    assert callable(script.load())


def test_version_is_said_once_in_each_place_and_agrees(project, checkout):
    released = re.findall(r"^## \[(\d[^]]*)\]", (checkout / "CHANGELOG.md").read_text(), re.M)
    assert metadata.version("specjax") == project["version"] == released[0]


def test_public_names_are_documented():
    for name in specjax.__all__:
        if isinstance(value := getattr(specjax, name), type) or callable(value):
            assert value.__doc__, f"specjax.{name} has no docstring"


def test_no_module_is_a_catch_all(package):
    assert {path.name for path in package.rglob("*.py")}.isdisjoint(CATCH_ALLS)

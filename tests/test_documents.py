"""The documents: what they name exists, and what they show runs."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import specjax
from ckpt_convert.__main__ import convert_parser, export_parser, inspect_parser

DOCUMENTS = (
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "docs/conversion.md",
    "docs/design.md",
    "docs/drafters.md",
    "docs/testing.md",
)


def test_readme_tree_is_the_tree(checkout):
    package = Path(specjax.__file__).parent
    lines = _fenced(checkout / "README.md", "specjax/\n").splitlines()
    inside = lines[1 : lines.index(next(line for line in lines if line.startswith("ckpt")))]
    listed = {line.split()[0].rstrip("/") for line in inside}
    shipped = {path.name for path in package.iterdir() if _is_module(path)}
    assert listed == shipped


def test_readme_tree_has_every_document(checkout):
    tree = _fenced(checkout / "README.md", "specjax/\n")
    assert all(f"docs/{path.name} " in tree for path in (checkout / "docs").iterdir())


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_lead_somewhere(document, checkout):
    path = checkout / document
    targets = re.findall(r"\]\(([^)#]+)[^)]*\)", path.read_text())
    broken = [
        target for target in targets if "://" not in target and not (path.parent / target).exists()
    ]
    assert not broken


@pytest.mark.parametrize("document", DOCUMENTS)
def test_make_targets_exist(document, checkout):
    makefile = (checkout / "Makefile").read_text()
    phony = set(re.search(r"^\.PHONY: (.*)$", makefile, re.M)[1].split())
    named = set(re.findall(r"^make (\w+)|`make (\w+)", (checkout / document).read_text(), re.M))
    assert {name for pair in named for name in pair if name} <= phony


def test_contributors_registries_exist(checkout):
    text = (checkout / "CONTRIBUTING.md").read_text()
    registries = re.findall(r"`([A-Z]+)` in\s+`([\w/]+\.py)`", text)
    assert len(registries) == 6
    for name, path in registries:
        assert re.search(rf"^{name}\b.* = ", (checkout / path).read_text(), re.M), (name, path)


def test_commands_of_the_converter_are_understood(checkout):
    block = _fenced(checkout / "docs" / "conversion.md", "python -m ckpt_convert")
    for line in block.splitlines():
        words = line.partition("#")[0].split()[3:]
        parser = {"inspect": inspect_parser, "export": export_parser}.get(words[0])
        parser().parse_args(words[1:]) if parser else convert_parser().parse_args(words)


@pytest.mark.network
def test_readme_example_runs(checkout):
    script = _fenced(checkout / "README.md", "from specjax")
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip()


def _fenced(document: Path, beginning: str) -> str:
    """The one fenced block of a Markdown document that begins so."""
    blocks = re.findall(r"^```\w*\n(.*?)^```$", document.read_text(), re.M | re.S)
    (block,) = (block for block in blocks if block.startswith(beginning))
    return block


def _is_module(path: Path) -> bool:
    if path.is_dir():
        return (path / "__init__.py").is_file()
    return path.suffix == ".py" and path.name != "__init__.py"

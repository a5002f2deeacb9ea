"""The notebooks run from top to bottom, and lie in git without outputs."""

import os
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from specjax.testing.quick_compilation import OLDER_EMITTERS, known

NOTEBOOKS = sorted((Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))


# What each must have printed, or it does not show what it claims.
SHOWN = {
    "01_quickstart": (
        "output identical: True",
        "identical to plain sampling with this seed: True",
    ),
    "02_is_it_lossless": (
        "the right rule keeps the law: True",
        "the broken rule is found: True",
        "rows identical to plain sampling: True",
        "BREAKS the law",
        "| SmolLM2 | siblings | best possible",
    ),
}
FETCHES = {"01_quickstart", "02_is_it_lossless"}


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, marks=[pytest.mark.network] if path.stem in FETCHES else [])
        for path in NOTEBOOKS
    ],
    ids=lambda path: path.stem,
)
def test_notebook_runs(path, tmp_path, monkeypatch):
    if path.stem == "01_quickstart":  # it compiles much and runs little
        monkeypatch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
    flags = [f"--{name}={str(value).lower()}" for name, value in known(OLDER_EMITTERS).items()]
    monkeypatch.setenv("XLA_FLAGS", " ".join([os.environ.get("XLA_FLAGS", ""), *flags]))
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(notebook, timeout=600, resources={"metadata": {"path": tmp_path}}).execute()
    printed = "".join(
        output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", [])
    )
    for text in SHOWN[path.stem]:
        assert text in printed
    plots = [
        output
        for cell in notebook.cells
        for output in cell.get("outputs", [])
        if "image/png" in output.get("data", {})
    ]
    assert plots


@pytest.mark.fast
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_has_no_outputs_in_git(path):
    for cell in nbformat.read(path, as_version=4).cells:
        if cell.cell_type == "code":
            assert cell.outputs == []
            assert cell.execution_count is None


@pytest.mark.fast
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_first_cell_pins_the_accelerator_stack(path):
    cells = [c.source for c in nbformat.read(path, as_version=4).cells if c.cell_type == "code"]
    assert cells[0].startswith("REPOSITORY = ")
    assert 'startswith(("jax", "libtpu"))' in cells[0]

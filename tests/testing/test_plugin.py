"""The pytest plugin in a run of its own: its fixtures work, and it costs nothing until then."""

import subprocess
import sys
from importlib import metadata

import pytest

import specjax.testing

pytestmark = pytest.mark.fast

PLUGIN = "specjax.testing.plugin"
TESTS = """
import sys

import numpy as np


def test_nothing_is_imported():
    assert "jax" not in sys.modules, "jax was imported"
    assert "scipy" not in sys.modules, "scipy was imported"


def drawing(tv):
    law = np.array([[0.4, 0.1], [0.2, 0.3]])
    drawn = (law + tv * np.array([[1, 0], [-1, 0]])).reshape(-1)

    def sampler(seed, rows):
        numbers = np.random.default_rng(seed).choice(4, size=rows, p=drawn)
        return np.stack(np.unravel_index(numbers, law.shape), axis=1)

    return law, sampler


def test_right(assert_lossless):
    law, sampler = drawing(0)
    assert assert_lossless(sampler, law, rows=5000).passed


def test_wrong(assert_lossless):
    law, sampler = drawing(0.1)
    assert_lossless(sampler, law, rows=5000)


def test_by_hand(joint_law_test, law_tables):
    law, sampler = drawing(0.1)
    assert not joint_law_test(sampler, law, rows=5000).passed
    assert law_tables["trigram"].vocabulary == 3
"""


@pytest.fixture
def run(tmp_path):
    """`run("--co")`: pytest's exit status and output, in a folder of its own."""
    (tmp_path / "test_sampler.py").write_text(TESTS)
    (tmp_path / "conftest.py").write_text(
        "import sys\n\n\ndef pytest_sessionfinish():\n"
        "    print('jax imported:', 'jax' in sys.modules)\n"
    )

    def run(*arguments):
        loaded = () if installed() else ("-p", PLUGIN)
        others = ("-p", "no:jaxtyping", "-p", "no:cacheprovider", "-p", "no:xdist")
        command = [sys.executable, "-m", "pytest", *loaded, *others, *arguments, str(tmp_path)]
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
        return done.returncode, done.stdout + done.stderr

    return run


def installed() -> bool:
    return any(point.value == PLUGIN for point in metadata.entry_points(group="pytest11"))


def test_collecting_imports_no_jax(run):
    status, said = run("--co", "-q")
    assert status == 0, said
    assert "jax imported: False" in said


def test_the_fixtures_pass_and_fail_as_they_should(run):
    status, said = run("-q")
    assert status == 1
    assert "1 failed, 3 passed" in said, said
    assert "BREAKS the law" in said and "0 0: expected 2,000.0" in said


def test_the_fixtures_are_listed_with_what_they_do(run):
    _, said = run("--fixtures", "-q")
    assert "assert_lossless" in said and "law_tables" in said


def test_importing_the_package_imports_no_jax():
    script = "import sys, specjax.testing; assert 'jax' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", script]).returncode == 0


def test_public_names_exist_and_are_documented():
    for name in specjax.testing.__all__:
        value = getattr(specjax.testing, name)
        assert not callable(value) or value.__doc__, f"specjax.testing.{name} has no docstring"
    assert set(specjax.testing.__all__) <= set(dir(specjax.testing))
    with pytest.raises(AttributeError, match="nothing"):
        specjax.testing.nothing  # noqa: B018

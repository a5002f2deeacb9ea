"""Values of the wrong type are refused by a sentence, not by whatever fails first."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from llm.wrong_types import CASES

import specjax

pytestmark = pytest.mark.fast
TESTS = Path(__file__).parents[1]
PACKAGE = Path(specjax.__file__).parents[1]


@pytest.fixture(scope="module")
def raised() -> dict[str, str]:
    program = (
        f"import sys, runpy; sys.path[:0] = {[str(TESTS), str(PACKAGE)]!r}; "
        "runpy.run_module('llm.wrong_types', run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", CASES)
def test_a_sentence_names_the_value(raised, name):
    sentence = CASES[name][1]
    kind, _, said = raised[name].partition(": ")
    assert kind in ("ValueError", "TokenizerError")
    assert sentence in said
    assert "\n" not in said

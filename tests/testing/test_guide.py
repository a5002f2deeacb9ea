"""The guide to `specjax.testing`: what it shows runs, and the numbers that it gives are right."""

import re

import pytest

import specjax.testing
from specjax.testing import TABLES, plan_of, power, rows_needed, smallest_tv

pytestmark = pytest.mark.fast


@pytest.fixture(scope="module")
def guide(request) -> str:
    return (request.config.rootpath / "docs" / "testing.md").read_text()


def test_the_first_example_runs(guide, capsys):
    first = re.search(r"```python\n(.*?)```\n\n```\n(.*?)  \.\.\.\n```", guide, re.S)
    assert first is not None
    exec(first[1], {})
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("keeps the law (p = ")
    for shown, line in zip(first[2].splitlines()[1:], said[1:], strict=False):
        assert re.sub(r"chi-square \S+", "", shown) == re.sub(r"chi-square \S+", "", line)


def test_the_numbers_are_right(guide):
    shown = dict(re.findall(r"^(\w+\(.*?\)\S*)  # ([\d.]+)", guide, re.M))
    assert len(shown) == 5
    law = TABLES["trigram"].law(depth=4, temperature=0.7)
    names = {"power": power, "rows_needed": rows_needed, "smallest_tv": smallest_tv}
    names |= {"plan_of": plan_of, "law": law}
    for call, value in shown.items():
        digits = len(value.split(".")[-1]) if "." in value else 0
        assert round(eval(call, names), digits) == float(value), call


def test_what_it_imports_exists(guide):
    imported = re.findall(r"^from specjax\.testing import (.*)$", guide, re.M)
    names = {name.strip() for line in imported for name in line.split(",")}
    assert names and names <= set(specjax.testing.__all__)


def test_every_public_name_is_in_the_guide_or_beside_it(guide):
    beside = {"JointLawResult", "Plan", "Table", "GreedyReport", "Certificate"}
    beside |= {"certify", "certify_checkpoint"}
    for name in set(specjax.testing.__all__) - beside:
        assert name in guide, name

"""The certificate: what it covers, that it passes what is right, and that it fails what is not."""

import dataclasses
import json
import types

import numpy as np
import pytest
from llm.engines import tiny_model

from specjax.accept import RULES
from specjax.accept.rejection import Rejection
from specjax.draft import DRAFTERS
from specjax.sampling_params import SamplingParams
from specjax.testing import certification, evidence
from specjax.testing.certificate import Caught, Certificate, Injected, Line
from specjax.testing.certification import _hunt, certify, certify_checkpoint, run
from specjax.testing.checkpoint_checks import Checkpoint, CheckpointCheck, checkpoint_checks
from specjax.testing.checks import BUDGETS, CHAIN, RANDOM, SHAPES, SHAPES_OF_BUDGET, TABLES, checks
from specjax.testing.evidence import biased_table, exact_error
from specjax.testing.pearson import fit

# Not of the law: how many, how long, how it is told, and what the text is cut at.
NOT_OF_THE_LAW = {
    *("n", "seed", "max_tokens", "stop", "ignore_eos", "include_stop_str_in_output"),
    *("skip_special_tokens", "logprobs"),
}
OTHER_NAMES = {"structured_outputs": "grammar"}
COARSE = 0.05
FEW = {
    "REPORT_OF_BUDGET": {"fast": {"pairs": 4, "drafts": 8}},
    "TEXT_OF_BUDGET": {"fast": {"positions": 16, "drafts": 4}},
}


@pytest.fixture(scope="module", autouse=True)
def few_laws():
    """Acceptance on fewer laws than a certificate takes: what is measured there has tests."""
    with pytest.MonkeyPatch.context() as patch:
        for name, sizes in FEW.items():
            patch.setattr(certification, name, sizes)
        yield


# --- what is checked ---


@pytest.mark.parametrize("budget", BUDGETS)
def test_every_rule_shape_drafter_and_parameter_is_checked(budget):
    listed = checks(budget)
    assert len(listed) < BUDGETS[budget], "one more is the injected bias"
    assert len({check.name for check in listed}) == len(listed)
    of_rules = {(check.rule, check.shape) for check in listed if check.is_of_rule}
    assert of_rules == {
        (name, shape)
        for name, rule in RULES.items()
        for shape in SHAPES_OF_BUDGET[budget]
        if shape == CHAIN or rule.trees
    }
    assert {check.drafter for check in listed} == {*DRAFTERS, "tree"}
    asked = {name for check in listed for setting in check.settings for name in setting}
    fields = {field.name for field in dataclasses.fields(SamplingParams)} - NOT_OF_THE_LAW
    assert {OTHER_NAMES.get(name, name) for name in fields} <= asked


def test_every_table_that_draws_is_used_at_full_size():
    assert {check.model for check in checks("full")} == {*RANDOM, "transformer"}


@pytest.mark.parametrize("budget", BUDGETS)
def test_a_rule_that_is_not_lossless_is_checked_where_that_shows(budget):
    lossy = [check for check in checks(budget) if not RULES[check.rule].lossless]
    assert lossy
    for check in lossy:
        assert exact_error(RULES[check.rule], SHAPES[check.shape], [TABLES[check.model]]) > 0.5


def test_filters_choose_and_an_empty_choice_is_an_error():
    assert {check.rule for check in checks("fast", ["recursive"])} == {"recursive"}
    assert {check.drafter for check in checks("fast", [], ["ngram"])} == {"ngram"}
    with pytest.raises(
        ValueError, match="no check has the rule 'greedy' with the drafters ngram: leave"
    ):
        checks("fast", ["greedy"], ["ngram"])
    with pytest.raises(ValueError, match="no check has the rule 'block' with the drafters ngram"):
        checks("fast", ["matching", "block"], ["ngram"])
    with pytest.raises(ValueError, match="unknown rule 'rejektion'; known: greedy, rejection"):
        checks("fast", ["rejektion"])
    with pytest.raises(ValueError, match="unknown drafter 'medusa9'; known: none"):
        checks("fast", [], ["medusa9"])


@pytest.mark.parametrize("rule, claim", [("typical", "lossless"), ("block", "lossy")])
def test_a_claim_that_a_rule_cannot_make_is_refused_by_name(rule, claim):
    with pytest.raises(ValueError, match=f"rule '{rule}' is .* cannot be certified as {claim}"):
        certify(rules=[rule], claim=claim)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"seed": -1}, "seed is -1: it must be at least 0"),
        ({"seed": 1 << 32}, r"seed is 4294967296: it must be less than 2\*\*32"),
        ({"budget": "huge"}, "unknown budget 'huge'; known: fast, full"),
        ({"claim": "sound"}, "unknown claim 'sound'; known: lossless, lossy"),
        ({"claim": "lossy", "drafters": ["ngram"]}, "no check that was asked for has a lossy rule"),
        ({"registry": {}}, "no check has a rule"),
        ({"registry": {"mine": Rejection(draws="beam")}}, "unknown way to draw 'beam'; known: sam"),
    ],
)
def test_what_cannot_be_certified_is_refused(options, sentence):
    with pytest.raises(ValueError, match=sentence):
        certify(**options)


@pytest.mark.parametrize("options", [{"seed": -1}, {"budget": "huge"}])
def test_a_checkpoint_is_refused_likewise(options):
    with pytest.raises(ValueError, match="seed is -1|unknown budget 'huge'"):
        certify_checkpoint(tiny_model(), **options)


def test_a_registry_of_ones_own_is_all_that_is_checked():
    listed = checks("fast", registry={"mine": RULES["recursive"], "matching": RULES["matching"]})
    assert {check.rule for check in listed} == {"mine", "matching"}
    assert {(check.drafter, check.shape) for check in listed if check.rule == "mine"} == {
        ("draft_model", CHAIN),
        ("tree", "tree"),
    }
    assert {check.drafter for check in listed if not check.is_of_rule} == {"none", "ngram"}


# --- what is found ---


FIT = fit(np.array([5_000, 5_100]), np.array([0.5, 0.5]))


@dataclasses.dataclass(frozen=True)
class OfItsOwn:
    """A rule that is no law, and that draws otherwise than plain decoding does."""

    lossless: bool
    draws: str = "sample"
    trees: bool = False
    greedy_only: bool = False


@pytest.mark.parametrize("lossless", [False, True])
def test_a_rule_of_neither_law_nor_plain_tokens_is_judged_by_its_sampled_law(monkeypatch, lossless):
    result = types.SimpleNamespace(fit=FIT, independent=True)
    monkeypatch.setattr(evidence, "sampled", lambda *_: result)
    registry = {"mine": OfItsOwn(lossless)}
    (check,) = checks("fast", registry=registry)
    found = evidence.gather(check, registry, tv=0.1, family=1, seed=0)
    assert found.exact_error is None and found.different is None
    (line,) = certification._judged([check], [found], registry, 1)
    assert line.passed == lossless and line.claim == ("lossless" if lossless else "lossy")
    injected = Injected(0.01, 0.0, True)
    certificate = Certificate("fast", 0, 1e-6, 0.01, (line,), injected, (), {})
    blunt = "NOT certified: 1 checks do not see that a rule is lossy"
    said = "certified: 1 checks, none failed" if lossless else blunt
    assert certificate.passed == lossless and certificate.conclusion == said


def test_rows_that_depend_on_one_another_are_a_fault():
    registry = {"mine": OfItsOwn(True)}
    (check,) = checks("fast", registry=registry)
    found = evidence.Evidence(None, FIT, independent=False)
    (line,) = certification._judged([check], [found], registry, 1)
    assert line.verdict == "FAULT: its rows are not independent of one another"


def test_a_law_of_coupled_drafts_is_summed_as_of_any_others():
    """That its drafts are no draws from their law shows when it is sampled."""
    rule = Rejection(draws="coupled")
    assert exact_error(rule, (-1, 0), [TABLES["trigram"]]) < 1e-12


def test_a_certificate_says_what_every_line_finds_and_how_programs_were_compiled():
    line = Line("r", "d", "s", "m", "", "lossless", 0.0, 1.0, 1, 9, 1.0, 1.0, 0.034, None, 0, ())
    injected = Injected(0.01, 0.0, True)
    plain = Certificate("fast", 0, 1e-6, 0.01, (line,), injected, (), {})
    assert "Any bias of total variation >= 3.40%" in plain.notes[0]
    assert "compiled as it compiles them." in plain.as_markdown()
    given = dataclasses.replace(plain, compiler_options={"level": 1, "quick": True})
    assert "compiled with fewer optimisations (level=1, quick=True)." in given.as_markdown()


def test_json_and_markdown_are_two_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="cannot hold both JSON and Markdown: name two files"):
        run(json="found", markdown=tmp_path / "found")
    assert list(tmp_path.iterdir()) == []


class TargetForResidual(Rejection):
    """One line wrong: after a rejection the next token is drawn from the target's own law."""

    def residual(self, draft, log_p, aux, node):
        return log_p[node]


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """One run with a broken rule beside a right one: its status and the two files."""
    folder = tmp_path_factory.mktemp("certificate")
    out = {"json": folder / "c.json", "markdown": folder / "c.md"}
    broken = {**RULES, "rejection": TargetForResidual()}
    rules = ["rejection", "coupled"]
    status = run(rules=rules, drafters=["draft_model"], seed=3, registry=broken, **out)
    return status, json.loads(out["json"].read_text()), out["markdown"].read_text()


@pytest.mark.slow
def test_a_broken_rule_fails_in_its_own_line_and_the_exit_status_says_so(written):
    status, found, markdown = written
    assert status == 1 and not found["passed"]
    assert markdown.startswith("# specjax: NOT lossless: 1 of 2 checks failed")
    (line,) = (line for line in markdown.splitlines() if "FAULT" in line)
    assert line.startswith("| rejection ")
    assert "the exact law is off by" in line and "the sampled law is broken" in line
    (faulty,) = (line for line in found["lines"] if not line["passed"])
    assert faulty["exact_error"] > 0.01 and faulty["p_adjusted"] < 1e-9


@pytest.mark.slow
def test_the_right_rule_beside_it_passes(written):
    _, found, markdown = written
    (line,) = (line for line in found["lines"] if line["rule"] == "coupled")
    # It is no law, but plain decoding's own tokens.
    assert line["passed"] and line["exact_error"] is None
    assert line["different_rows"] == 0 and line["compared_rows"] > 1000
    assert line["p_adjusted"] > 1e-6 and line["detectable_tv"] <= 0.0102
    assert "a rerun with the same seed repeats this run and is no new evidence" in markdown


@pytest.mark.slow
def test_a_bias_of_one_percent_in_the_loop_is_found(written):
    _, found, markdown = written
    assert found["injected"]["tv"] == 0.01 and found["injected"]["found"]
    assert found["injected"]["p_value"] < 1e-8
    assert "An injected bias of 1.0% was found" in markdown


def test_the_injected_bias_is_as_large_as_it_says():
    table = TABLES["trigram"]
    biased = biased_table(table, 0.01)
    assert np.abs(biased.law() - table.law()).sum() / 2 == pytest.approx(0.01, rel=1e-3)


def test_the_exact_error_of_a_right_rule_is_rounding():
    assert exact_error(RULES["matching"], SHAPES["tree"]) < 1e-12


@pytest.mark.slow
def test_a_lossy_rule_is_certified_as_lossy_only():
    (line,) = certify(rules=["typical"], drafters=["draft_model"], claim="lossy", tv=COARSE).lines
    assert line.exact_error is not None and line.exact_error > 0.05
    assert line.verdict == f"lossy, TV = {line.exact_error:.2g}"
    assert line.p_adjusted is None and line.p_value < 1e-9 and line.passed


@pytest.mark.slow
def test_a_checkpoint_is_certified_on_its_own_law(monkeypatch):
    """A tiny transformer; of two rules on its early exit one is broken."""
    some = [CheckpointCheck(rule, "early_exit") for rule in ("rejection", "coupled")]
    monkeypatch.setattr(certification, "checkpoint_checks", lambda _: some)
    broken = {**RULES, "rejection": TargetForResidual()}
    found = certify_checkpoint(tiny_model(), registry=broken)
    assert [line.passed for line in found.lines] == [False, True]
    assert all(line.rows == 2_000 and 0.08 < line.detectable_tv < 0.12 for line in found.lines)
    assert found.injected.found and found.injected.tv == pytest.approx(found.tv)
    assert found.conclusion == "NOT lossless: 1 of 2 checks failed"


def test_a_checkpoint_is_checked_with_all_drafters_that_need_no_other():
    listed = checkpoint_checks(Checkpoint(tiny_model()))
    assert {check.drafter for check in listed} == {*DRAFTERS} - {"draft_model"}
    assert {check.rule for check in listed} == {"matching", "rejection", "block", "coupled"}


def test_a_certificate_that_misses_the_injected_bias_certifies_nothing():
    missed = Certificate("fast", 0, 1e-6, 0.01, (), Injected(0.01, 0.3, False), (), {})
    assert not missed.passed and "proves nothing" in missed.conclusion
    assert "was NOT found" in missed.as_markdown()


def test_a_certificate_that_misses_a_mutant_certifies_nothing():
    found = Caught("one", "a line", "exact", True, "identity", None)
    missed = dataclasses.replace(found, mutant="two", found=False)
    injected = Injected(0.01, 0.0, True)
    certificate = Certificate("fast", 0, 1e-6, 0.01, (), injected, (found, missed), {})
    assert not certificate.passed
    assert certificate.conclusion == "NOT certified: mutants were not found: two"
    assert "1 of 2 mutants" in certificate.as_markdown()
    assert dataclasses.replace(certificate, mutants=(found,)).passed


@pytest.mark.slow
def test_a_mutant_is_hunted_by_the_check_that_must_find_it():
    caught = _hunt("residual is p", "fast", seed=0)
    assert caught.found and caught.check == "exact" and caught.weaker_found is None

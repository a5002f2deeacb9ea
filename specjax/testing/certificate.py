"""The equivalence certificate: what was checked, how sharply, and what was found."""

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from specjax.bench.table import table
from specjax.testing.acceptance import Acceptance, acceptance_table
from specjax.testing.power_analysis import PROBABILITY

LOSSLESS = "lossless"
ACCEPTANCE = (
    "Accepted tokens a round, with their standard error, and their share of the most that any "
    "lossless rule could accept of drafts drawn so:"
)


@dataclass(frozen=True)
class Line:
    """One check and its verdict; None where a kind of evidence does not exist for the rule.

    ``p_adjusted`` is Holm's p-value over all lossless checks. ``detectable_tv`` is the smallest
    total variation that this check was sure to find.
    """

    rule: str
    drafter: str
    shape: str
    model: str
    asks: str
    claim: str
    exact_error: float | None
    statistic: float
    degrees: int
    rows: int
    p_value: float
    p_adjusted: float | None
    detectable_tv: float
    different_rows: int | None
    compared_rows: int
    faults: tuple[str, ...]

    @property
    def passed(self) -> bool:
        return not self.faults

    @property
    def verdict(self) -> str:
        if self.faults:
            return "FAULT: " + "; ".join(self.faults)
        return self.claim


@dataclass(frozen=True)
class Injected:
    """A bias of ``tv`` put into the loop, in the law of the first token alone."""

    tv: float
    p_value: float
    found: bool


@dataclass(frozen=True)
class Caught:
    """A mutant and the check that must find it; of a weaker check whether it does, too.

    A certificate with the budget "fast" leaves the weaker checks out.
    """

    mutant: str
    fault: str
    check: str
    found: bool
    weaker: str
    weaker_found: bool | None


@dataclass(frozen=True)
class Certificate:
    """What was checked, how sharply, and what was found; written as JSON and as Markdown."""

    budget: str
    seed: int
    alpha: float
    tv: float
    lines: tuple[Line, ...]
    injected: Injected
    mutants: tuple[Caught, ...]
    versions: dict[str, str]
    acceptance: tuple[Acceptance, ...] = ()
    compiler_options: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def passed(self) -> bool:
        proven = self.injected.found and all(one.found for one in self.mutants)
        return proven and all(line.passed for line in self.lines)

    @property
    def conclusion(self) -> str:
        faulty = [line for line in self.lines if not line.passed]
        if faulty and all(line.claim != LOSSLESS for line in faulty):
            return f"NOT certified: {len(faulty)} checks do not see that a rule is lossy"
        if faulty:
            return f"NOT lossless: {len(faulty)} of {len(self.lines)} checks failed"
        if not self.injected.found:
            return "NOT certified: the injected bias was not found, so the run proves nothing"
        missed = [one.mutant for one in self.mutants if not one.found]
        if missed:
            return f"NOT certified: mutants were not found: {', '.join(missed)}"
        if not self._lossless:
            return f"NOT lossless, as claimed: {len(self.lines)} checks"
        return f"certified: {len(self._lossless)} checks, none failed"

    @property
    def _lossless(self) -> list[Line]:
        return [line for line in self.lines if line.claim == LOSSLESS]

    @property
    def notes(self) -> list[str]:
        found = "was found" if self.injected.found else "was NOT found"
        return [
            f"Any bias of total variation >= {self._found_by_all:.2%}, in any direction, is found "
            f"with probability {PROBABILITY:g} in each check; a right rule fails some check with "
            f"probability {self.alpha:g} at most (Holm).",
            f"An injected bias of {self.injected.tv:.1%} {found} "
            f"(p = {self.injected.p_value:.1e}).",
            self._about_mutants(),
            self._about_programs(),
            f"Seed {self.seed}: a rerun with the same seed repeats this run and is no new "
            "evidence.",
        ]

    @property
    def _found_by_all(self) -> float:
        return max([self.tv, *(line.detectable_tv for line in self._lossless)])

    def _about_programs(self) -> str:
        given = ", ".join(f"{name}={value}" for name, value in self.compiler_options.items())
        how = f"with fewer optimisations ({given})" if given else "as it compiles them"
        return f"The programs are those of `specjax.generate`, compiled {how}."

    def _about_mutants(self) -> str:
        if not self.mutants:
            return "Mutants are left out where rules, drafters or a checkpoint are chosen."
        found = sum(one.found for one in self.mutants)
        return f"{found} of {len(self.mutants)} mutants, one line wrong each, were found."

    def as_dict(self) -> dict[str, Any]:
        lines = [
            dataclasses.asdict(line)
            # JSON has no infinity: one impossible draw.
            | {"passed": line.passed, "statistic": _finite(line.statistic)}
            for line in self.lines
        ]
        return {
            **dataclasses.asdict(self),
            "lines": lines,
            "passed": self.passed,
            "conclusion": self.conclusion,
            "notes": self.notes,
        }

    def as_table(self) -> str:
        header = [
            *("rule", "drafter", "shape", "model", "asked for", "exact error"),
            *("rows", "chi-square", "p", "finds TV", "= plain", "verdict"),
        ]
        return table(header, [_cells(line) for line in self.lines])

    def mutants_table(self) -> str:
        header = [
            "mutant",
            "what is wrong",
            "must be found by",
            "found",
            "weaker check",
            "finds it",
        ]
        said = {True: "yes", False: "NO", None: "-"}
        weaker = {True: "yes", False: "no", None: "-"}
        rows = [
            (
                one.mutant,
                one.fault,
                one.check,
                said[one.found],
                one.weaker,
                weaker[one.weaker_found],
            )
            for one in self.mutants
        ]
        return table(header, rows)

    def as_markdown(self) -> str:
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        return "\n".join(
            [
                f"# specjax: {self.conclusion}",
                "",
                *(f"- {note}" for note in self.notes),
                f"- {versions}; budget {self.budget}",
                "",
                self.as_table(),
                "",
                *([self.mutants_table(), ""] if self.mutants else []),
                *(
                    [ACCEPTANCE, "", acceptance_table(self.acceptance), ""]
                    if self.acceptance
                    else []
                ),
            ]
        )


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _cells(line: Line) -> tuple[str, ...]:
    same = line.compared_rows - (line.different_rows or 0)
    adjusted = line.p_value if line.p_adjusted is None else line.p_adjusted
    return (
        line.rule,
        line.drafter,
        line.shape,
        line.model,
        line.asks or "-",
        "-" if line.exact_error is None else f"{line.exact_error:.0e}",
        f"{line.rows:,}",
        f"{line.statistic:.1f}/{line.degrees}",
        f"{adjusted:.2g}",
        f"{line.detectable_tv:.2%}",
        "-" if line.different_rows is None else f"{same}/{line.compared_rows}",
        line.verdict,
    )

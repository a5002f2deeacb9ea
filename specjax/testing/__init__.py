"""Tests of losslessness, for specjax's own rules and anybody's sampler: see ``docs/testing.md``.

- `joint_law_test` draws from a sampler and tests the joint law of its first tokens.
- `JaxSampler`, `HuggingFaceSampler`, `EndpointSampler` make samplers of other people's.
- `sequence_law`, `hugging_face_law` and `TABLES` say what the law is.
- `plan_of`, `power`, `rows_needed`, `smallest_tv` say how many rows find how small a bias.
- `exact_law` computes the law of one round of a rule, without sampling.
- `MUTANTS` are rules, drafters and loops with one line wrong each; `run_checks` hunts one.
- `greedy_report` re-scores greedy output and sorts each difference into near-tie and fault.
- `certify` gathers all evidence on specjax itself into a `Certificate`, `certify_checkpoint` that
  on one checkpoint.

As a pytest plugin: the fixtures `joint_law_test`, `assert_lossless` and `law_tables`. Names are
imported when they are used, so importing this package costs nothing.

The other modules: `pearson` (the statistic), `identity` (speculative output against plain output,
token by token), `hlo` (what a compiled loop does with its cache).
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from specjax.testing.certificate import Certificate as Certificate
    from specjax.testing.certification import certify as certify
    from specjax.testing.certification import certify_checkpoint as certify_checkpoint
    from specjax.testing.exact import exact_law as exact_law
    from specjax.testing.greedy import GreedyReport as GreedyReport
    from specjax.testing.greedy import greedy_report as greedy_report
    from specjax.testing.joint import JointLawResult as JointLawResult
    from specjax.testing.joint import joint_law_test as joint_law_test
    from specjax.testing.joint import plan_of as plan_of
    from specjax.testing.mutants import MUTANTS as MUTANTS
    from specjax.testing.mutants import run_checks as run_checks
    from specjax.testing.power_analysis import Plan as Plan
    from specjax.testing.power_analysis import power as power
    from specjax.testing.power_analysis import rows_needed as rows_needed
    from specjax.testing.power_analysis import smallest_tv as smallest_tv
    from specjax.testing.reference import sequence_law as sequence_law
    from specjax.testing.samplers import EndpointSampler as EndpointSampler
    from specjax.testing.samplers import HuggingFaceSampler as HuggingFaceSampler
    from specjax.testing.samplers import JaxSampler as JaxSampler
    from specjax.testing.samplers import hugging_face_law as hugging_face_law
    from specjax.testing.tables import TABLES as TABLES
    from specjax.testing.tables import Table as Table

_HOME = {
    "Certificate": "certificate",
    "GreedyReport": "greedy",
    "MUTANTS": "mutants",
    "certify": "certification",
    "certify_checkpoint": "certification",
    "exact_law": "exact",
    "greedy_report": "greedy",
    "run_checks": "mutants",
    "EndpointSampler": "samplers",
    "HuggingFaceSampler": "samplers",
    "JaxSampler": "samplers",
    "JointLawResult": "joint",
    "Plan": "power_analysis",
    "TABLES": "tables",
    "Table": "tables",
    "hugging_face_law": "samplers",
    "joint_law_test": "joint",
    "plan_of": "joint",
    "power": "power_analysis",
    "rows_needed": "power_analysis",
    "sequence_law": "reference",
    "smallest_tv": "power_analysis",
}
__all__ = sorted(_HOME)


def __getattr__(name):
    if name not in _HOME:
        raise AttributeError(f"module 'specjax.testing' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"specjax.testing.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__():
    return sorted([*globals(), *_HOME])

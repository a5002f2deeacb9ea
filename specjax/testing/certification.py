"""``specjax certify``: gathers the evidence and writes the certificate.

For each of a list of checks the error of the exact law, the sampled joint law through the whole
loop with its family-wise p-value, and the smallest bias that would have been found. The
certificate proves itself: a bias of just the planned size is put into the loop and must be found,
and so must rules, drafters and loops with one line wrong.
"""

import os
import platform
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import jax
from tqdm.auto import tqdm

from specjax import __version__
from specjax.accept import RULES, default_rule
from specjax.bench.findings import is_replaced, writable, write_json, write_text
from specjax.checkpoint import Model, load
from specjax.choose import WAYS
from specjax.compilation_cache import enable_compilation_cache
from specjax.sampling_params import require_integer
from specjax.testing.acceptance import Acceptance, acceptance_table, synthetic_report
from specjax.testing.certificate import (
    ACCEPTANCE,
    LOSSLESS,
    Caught,
    Certificate,
    Injected,
    Line,
)
from specjax.testing.checkpoint_checks import (
    CELLS,
    Checkpoint,
    CheckpointCheck,
    checkpoint_checks,
)
from specjax.testing.checkpoint_checks import ROWS_OF_BUDGET as CHECKPOINT_ROWS
from specjax.testing.checkpoint_checks import gather as gather_of_checkpoint
from specjax.testing.checks import CHAIN, Check, checks, require_known
from specjax.testing.evidence import Evidence, biased_table, gather, sampled
from specjax.testing.loop_sampler import LoopSampler
from specjax.testing.mutants import CHECKS, MUTANTS, ROWS_OF_BUDGET, run_checks
from specjax.testing.power_analysis import ALPHA, PROBABILITY, holm, smallest_tv
from specjax.testing.quick_compilation import fewer_optimisations
from specjax.testing.tables import DEPTH, TABLES
from specjax.testing.text_laws import text_acceptance

# How much of a synthetic report, and of a model's own text, acceptance is measured on.
REPORT_OF_BUDGET = {"fast": {"pairs": 16, "drafts": 48}, "full": {"pairs": 64, "drafts": 256}}
TEXT_OF_BUDGET = {"fast": {"positions": 96, "drafts": 8}, "full": {"positions": 384, "drafts": 16}}
# The bias that a budget is sure to find, in total variation.
TV_OF_BUDGET = {"fast": 0.01, "full": 0.003}
CLAIMS = (LOSSLESS, "lossy")
EXACT = 1e-9
MOST_WORKERS = 4


def certify(
    *,
    rules: Sequence[str] = (),
    drafters: Sequence[str] = (),
    budget: str = "fast",
    claim: str = "lossless",
    seed: int = 0,
    tv: float | None = None,
    registry: Mapping[str, Any] = RULES,
) -> Certificate:
    """Gathers the evidence on all checks, or on those of certain rules and drafters.

    Args:
        budget: "fast" is sure to find a bias of 1%, "full" one of 0.3% and has more shapes.
        claim: "lossless" refuses rules that are not; "lossy" states how far these are.
        tv: the bias to be found, instead of the budget's.
        registry: rules by name, instead of specjax's own.

    Raises ValueError for what cannot be checked, before anything is compiled.
    """
    _check_seed(seed)
    _check_claim(claim, rules, registry)
    chosen = checks(budget, rules, drafters, registry)
    if claim == "lossy":
        chosen = [check for check in chosen if not registry[check.rule].lossless]
        if not chosen:
            raise ValueError("no check that was asked for has a lossy rule: leave --claim out")
    tv = TV_OF_BUDGET[budget] if tv is None else tv
    family = max(1, sum(registry[check.rule].lossless for check in chosen))
    mutants = () if rules or drafters else MUTANTS
    judged = {check.rule: registry[check.rule] for check in chosen}
    require_known("way to draw", [rule.draws for rule in judged.values()], WAYS)
    report = partial(synthetic_report, _sampling(judged), seed=seed, **REPORT_OF_BUDGET[budget])
    injected, acceptance, caught, found = _work(
        partial(_inject, tv, family, seed),
        report,
        [partial(_hunt, name, budget, seed) for name in mutants],
        [partial(gather, check, registry, tv, family, seed) for check in chosen],
    )
    lines = tuple(_judged(chosen, found, registry, family))
    about = _versions(), acceptance, fewer_optimisations()
    return Certificate(budget, seed, ALPHA, tv, lines, injected, caught, *about)


def certify_checkpoint(
    model: Model, *, budget: str = "fast", seed: int = 0, registry: Mapping[str, Any] = RULES
) -> Certificate:
    """The certificate of one checkpoint, on its own law; its rows find less than a table's.

    Raises ValueError for what cannot be checked, before anything is compiled.
    """
    _check_seed(seed)
    require_known("budget", [budget], CHECKPOINT_ROWS)
    checkpoint = Checkpoint(model)
    chosen = checkpoint_checks(checkpoint)
    rows, family = CHECKPOINT_ROWS[budget], len(chosen)
    tv = smallest_tv(rows, cells=CELLS, checks=family)
    exit_layer = model.target.config.num_layers - 2
    report = (
        partial(text_acceptance, model, exit_layer, seed=seed, **TEXT_OF_BUDGET[budget])
        if exit_layer > 0
        else list
    )
    injected, acceptance, _, found = _work(
        partial(_inject, tv, family, seed),
        report,
        [],
        [partial(gather_of_checkpoint, one, checkpoint, registry, rows, seed) for one in chosen],
    )
    lines = tuple(_judged(chosen, found, registry, family))
    about = _versions(), acceptance, fewer_optimisations()
    return Certificate(budget, seed, ALPHA, tv, lines, injected, (), *about)


def _sampling(rules: Mapping[str, Any]) -> dict[str, Any]:
    """The rules whose acceptance there is a bound for."""
    return {name: rule for name, rule in rules.items() if rule.lossless and not rule.greedy_only}


def _work(
    inject, report, hunts, gathers
) -> tuple[Injected, tuple[Acceptance, ...], tuple[Caught, ...], list[Evidence]]:
    """Does everything side by side: programs compile on one core each."""
    with ThreadPoolExecutor(min(MOST_WORKERS, os.cpu_count() or 1)) as pool:
        bias, acceptance = pool.submit(inject), pool.submit(report)
        evidence = [pool.submit(one) for one in gathers]
        caught = [pool.submit(one) for one in hunts]
        every = [bias, acceptance, *evidence, *caught]
        with tqdm(total=len(every), unit=" checks", delay=2, leave=False) as bar:
            for job in every:
                job.add_done_callback(lambda _: bar.update())
            try:
                hunted = tuple(job.result() for job in caught)
                found = [job.result() for job in evidence]
                return bias.result(), tuple(acceptance.result()), hunted, found
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise


def _check_seed(seed: int) -> None:
    require_integer("seed", seed, at_least=0)
    # `jax.random.key` would drop what lies beyond: two seeds would be one.
    if seed >= 1 << 32:
        raise ValueError(f"seed is {seed}: it must be less than 2**32")


def _check_claim(claim: str, rules: Sequence[str], registry) -> None:
    require_known("claim", [claim], CLAIMS)
    for name in rules:
        if name in registry and registry[name].lossless != (claim == "lossless"):
            other = "lossy" if claim == "lossless" else "lossless"
            raise ValueError(
                f"rule {name!r} is {other} and cannot be certified as {claim}: ask for "
                f"--claim {other}"
            )


def _inject(tv: float, family: int, seed: int) -> Injected:
    """A biased target under the default rule, judged by the law of the unbiased one."""
    right = TABLES["trigram"]
    check = Check(default_rule(True), "draft_model", CHAIN, "trigram")
    sampler = LoopSampler(biased_table(right, tv), DEPTH, RULES[check.rule], *check.build())
    p_value = sampled(sampler, right.law(), tv, family, seed).p_value
    return Injected(tv, p_value, p_value < ALPHA / family)


def _hunt(name: str, budget: str, seed: int) -> Caught:
    """Whether a mutant is found by the check that must find it."""
    mutant = MUTANTS[name]
    if budget == "fast":
        rows = ROWS_OF_BUDGET[budget]
        found = {mutant.caught_by: CHECKS[mutant.caught_by](mutant, rows, seed)}
    else:
        found = run_checks(mutant, budget, seed)
    return Caught(
        mutant=name,
        fault=mutant.fault,
        check=mutant.caught_by,
        found=found[mutant.caught_by],
        weaker=mutant.passes,
        weaker_found=found.get(mutant.passes),
    )


def _judged(chosen: Sequence[Any], found: list[Evidence], registry, family: int) -> list[Line]:
    lossless = [registry[check.rule].lossless for check in chosen]
    adjusted = iter(
        holm([one.fit.p_value for one, is_ in zip(found, lossless, strict=True) if is_])
    )
    return [
        _line(check, one, next(adjusted) if is_lossless else None, family)
        for check, one, is_lossless in zip(chosen, found, lossless, strict=True)
    ]


def _line(
    check: Check | CheckpointCheck, one: Evidence, adjusted: float | None, family: int
) -> Line:
    lossless = adjusted is not None
    return Line(
        rule=check.rule,
        drafter=check.drafter,
        shape=check.shape,
        model=check.model,
        asks=check.asks,
        claim=LOSSLESS if lossless else _lossy(one.exact_error),
        exact_error=one.exact_error,
        statistic=one.fit.statistic,
        degrees=one.fit.degrees,
        rows=one.fit.samples,
        p_value=one.fit.p_value,
        p_adjusted=adjusted,
        detectable_tv=one.fit.detectable_tv(PROBABILITY, ALPHA / family),
        different_rows=one.different,
        compared_rows=one.compared,
        faults=tuple(_faults(one, adjusted) if adjusted is not None else _too_good(one)),
    )


def _lossy(exact_error: float | None) -> str:
    return "lossy" if exact_error is None else f"lossy, TV = {exact_error:.2g}"


def _faults(one: Evidence, adjusted: float) -> Iterator[str]:
    if one.exact_error is not None and not one.exact_error < EXACT:
        yield f"the exact law is off by {one.exact_error:.1e}"
    if adjusted < ALPHA:
        yield f"the sampled law is broken (p = {adjusted:.1e})"
    if not one.independent:
        yield "its rows are not independent of one another"
    if one.different:
        yield f"{one.different} of {one.compared} rows are not plain decoding's"


def _too_good(one: Evidence) -> Iterator[str]:
    """A rule that is said to be lossy has to be seen so, or the test is not worth its name."""
    if not one.fit.p_value < ALPHA:
        yield f"said to be lossy, and the sampled law is kept (p = {one.fit.p_value:.2g})"


def _versions() -> dict[str, str]:
    return {
        "specjax": __version__,
        "jax": jax.__version__,
        "python": platform.python_version(),
        "device": jax.devices()[0].device_kind,
    }


def run(
    *,
    json: Path | str,
    markdown: Path | str,
    model: str | None = None,
    dtype: str = "float32",
    **options: Any,
) -> int:
    """`certify`, printed and written to two files; returns 1 if anything failed.

    With a ``model`` it is `certify_checkpoint` of that checkpoint.
    """
    json, markdown = writable(json), writable(markdown)
    if json.resolve() == markdown.resolve() and is_replaced(json):
        raise ValueError(f"{json} cannot hold both JSON and Markdown: name two files")
    enable_compilation_cache()
    if model is None:
        certificate = certify(**options)
    else:
        certificate = certify_checkpoint(load(model, dtype=dtype), **options)
    print(certificate.as_table())
    if certificate.mutants:
        print(f"\n{certificate.mutants_table()}")
    if certificate.acceptance:
        print(f"\n{ACCEPTANCE}\n\n{acceptance_table(certificate.acceptance)}")
    print("\n" + "\n".join(certificate.notes))
    print(f"\n{certificate.conclusion}")
    write_json(json, certificate.as_dict())
    write_text(markdown, certificate.as_markdown())
    print(f"wrote {json} and {markdown}", file=sys.stderr)
    return 0 if certificate.passed else 1

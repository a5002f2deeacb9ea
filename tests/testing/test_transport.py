"""The bound three ways: the program itself, its dual over all sets, its dual in order of p/q."""

import itertools

import numpy as np
import pytest
from accept.instances import KINDS
from scipy.optimize import linprog

from specjax.testing.transport import (
    SETS_OF_DRAWS,
    chain_optimum,
    coupled_acceptance,
    draft_sets,
    lump,
    optimum,
    smallest_cut,
    transport,
)

VOCABULARY = 6
EXACT = 1e-9


def pairs(vocabulary=VOCABULARY, repeats=4, seed=0):
    """Pairs of laws of every kind that rules have been wrong about."""
    rng = np.random.default_rng(seed)
    drawn = [kind(rng, (1, vocabulary)) for _ in range(repeats) for kind in KINDS.values()]
    return [(p[0], q[0]) for p, q in drawn]


def possible(q, k, draws):
    return draws == "independent" or k <= np.sum(q > 0)


@pytest.mark.parametrize("draws", SETS_OF_DRAWS)
@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_the_program_and_its_duals_agree(draws, k):
    compared = 0
    for p, q in pairs():
        if not possible(q, k, draws):
            continue
        sets = draft_sets(q, k, draws)
        assert sum(sets.values()) == pytest.approx(1, abs=1e-12)
        value = transport(p, sets)
        assert smallest_cut(p, sets) == pytest.approx(value, abs=EXACT)
        assert optimum(p, q, k, draws) == pytest.approx(value, abs=EXACT)
        compared += 1
    assert compared >= 15


def test_the_bound_holds_where_sets_can_only_be_tried():
    """Ten tokens and up to eight drafts: too many orders for the program, not for the dual."""
    rng = np.random.default_rng(1)
    for k in (5, 8):
        p, q = rng.dirichlet(np.full(10, 0.4), size=2)
        assert optimum(p, q, k) == pytest.approx(smallest_cut(p, draft_sets(q, k)), abs=EXACT)


def test_one_draft_is_accepted_with_one_minus_the_distance():
    for p, q in pairs():
        for draws in ("sample", "independent", "top_and_one"):
            assert optimum(p, q, 1, draws) == pytest.approx(np.minimum(p, q).sum(), abs=EXACT)
        assert optimum(p, q, 1, "top_k") == pytest.approx(p[np.argmax(q)], abs=EXACT)


def test_drafts_without_replacement_can_be_accepted_more_often_than_with():
    for p, q in pairs(seed=2):
        if np.sum(q > 0) >= 3:
            assert optimum(p, q, 3) >= optimum(p, q, 3, "independent") - EXACT


def test_lumping_the_rest_never_lowers_the_bound():
    rng = np.random.default_rng(3)
    for concentration in (0.05, 0.5):
        p = rng.dirichlet(np.full(400, concentration))
        q = p ** rng.uniform(0.5, 1.5, 400)
        q /= q.sum()
        for k in (1, 2, 4):
            whole = optimum(p, q, k)
            one, many = (optimum(*lump(p, q, 32, lumps), k) for lumps in (1, 64))
            assert whole - EXACT <= many <= one + EXACT
            assert many < whole + 0.005
    small = np.array([0.5, 0.3, 0.2])
    np.testing.assert_array_equal(lump(small, small[::-1], 3), [small, small[::-1]])


def test_lumped_laws_solve_the_same_program():
    rng = np.random.default_rng(4)
    p, q = lump(*rng.dirichlet(np.full(500, 0.1), size=2), lumps=1)
    assert 33 <= p.size <= 65
    assert transport(p, draft_sets(q, 2)) == pytest.approx(optimum(p, q, 2), abs=EXACT)


def test_coupled_drafts_are_accepted_as_simulated_and_never_above_the_bound():
    rng = np.random.default_rng(5)
    draws = 40_000
    for p, q in pairs(repeats=1, seed=5):
        for k in (1, 2, 3):
            if k > np.sum(q > 0):
                continue
            exact = coupled_acceptance(p, q, k)
            assert exact <= optimum(p, q, k) + EXACT
            with np.errstate(divide="ignore"):
                gumbel = rng.gumbel(size=(draws, VOCABULARY))
                target = np.argmax(np.log(p) + gumbel, axis=1)
                drafted = np.argsort(-(np.log(q) + gumbel), axis=1)[:, :k]
            simulated = np.mean(np.any(drafted == target[:, None], axis=1))
            assert simulated == pytest.approx(exact, abs=5 * 0.5 / np.sqrt(draws))


def test_one_coupled_draft_has_the_acceptance_in_closed_form():
    for p, q in pairs():
        both = np.flatnonzero((p > 0) & (q > 0))
        worst = [np.maximum(p / p[y], q / q[y]).sum() for y in both]
        assert coupled_acceptance(p, q, 1) == pytest.approx(np.sum(1 / np.array(worst)), abs=EXACT)


def best_chain(p, q, drafted):
    """The most a lossless rule for chains accepts, over all rules: what to stop at, what to emit.

    Variables are the probabilities of a draft, its stop and the token that follows; whatever is
    emitted goes on by the target's law and must have it.
    """
    vocabulary = p.shape[1]

    def context(tokens):
        number = 0
        for token in tokens:
            number = vocabulary * number + token + 1
        return number

    def joint(law, tokens, given=0):
        each = [law[context(tokens[:at]), tokens[at]] for at in range(given, len(tokens))]
        return np.prod(each)

    tokens = range(vocabulary)
    drafts = list(itertools.product(tokens, repeat=drafted))
    sequences = list(itertools.product(tokens, repeat=drafted + 1))
    emitted = [(x, n, y) for x in drafts for n in range(drafted + 1) for y in tokens]
    same_draft = [[float(x == draft) for x, _, _ in emitted] for draft in drafts]
    same_law = [
        [
            joint(p, sequence, n + 1) if sequence[: n + 1] == (*x[:n], y) else 0.0
            for x, n, y in emitted
        ]
        for sequence in sequences
    ]
    solved = linprog(
        [-n for _, n, _ in emitted],
        A_eq=same_draft + same_law,
        b_eq=[joint(q, x) for x in drafts] + [joint(p, sequence) for sequence in sequences],
    )
    return -solved.fun


@pytest.mark.parametrize("vocabulary, drafted", [(2, 1), (3, 2), (2, 3)])
def test_no_rule_for_chains_accepts_more_than_the_optimum(vocabulary, drafted):
    rng = np.random.default_rng(6)
    contexts = sum(vocabulary**level for level in range(drafted + 1))
    for kind in ("random", "sparse", "disjoint", "equal"):
        p, q = KINDS[kind](rng, (contexts, vocabulary))
        best = best_chain(p, q, drafted)
        assert chain_optimum(p, q, drafted) == pytest.approx(best, abs=1e-7)


@pytest.mark.parametrize(
    "fault, p, q, k, draws",
    [
        ("at least one", [0.5, 0.5], [0.5, 0.5], 0, "sample"),
        ("can draw 1 distinct", [0.5, 0.5], [1.0, 0.0], 2, "sample"),
        ("can draw 1 distinct", [0.5, 0.5], [1.0, 0.0], 2, "top_k"),
        ("p is no law", [0.5, 0.6], [0.5, 0.5], 1, "sample"),
        ("q is no law", [0.5, 0.5], [1.5, -0.5], 1, "sample"),
        ("p is no law", [np.nan, 0.5], [0.5, 0.5], 1, "sample"),
        # With shapes checked, as in this suite, the shape's own error comes first.
        ("same vocabulary|typechecking", [0.5, 0.5], [1.0], 1, "sample"),
        ("not known", [0.5, 0.5], [0.5, 0.5], 1, "lucky"),
    ],
)
def test_what_is_no_law_or_no_draft_is_refused(fault, p, q, k, draws):
    with pytest.raises((ValueError, TypeError), match=fault):
        optimum(np.array(p), np.array(q), k, draws)


def test_more_than_can_be_enumerated_is_refused():
    with pytest.raises(ValueError, match="too many"):
        smallest_cut(np.full(40, 1 / 40), {frozenset({0}): 1.0})
    laws = np.full((4, 3), 1 / 3)
    with pytest.raises(ValueError, match="too few"):
        chain_optimum(laws, laws, 3)
    with pytest.raises(ValueError, match="at least one"):
        chain_optimum(laws, laws, 0)

"""The best acceptance that a lossless rule can reach, whatever the rule.

At one node ``k`` drafted tokens are known and the emitted token must have the target's law. The
most often that it can be one of the drafts is the value of an optimal transport program from sets
of drafts to tokens (Sun et al., "SpecTr", arXiv 2310.15141). Its dual picks a set H of tokens, and
the value is 1 + min over H of P(H) - Pr(all k drafts lie in H) (Hu et al., "Towards optimal
multi-draft speculative decoding", arXiv 2502.18779), which large vocabularies allow too.

Everything is NumPy in float64. ``draws`` names how the drafts are drawn, as `Rule.draws` does:

- "sample": without replacement, from the draft law. Coupled drafts have the same law of sets.
- "top_k": the k most likely tokens, the lowest id among equals.
- "top_and_one": the k - 1 most likely tokens, and one sample of the others.
- "independent": with replacement; no rule here asks for it.
"""

from collections import defaultdict
from collections.abc import Mapping

import numpy as np
from jaxtyping import Float
from scipy.optimize import linprog
from scipy.sparse import csr_array

SETS_OF_DRAWS = ("sample", "top_k", "top_and_one", "independent")
MOST_TOKENS = 20
ROUNDING = 1e-6
# Trapezoids of this width in log time integrate a race of exponentials to about 1e-13.
STEP = 0.125
NEGLIGIBLE = 1e-16


def optimum(
    p: Float[np.ndarray, " V"], q: Float[np.ndarray, " V"], k: int, draws: str = "sample"
) -> float:
    """Largest probability that the emitted token is among ``k`` drafts, for any lossless rule.

    Drafts with chance in them are solved by the dual, over the sets H of tokens that are least
    likely under ``p`` for their ``q``. Raises ValueError for a ``k`` below 1 or beyond what ``q``
    can draw, and for laws that are none.
    """
    p, q = _checked(p, q, k, draws)
    if draws == "top_k":
        return float(p[_most_likely(q, k)].sum())
    if draws == "top_and_one":
        kept = _most_likely(q, k - 1)
        rest = _without(q, kept)
        return float(p[kept].sum() + np.minimum(p, rest)[rest > 0].sum())
    order = np.argsort(_ratio(p, q), kind="stable")
    p, q = p[order], q[order]
    inside = np.cumsum(q) ** k if draws == "independent" else _all_inside(q, k)
    return float(1 + min(0.0, np.min(np.cumsum(p) - inside)))


def draft_sets(
    q: Float[np.ndarray, " V"], k: int, draws: str = "sample"
) -> dict[frozenset[int], float]:
    """The sets of tokens that ``k`` drafts can be, with their probabilities; for small V."""
    _, q = _checked(q, q, k, draws)
    if draws in ("top_k", "top_and_one"):
        fixed = frozenset(_most_likely(q, k if draws == "top_k" else k - 1).tolist())
        if draws == "top_k":
            return {fixed: 1.0}
        rest = _without(q, sorted(fixed))
        return {fixed | {int(x)}: float(rest[x]) for x in np.flatnonzero(rest)}
    sets = {frozenset[int](): 1.0}
    for _ in range(k):
        grown = defaultdict[frozenset[int], float](float)
        for taken, weight in sets.items():
            left = q if draws == "independent" else _without(q, sorted(taken))
            for token in np.flatnonzero(left):
                grown[taken | {int(token)}] += weight * float(left[token])
        sets = dict(grown)
    return sets


def transport(p: Float[np.ndarray, " V"], sets: Mapping[frozenset[int], float]) -> float:
    """Solves the linear program itself: mass from sets of drafts to tokens that they contain."""
    p = _law("p", p)
    pairs = [(row, token) for row, drafts in enumerate(sets) for token in sorted(drafts)]
    rows = np.array([(row, len(sets) + token) for row, token in pairs]).T
    columns = np.arange(len(pairs))
    flows = csr_array(
        (np.ones(2 * len(pairs)), (rows.ravel(), np.tile(columns, 2))),
        shape=(len(sets) + p.size, len(pairs)),
    )
    solved = linprog(
        -np.ones(len(pairs)),
        A_ub=flows,
        b_ub=np.concatenate([list(sets.values()), p]),
        method="highs",
        options={"primal_feasibility_tolerance": 1e-10, "dual_feasibility_tolerance": 1e-10},
    )
    if solved.status != 0:
        raise RuntimeError(f"the transport program was not solved: {solved.message}")
    return float(-solved.fun)


def smallest_cut(p: Float[np.ndarray, " V"], sets: Mapping[frozenset[int], float]) -> float:
    """The dual by trying every set H of tokens; at most 20 of them."""
    p = _law("p", p)
    if p.size > MOST_TOKENS:
        raise ValueError(f"2**{p.size} sets of tokens are too many: use optimum() instead")
    inside, mass = np.zeros(2**p.size), np.zeros(2**p.size)
    for drafts, weight in sets.items():
        inside[sum(1 << token for token in drafts)] += weight
    for token in range(p.size):
        # The axis of length 2 says whether H holds the token.
        halves = inside.reshape(-1, 2, 1 << token)
        halves[:, 1] += halves[:, 0]
        mass.reshape(-1, 2, 1 << token)[:, 1] += p[token]
    return float(1 + np.min(mass - inside))


def lump(
    p: Float[np.ndarray, " V"], q: Float[np.ndarray, " V"], kept: int = 32, lumps: int = 256
) -> tuple[Float[np.ndarray, " _"], Float[np.ndarray, " _"]]:
    """Both laws with few tokens: the ``kept`` most likely of each, and ``lumps`` others or so.

    A lump holds tokens with about the same p / q. `optimum` of the lumped laws is no lower than
    that of the laws themselves: it tries fewer sets H, and of a lump inside H at most one token is
    drawn, so that all drafts are inside no more often.
    """
    p, q = _checked(p, q, 1, "sample")
    ids = np.union1d(_most_likely(p, kept), _most_likely(q, kept))
    others = np.setdiff1d(np.arange(p.size), ids)
    others = others[np.argsort(_ratio(p, q)[others], kind="stable")]
    mass = np.cumsum(p[others] + q[others])
    if others.size == 0 or mass[-1] == 0:
        return p[ids], q[ids]
    _, lump_of = np.unique((lumps * mass / mass[-1]).astype(np.int64), return_inverse=True)

    def lumped(law):
        return np.append(law[ids], np.bincount(lump_of, law[others]))

    return lumped(p), lumped(q)


def coupled_acceptance(p: Float[np.ndarray, " V"], q: Float[np.ndarray, " V"], k: int) -> float:
    """Probability that argmax(log p + g) is among the k largest of log q + g; for small V.

    With g = -log E of standard exponentials, the target's token y wins at a time m of its own, and
    it is missed where k others come in the draft's race before it, which they do independently.
    For k = 1 it is the sum over y of 1 / sum_x max(p_x / p_y, q_x / q_y) of Daliri, Musco and
    Suresh, arXiv 2408.07978.
    """
    p, q = _checked(p, q, k, "sample")
    drawn = np.flatnonzero((p > 0) & (q > 0))
    rates = np.maximum(p[drawn, None] / q[drawn, None] * q - p, 0.0)
    rates[np.arange(drawn.size), drawn] = 0.0
    missed = _first_come(rates, np.ones_like(rates), k)[:, -1]
    return float(p[drawn] @ (1 - missed))


def chain_optimum(p: Float[np.ndarray, "C V"], q: Float[np.ndarray, "C V"], drafted: int) -> float:
    """Largest expected number of accepted tokens of a chain of ``drafted`` drawn from ``q``.

    Contexts are numbered as in `specjax.testing.exact`. A sequence x can be accepted as often as
    its prefix is and the target goes on with its last token, and no oftener than it is drafted;
    block verification attains both (Sun et al., arXiv 2403.10444).
    """
    if drafted < 1:
        raise ValueError(f"a chain of {drafted} drafts accepts nothing: draft at least one")
    contexts, vocabulary = np.shape(p)
    if contexts < sum(vocabulary**level for level in range(drafted)):
        raise ValueError(f"the laws of {contexts} contexts are too few for {drafted} drafts")
    drawn = accepted = np.ones(1)
    first, expected = 0, 0.0
    for _ in range(drafted):
        here = slice(first, first + drawn.size)
        first += drawn.size
        drawn = (drawn[:, None] * q[here]).ravel()
        accepted = np.minimum((accepted[:, None] * p[here]).ravel(), drawn)
        expected += float(accepted.sum())
    return expected


def _all_inside(q, k):
    """Probability that ``k`` drafts without replacement are among the first m tokens, m = 1..V.

    Such drafts are the first k arrivals of exponentials with rates q: all are inside where the
    first of the others comes later.
    """
    outside = np.append(np.cumsum(q[::-1])[::-1][1:], 0.0)
    return np.where(outside > 0, _first_come(q, outside, k), 1.0)


def _first_come(rates, rival, k):
    """For each m: that k of the first m exponentials, at least, come before one of rate rival[m].

    ``rates`` and ``rival`` are [*R, V]; rivals of rate 0 never come, and are left out.
    """
    racing = rival[rival > 0]
    if racing.size == 0:
        return np.ones_like(rates)
    begin, end = np.log(NEGLIGIBLE / racing.max()), np.log(-np.log(NEGLIGIBLE) / racing.min())
    time = np.exp(np.arange(begin, end + STEP, STEP))
    arrived = np.zeros((k, *rates.shape[:-1], time.size))
    arrived[0] = 1.0
    results = np.ones_like(rates)
    for m in range(rates.shape[-1]):
        stays = np.exp(-rates[..., m, None] * time)
        grown = arrived * stays
        grown[1:] += arrived[:-1] * -np.expm1(-rates[..., m, None] * time)
        arrived = grown
        rate = rival[..., m, None] * time
        density = rate * np.exp(-rate)
        results[..., m] = STEP * np.sum(density * (1 - arrived.sum(0)), axis=-1)
    return results


def _checked(p, q, k, draws):
    p, q = _law("p", p), _law("q", q)
    if p.size != q.size:
        raise ValueError(f"p has {p.size} tokens and q {q.size}: give both the same vocabulary")
    if draws not in SETS_OF_DRAWS:
        raise ValueError(f"draws {draws!r} is not known; choose from {', '.join(SETS_OF_DRAWS)}")
    if k < 1:
        raise ValueError(f"k is {k}: draft at least one token")
    possible = int(np.sum(q > 0))
    if draws != "independent" and k > possible:
        raise ValueError(f"k is {k}, but q can draw {possible} distinct tokens: lower k")
    return p, q


def _law(name, law):
    law = np.asarray(law, np.float64)
    if law.ndim != 1 or not np.all(law >= 0) or abs(law.sum() - 1) > ROUNDING:
        raise ValueError(f"{name} is no law: give one vector of probabilities that sum to 1")
    return law / law.sum()


def _most_likely(law, count):
    return np.argsort(-law, kind="stable")[:count]


def _without(law, taken):
    """The law of one more token when those ``taken`` are not to be drawn again."""
    left = law.copy()
    left[taken] = 0.0
    return left / left.sum()


def _ratio(p, q):
    """p / q, infinite where q is 0: such tokens are never drafted and stand last."""
    with np.errstate(over="ignore"):
        return np.divide(p, q, out=np.full_like(p, np.inf), where=q > 0)

"""Faults that a proof of losslessness must find: one wrong line each, and everything else right.

A check that never failed proves nothing. Each mutant names the check that finds it and a weaker
one that it passes: why the weaker one alone would not do.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from specjax.accept import Block, Coupled, Matching, Recursive, Rejection, Traversal
from specjax.recompute import Recompute
from specjax.testing import faulty_drafters as drafters
from specjax.testing import faulty_rounds as rounds
from specjax.testing import faulty_rules as rules
from specjax.testing import faulty_targets as targets
from specjax.testing.drafters import TreeDrafter
from specjax.testing.faulty_drafters import FaultyDrafter
from specjax.testing.faulty_rules import FaultyRule
from specjax.testing.hunt import CHAIN, Mutant
from specjax.testing.hunt import CHECKS as CHECKS
from specjax.testing.hunt import ROWS_OF_BUDGET as ROWS_OF_BUDGET
from specjax.testing.hunt import run_checks as run_checks
from specjax.testing.tables import second_order

SIBLINGS = (-1, 0, 0)
TREE = (-1, 0, 0, 1, 1, 2, 2)
FORK = (-1, 0, 0, 1, 2)
PADDED = (-1, 0, -1, 1)


def _in_exact_law(fault: str, rule: Any, **options: Any) -> Mutant:
    return Mutant(fault, "exact", "identity", rule, **options)


def _in_sampled_law(fault: str, rule: Any, **options: Any) -> Mutant:
    return Mutant(fault, "sampled", "exact", rule, **options)


_PENALISED = (("frequency_penalty", 1.5),)

MUTANTS: Mapping[str, Mutant] = MappingProxyType(
    {
        "residual is p": _in_exact_law(
            "after a rejection the next token is drawn from the target's law",
            FaultyRule(Rejection(), follows=rules.target_for_residual),
        ),
        "residual softmaxed": _in_exact_law(
            "the residual's mass is put through a softmax",
            FaultyRule(Rejection(), follows=rules.softmaxed_residual),
        ),
        "residual unscaled": _in_exact_law(
            "the residual of a block is [P - Q]+, not [p P - Q]+",
            FaultyRule(Block(), follows=rules.unscaled_residual),
        ),
        "bonus of the row before": _in_exact_law(
            "the next token comes from the law after the last node's parent",
            FaultyRule(Rejection(), follows=rules.row_before),
        ),
        "block accepts by prefix": _in_exact_law(
            "each node of a block is accepted with p_i, not with h_i",
            FaultyRule(Block(), stops=rules.stops_by_prefix),
        ),
        "siblings reversed": _in_exact_law(
            "siblings are verified against the order in which they were drawn",
            FaultyRule(Recursive(), stops=rules.last_sibling_first),
            drafter=TreeDrafter(SIBLINGS),
        ),
        "padding below the root": _in_exact_law(
            "a padding node is taken for a child of the root",
            FaultyRule(Recursive(), stops=rules.padding_below_root),
            drafter=TreeDrafter(TREE, ragged=True),
            exact_shape=PADDED,
        ),
        "padding in a chain": _in_exact_law(
            "the padding of a chain is taken for drafted tokens",
            FaultyRule(Rejection(), stops=rules.padding_in_chain),
            drafter=TreeDrafter(CHAIN, ragged=True),
            exact_shape=(-1, 0, -1, -1),
        ),
        "impossible node drawn": _in_exact_law(
            "a node of probability 0 can be drawn",
            FaultyRule(Rejection(), stops=rules.impossible_stops),
        ),
        "argmax as sample": _in_sampled_law(
            "the most likely token is drafted and said to be drawn from the softmax",
            Rejection(),
            drafter=FaultyDrafter(TreeDrafter(CHAIN), drafters.argmax_as_sample),
        ),
        "law before temperature": _in_sampled_law(
            "the draft's law is reported without the temperature",
            Block(),
            drafter=FaultyDrafter(TreeDrafter(CHAIN), drafters.law_before_temperature),
            settings=(("temperature", 0.5),),
        ),
        "top-p before temperature": _in_sampled_law(
            "top-p comes before temperature in the draft's law, and after it in the target's",
            Block(),
            drafter=FaultyDrafter(TreeDrafter(CHAIN), drafters.top_p_before_temperature),
            settings=(("temperature", 0.5), ("top_p", 0.7)),
        ),
        "one vector a level": _in_sampled_law(
            "the children of sibling parents are drawn with one vector of noise",
            Traversal(),
            drafter=FaultyDrafter(TreeDrafter(FORK), drafters.one_vector_a_level),
            table="zeros",
            times_rows=4,
        ),
        "reranked": _in_sampled_law(
            "a drawn child is dropped because others score higher",
            Recursive(),
            drafter=FaultyDrafter(TreeDrafter(SIBLINGS), drafters.best_of_more),
        ),
        "noise by own position": _in_sampled_law(
            "the noise of a draft is keyed by the token's own position",
            Block(),
            drafter=FaultyDrafter(TreeDrafter(CHAIN), drafters.noise_by_own_position),
        ),
        "dropped as unlikely": _in_sampled_law(
            "a drafted token is dropped because of its own probability",
            Block(),
            drafter=FaultyDrafter(TreeDrafter(CHAIN), changes=drafters.drops_unlikely),
        ),
        "drafted by token noise": _in_sampled_law(
            "drafts come from the noise that the residual is drawn with",
            Matching(draws="coupled"),
        ),
        "accepted by draft noise": _in_sampled_law(
            "draft and acceptance share a key",
            FaultyRule(Rejection(), decides=rules.accepts_by_draft_noise),
        ),
        "accepted by row": _in_sampled_law(
            "the acceptance noise is the same in every round",
            FaultyRule(Rejection(), decides=rules.accepts_by_row),
        ),
        "rejected drafts counted": _in_sampled_law(
            "the penalties count rejected drafts as output",
            Rejection(),
            drafter=FaultyDrafter(TreeDrafter(CHAIN)),
            step=rounds.rejected_drafts_counted,
            settings=_PENALISED,
        ),
        "siblings counted": _in_sampled_law(
            "a node's siblings are part of its history",
            Recursive(),
            drafter=TreeDrafter(SIBLINGS),
            target=targets.SiblingsPenalised(Recompute(second_order), _PENALISED[0][1]),
            settings=_PENALISED,
        ),
        "coupled with fresh noise": Mutant(
            "the token after the path is drawn anew, not with its position's noise",
            "sampled",
            "invariant",
            FaultyRule(Coupled(), decides=rules.fresh_noise),
        ),
        "coupled by round": Mutant(
            "coupled noise is keyed by the round: lossless, but no longer plain decoding's tokens",
            "identity",
            "sampled",
            FaultyRule(Coupled(), decides=rules.token_noise_by_round),
        ),
        "stale slots visible": Mutant(
            "slots that a wider block has left behind stay visible",
            "identity",
            "invariant",
            Coupled(),
            drafter=FaultyDrafter(
                TreeDrafter(CHAIN, ragged=True), changes=drafters.every_second_round
            ),
            target=targets.SumOfSlots(stale=True),
        ),
        "batch in lockstep": Mutant(
            "the cache of every row advances by the batch's minimum",
            "invariant",
            "exact",
            Rejection(),
            target=targets.Lockstep(Recompute(second_order)),
        ),
        "bonus after the end": Mutant(
            "what a round emits after the end of a row stays",
            "invariant",
            "exact",
            Rejection(),
            step=rounds.bonus_after_end,
            end=2,
        ),
    }
)

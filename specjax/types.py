"""The nouns of speculative decoding and the protocols that tie them together.

Letters, used in every shape of the package:

``B`` rows · ``L`` token buffer · ``T`` tokens of one call · ``S`` cache slots · ``N`` draft nodes
with the root · ``D`` deepest path + 1 · ``V`` vocabulary · ``E`` feature width · ``F`` tapped
layers · ``Y`` layers · ``H`` query heads · ``K`` KV heads · ``G`` query heads per KV head · ``W``
head width · ``M`` parents expanded at once · ``Z`` end-of-sequence ids a row.

Carried state is a frozen ``flax.struct`` dataclass of arrays; configuration is a frozen, hashable
dataclass and static under ``jit``. They never share a class.
"""

import typing
from typing import Any, Protocol, Self

from flax import struct
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int, Key

ROOT = 0
NO_PARENT = -1
NO_TOKEN = -1

RUNNING, STOPPED, LENGTH = 0, 1, 2
FINISH_REASONS = (None, "stop", "length")


@typing.no_type_check
@struct.dataclass
class Context:
    """The committed tokens of each row: prompt and output, the root last."""

    tokens: Int[Array, "B L"]
    length: Int[Array, " B"]


@typing.no_type_check
@struct.dataclass
class Draft:
    """A tree of drafted tokens; node 0 is the root, the last committed token.

    A non-root node whose parent is -1 is padding: no path reaches it. Parents come before their
    children and siblings are distinct. ``log_q[n]`` is the law from which the children of node
    ``n`` were drawn; None means that every node is a point mass.
    """

    tokens: Int[Array, "*B N"]
    parents: Int[Array, "*B N"]
    log_q: Float[Array, "*B N V"] | None = None


@typing.no_type_check
@struct.dataclass
class AcceptResult:
    """What a rule decided: nodes from the root down, how many drafts lie on it, what follows.

    ``path[i]`` for ``i > num_accepted`` repeats the last accepted node.
    """

    path: Int[Array, "*B D"]
    num_accepted: Int[Array, "*B"]
    next_token: Int[Array, "*B"]


@typing.no_type_check
@struct.dataclass
class Feedback:
    """What a round committed, for the drafter: ``count`` tokens, 0 for a row that is done.

    ``tokens[i]`` is the token that follows node ``path[i]``. ``features`` are those of the path,
    ``logits`` those of all nodes, each present only where the drafter asks for it.
    """

    tokens: Int[Array, "B D"]
    count: Int[Array, " B"]
    path: Int[Array, "B D"]
    features: Float[Array, "B D F E"] | None = None
    logits: Float[Array, "B N V"] | None = None


@typing.no_type_check
@struct.dataclass
class TargetOutput:
    """Next-token logits of each token of a call, the cache written, the tapped residual streams."""

    logits: Float[Array, "B T V"]
    cache: "Cache"
    features: Float[Array, "B T F E"] | None = None


@typing.no_type_check
@struct.dataclass
class Stats:
    """Counts over rounds, a row each; the first token, drawn by prefill, belongs to no round.

    ``drafted[d]`` and ``accepted[d]`` count the rounds in which a row had, or accepted, a draft at
    depth ``d + 1``. ``truncated`` counts tokens decoded beyond an end, in none of the others.
    """

    rounds: Int[Array, " B"]
    emitted: Int[Array, " B"]
    drafted: Int[Array, "B D-1"]
    accepted: Int[Array, "B D-1"]
    draft_forwards: Int[Array, " B"]
    truncated: Int[Array, " B"]


@typing.no_type_check
@struct.dataclass
class Request:
    """What is asked of each row; constant while the loop runs.

    ``limit`` is the context length at which a row ends, ``eos_ids`` are padded with -1. Of a draft
    a row takes at most ``max_drafted`` levels: 0 decodes plainly, None is no limit. ``logprobs``
    asks for `Scores` with so many alternatives, None for none.
    """

    prompt_length: Int[Array, " B"]
    limit: Int[Array, " B"]
    eos_ids: Int[Array, "B Z"]
    keys: Key[Array, " B"]
    sampling: Any
    max_drafted: Int[Array, " B"] | None = None
    logprobs: int | None = struct.field(pytree_node=False, default=None)


@typing.no_type_check
@struct.dataclass
class Scores:
    """What target and rule thought of each token, at its place in the context.

    Attributes:
        raw: log-probability under the target's own law, before any sampling parameter.
        processed: the same under the law that was sampled.
        top_ids: the most likely ids under the target's own law, most likely first.
        top: their log-probabilities.
        acceptance: probability with which the rule, given the whole draft, went on to a draft of
            this token; NaN where none was drafted. Rules that follow the target's noise leave
            nothing to chance: 0 or 1.
    """

    raw: Float[Array, "B L"]
    processed: Float[Array, "B L"]
    top_ids: Int[Array, "B L alternatives"]
    top: Float[Array, "B L alternatives"]
    acceptance: Float[Array, "B L"]


@typing.no_type_check
@struct.dataclass
class SpecState:
    """Everything that the loop carries. ``finish`` is RUNNING, STOPPED or LENGTH, a row each.

    ``seen`` is what the sampling parameters remember of the context (`specjax.history.Seen`).
    """

    context: Context
    cache: "Cache"
    draft_state: Any
    finish: Int[Array, " B"]
    stats: Stats
    seen: Any = None
    scores: Scores | None = None

    @property
    def done(self) -> Bool[Array, " B"]:
        return self.finish != RUNNING


@typing.no_type_check
@struct.dataclass
class Trace:
    """What single rounds did: tokens emitted and depth drafted of each row, and how many ran."""

    emitted: Int[Array, "R B"]
    drafted: Int[Array, "R B"]
    rounds: Int[Array, ""]


@typing.no_type_check
@struct.dataclass
class Generation:
    """The result of `specjax.generate`: prompt and output of each row, and how it ended."""

    tokens: Int[Array, "B L"]
    length: Int[Array, " B"]
    prompt_length: Int[Array, " B"]
    finish: Int[Array, " B"]
    stats: Stats
    scores: Scores | None = None


class Cache(Protocol):
    """The KV of committed tokens. Slots at or beyond ``length`` are never visible."""

    length: Int[Array, " B"]

    def commit(self, path: Int[Array, "B D"] | None, count: Int[Array, " B"]) -> Self:
        """Keeps the first ``count`` nodes of ``path`` of the block just written; None: a chain."""
        ...

    def take(self, rows: Int[Array, " R"]) -> Self:
        """The cache of other rows: row ``i`` goes on from what row ``rows[i]`` holds."""
        ...

    def rollback(self, count: Int[ArrayLike, "*B"]) -> Self:
        """Drops the last ``count`` tokens of each row, at most all of them."""
        ...


class Target(Protocol):
    """A language model whose cache only the loop commits; a hashable value, static under jit."""

    def init_cache(self, batch: int, slots: int) -> Cache:
        """An empty cache with room for ``slots`` tokens a row."""
        ...

    def __call__(
        self,
        params: Any,
        tokens: Int[Array, "B T"],
        parents: Int[Array, "B T"] | None,
        cache: Any,
        *,
        logits_at: Int[Array, " B"] | None = None,
        taps: tuple[int, ...] = (),
    ) -> TargetOutput:
        """Forwards one block of tokens that follows the committed ones.

        Writes their KV at ``cache.length`` and leaves ``length`` alone. ``parents=None`` is a
        chain. ``logits_at`` asks for the logits of one token a row only ([B, 1, V]); ``taps``
        names the layers whose output residual stream is handed out.
        """
        ...


class Choose(Protocol):
    """Draws the children of ``M`` nodes the way the rule wants, and says from which law."""

    def __call__(
        self,
        logits: Float[Array, "B M V"],
        node: Int[Array, "B M"],
        path: Int[Array, "B M D"],
        width: int = 1,
    ) -> tuple[
        Int[Array, "B M {width}"], Float[Array, "B M {width}"], Float[Array, "B M V"] | None
    ]:
        """Returns (tokens, scores, log_q) for parents ``node`` with drafted ancestors ``path``."""
        ...


class Drafter(Protocol):
    """Proposes trees of tokens; a hashable value, static under jit.

    ``widths`` are the verify widths that a round may be narrowed to, ascending, ``num_nodes``
    last: a drafter that may find nothing offers 1. ``forwards`` counts the draft model's forwards
    in a round. ``needs`` lists what `Feedback` must carry ("features", "logits"). A drafter that
    reorders or drops drawn nodes by their score says ``reranks``.
    """

    @property
    def num_nodes(self) -> int: ...
    @property
    def max_depth(self) -> int: ...
    @property
    def widths(self) -> tuple[int, ...]: ...
    @property
    def is_chain(self) -> bool: ...
    @property
    def has_law(self) -> bool: ...
    @property
    def taps(self) -> tuple[int, ...]: ...
    @property
    def needs(self) -> tuple[str, ...]: ...
    @property
    def reranks(self) -> bool: ...
    @property
    def forwards(self) -> int: ...

    def init(
        self, params: Any, prompt: Context, features: Float[Array, "B L F E"] | None, slots: int
    ) -> Any:
        """State after prefill: ``prompt`` holds the prompt and the first token drawn."""
        ...

    def draft(self, params: Any, state: Any, context: Context, choose: Choose) -> tuple[Draft, Any]:
        """Drafts below the last committed token of each row."""
        ...

    def update(self, params: Any, state: Any, feedback: Feedback) -> Any:
        """Takes in what the round committed."""
        ...


class Rule(Protocol):
    """Decides for one row how much of a draft stands; a hashable value, static under jit.

    ``draws`` tells how drafters must draw for it: "sample" (from their law), "top_k" (the most
    likely), "top_and_one" (those, and as the last child one drawn from the rest) or "coupled"
    (with the target's own noise). ``trees`` says that branching drafts are allowed, ``needs_law``
    that it reads ``Draft.log_q``, ``lossless`` that the output's law is the target's.
    """

    @property
    def draws(self) -> str: ...
    @property
    def lossless(self) -> bool: ...
    @property
    def trees(self) -> bool: ...
    @property
    def greedy_only(self) -> bool: ...

    def __call__(self, draft: Draft, log_p: Float[Array, "N V"], noise: Any) -> AcceptResult: ...

"""The compiled programs of one combination of target, drafter and rule.

A program is named by its rows, buffer, drafter and rule; nothing else recompiles: not prompt
lengths, budgets, seeds, sampling parameters or new parameters of the same shapes.
"""

import functools
import logging
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import Mesh
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Int

from specjax import loop
from specjax.accept import rule_name
from specjax.choose import WAYS
from specjax.prefill import Prefilled, prefill
from specjax.sharding import check_mesh, parameter_formats, replicated, row_shardings
from specjax.types import STOPPED, Drafter, Request, Rule, SpecState, Target, Trace

log = logging.getLogger("specjax")


@dataclass(frozen=True)
class Programs:
    """`start` and `advance`, jitted, sharded over ``mesh`` if there is one, the state donated.

    ``chunk`` is the prefill's, ``record`` the number of rounds that `advance` tells singly.
    """

    target: Target
    drafter: Drafter
    rule: Rule
    chunk: int = 64
    record: int = 0
    mesh: Mesh | None = None

    def __post_init__(self):
        check_compatible(self.drafter, self.rule)
        if self.mesh is not None:
            check_mesh(self.mesh)

    def vocabulary(self, params: Any, rows: int, buffer: int) -> int:
        """How many logits the target gives: its ``vocab_size``, or from shapes, without compiling.

        Traced once for parameters of the same shapes.
        """
        size = getattr(self.target, "vocab_size", None)
        if size is not None:
            return size
        slots = loop.slots_needed(buffer, self.drafter.num_nodes, self.chunk)
        shapes = _Frozen(jax.tree.map(jax.typeof, params))
        return _vocabulary(self.target, rows, self.chunk, slots, shapes)

    def start(
        self,
        params: Any,
        drafter_params: Any,
        request: Request,
        tokens: Int[Array, "P L"],
        prompt_of_row: Int[Array, " B"] | None = None,
    ) -> SpecState:
        """`specjax.loop.start` as two programs: the prefill, which all drafters and rules share,
        and the first token.
        """
        slots = loop.slots_needed(tokens.shape[1], self.drafter.num_nodes, self.chunk)
        prompt = loop.prompts_of(tokens, request, prompt_of_row)
        forward = _Prefill(self.target, self.chunk, slots, self.drafter.taps)
        prefilled = _call(forward, self.mesh, (), params, prompt)
        begin = _Begin(self.drafter, self.rule, slots)
        donate = (3,) if prompt_of_row is None else ()
        outcome = prefilled._replace(cache=None)
        rows = (request, tokens, prefilled.cache, outcome, prompt_of_row)
        return _call(begin, self.mesh, donate, drafter_params, *rows)

    def advance(
        self,
        params: Any,
        drafter_params: Any,
        request: Request,
        state: SpecState,
        rounds: Int[ArrayLike, ""],
        halt: Bool[ArrayLike, " B"] | None = None,
    ) -> tuple[SpecState, Trace]:
        """At most ``rounds`` rounds as one program (`specjax.loop.run`); ``state`` is donated.

        Rows in ``halt`` end before the first of them: the host found a stop string there.
        """
        rounds = jnp.asarray(rounds, jnp.int32)
        if halt is None:
            halt = np.zeros(request.limit.shape, bool)
        return self.advance_program(params, drafter_params, request, state)(
            params, drafter_params, request, state, rounds, halt
        )

    def advance_program(self, params, drafter_params, request, state):
        """The jitted function behind `advance`; arguments may be `jax.ShapeDtypeStruct`s."""
        args = (params, drafter_params, request, state)
        shardings = self._shardings(args)
        return _advance(self, shardings)

    def place(self, axes: Any, params: Any) -> Any:
        """Puts parameters where their logical axes say, each device's part laid out for it."""
        if self.mesh is None:
            return params
        return jax.device_put(params, parameter_formats(self.mesh, axes, params))

    def place_all(self, params: Any, drafter_params: Any) -> tuple[Any, Any]:
        """Places the target's and the drafter's parameters, unless they lie on the mesh already.

        Those of a model that does not name their axes are replicated.
        """
        placed = self._place_for(self.target, params)
        if drafter_params is params:
            return placed, placed
        return placed, self._place_for(getattr(self.drafter, "model", None), drafter_params)

    def _place_for(self, model, params):
        if self.mesh is None or all(_lies_on(self.mesh, leaf) for leaf in jax.tree.leaves(params)):
            return params
        if hasattr(model, "parameter_axes"):
            return self.place(model.parameter_axes(), params)
        return jax.device_put(params, replicated(self.mesh))

    def _shardings(self, args):
        """Shardings of (params, drafter_params, request, rows), hashable, or None."""
        if self.mesh is None:
            return None
        params, drafter_params, *rest = args
        placed = (
            _own_shardings(self.mesh, params),
            _own_shardings(self.mesh, drafter_params),
            *(row_shardings(self.mesh, part) for part in rest),
        )
        return _Frozen(placed)


def check_compatible(drafter: Drafter, rule: Rule) -> None:
    """Refuses a drafter that a rule cannot verify without loss, naming the reason."""
    name = rule_name(rule)
    if rule.draws not in WAYS:
        raise ValueError(f"rule '{name}' draws by {rule.draws!r}; known: {', '.join(WAYS)}")
    if not drafter.is_chain and not rule.trees:
        raise ValueError(f"rule '{name}' verifies chains only, and this drafter drafts trees")
    if drafter.reranks and rule.draws in ("sample", "top_and_one"):
        raise ValueError(
            f"rule '{name}' needs every drawn token, and this drafter drops some by their score, "
            "which would bias the output: use the rule 'coupled' or 'matching'"
        )


class _Frozen:
    """A pytree of shardings as a hashable static value."""

    def __init__(self, tree):
        leaves, self.structure = jax.tree.flatten(tree)
        self.leaves = tuple(leaves)

    @property
    def tree(self):
        return jax.tree.unflatten(self.structure, self.leaves)

    def __hash__(self):
        return hash((self.leaves, self.structure))

    def __eq__(self, other):
        return (self.leaves, self.structure) == (other.leaves, other.structure)


def _lies_on(mesh, leaf):
    """Whether a parameter is on exactly the mesh's devices; inside a caller's jit it may be."""
    if isinstance(leaf, Tracer):
        return True
    placed = getattr(leaf, "sharding", None)
    return placed is not None and placed.device_set == set(mesh.devices.flat)


def _own_shardings(mesh, params):
    """Where parameters lie; inside a caller's jit that is its compiler's to decide."""

    def own(leaf):
        if isinstance(leaf, Tracer):
            return None
        if _lies_on(mesh, leaf):
            return leaf.sharding
        raise ValueError("parameters lie outside the mesh: place them with Programs.place")

    return jax.tree.map(own, params)


@dataclass(frozen=True)
class _Prefill:
    """The forward of the prompts: what it is made of, hashable."""

    target: Target
    chunk: int
    slots: int
    taps: tuple[int, ...]

    def __call__(self, params, prompt) -> Prefilled:
        rows, buffer = prompt.tokens.shape
        log.info("compiling prefill: %d rows, %d tokens", rows, buffer)
        cache = self.target.init_cache(rows, self.slots)
        return prefill(self.target, params, prompt, cache, chunk=self.chunk, taps=self.taps)


@dataclass(frozen=True)
class _Begin:
    """The first token after the prompts: what it is made of, hashable."""

    drafter: Drafter
    rule: Rule
    slots: int

    def __call__(self, drafter_params, request, tokens, cache, outcome, prompt_of_row) -> SpecState:
        _announce("first token", self, request, tokens.shape[1])
        return loop.begin(
            self.drafter,
            drafter_params,
            self.rule,
            request,
            tokens,
            outcome._replace(cache=cache),
            self.slots,
            prompt_of_row,
        )


def _call(program, mesh, donate, params, *rows):
    """Calls a program that makes rows from parameters and rows, compiled once a shape."""
    if mesh is None:
        return _jit(program, donate, None, None)(params, *rows)
    placed = _Frozen((_own_shardings(mesh, params), *(row_shardings(mesh, part) for part in rows)))
    shapes = _Frozen(jax.tree.map(jax.typeof, (params, *rows)))
    return _jit(program, donate, placed, _outcome(program, mesh, shapes))(params, *rows)


@functools.lru_cache(maxsize=256)
def _outcome(program, mesh, shapes):
    """Shardings of what a program gives for arguments of these shapes."""
    return _Frozen(row_shardings(mesh, jax.eval_shape(program, *shapes.tree)))


@functools.lru_cache(maxsize=256)
def _vocabulary(target, rows, chunk, slots, shapes) -> int:
    def forward(params):
        tokens, last = jnp.zeros((rows, chunk), jnp.int32), jnp.zeros((rows,), jnp.int32)
        return target(params, tokens, None, target.init_cache(rows, slots), logits_at=last).logits

    return jax.eval_shape(forward, shapes.tree).shape[-1]


@functools.lru_cache(maxsize=256)
def _jit(program, donate, placed, out):
    if placed is None:
        return jax.jit(program, donate_argnums=donate)
    return jax.jit(program, in_shardings=placed.tree, out_shardings=out.tree, donate_argnums=donate)


def _advance_program(programs, params, drafter_params, request, state, rounds, halt):
    _announce("decode", programs, request, state.context.tokens.shape[1])
    stopped = jnp.where(halt & ~state.done, STOPPED, state.finish)
    return loop.run(
        programs.target,
        params,
        programs.drafter,
        drafter_params,
        programs.rule,
        request,
        replace(state, finish=stopped),
        rounds,
        programs.record,
    )


def _announce(stage, programs, request, buffer):
    """Called while tracing: says which program is compiled, so that nothing does so in silence."""
    parts = [*request.sampling.parts, *([] if request.logprobs is None else ["logprobs"])]
    log.info(
        "compiling %s: %d rows, %d tokens, drafter %s, rule %s%s",
        stage,
        request.limit.shape[0],
        buffer,
        type(programs.drafter).__name__,
        type(programs.rule).__name__,
        f", with {', '.join(parts)}" if parts else "",
    )


@functools.lru_cache(maxsize=256)
def _advance(programs, shardings):
    program = functools.partial(_advance_program, programs)
    if shardings is None:
        return jax.jit(program, donate_argnums=3)
    state = shardings.tree[3]
    return jax.jit(
        program,
        in_shardings=(*shardings.tree, None, None),
        out_shardings=(state, None),
        donate_argnums=3,
    )

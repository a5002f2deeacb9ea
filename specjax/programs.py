"""The compiled programs of one combination of target, drafter and rule.

A program is named by its rows, buffer, drafter and rule; nothing else recompiles: not prompt
lengths, budgets, seeds, sampling parameters or new parameters of the same shapes.
"""

import functools
import logging
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import Mesh
from jaxtyping import Array, Int

from specjax import loop
from specjax.sharding import parameter_shardings, row_shardings
from specjax.types import Drafter, Request, Rule, SpecState, Target, Trace

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

    def start(
        self,
        params: Any,
        drafter_params: Any,
        request: Request,
        tokens: Int[Array, "P L"],
        prompt_of_row: Int[Array, " B"] | None = None,
    ) -> SpecState:
        """`specjax.loop.start` as one program."""
        args = (params, drafter_params, request, tokens, prompt_of_row)
        return _start(self, self._shardings(args), self._start_shardings(args))(*args)

    def advance(
        self,
        params: Any,
        drafter_params: Any,
        request: Request,
        state: SpecState,
        rounds: Int[Array, ""] | int,
    ) -> tuple[SpecState, Trace]:
        """At most ``rounds`` rounds as one program (`specjax.loop.run`); ``state`` is donated."""
        return self.advance_program(params, drafter_params, request, state)(
            params, drafter_params, request, state, rounds
        )

    def advance_program(self, params, drafter_params, request, state):
        """The jitted function behind `advance`; arguments may be `jax.ShapeDtypeStruct`s."""
        args = (params, drafter_params, request, state)
        shardings = self._shardings(args)
        return _advance(self, shardings)

    def place(self, axes: Any, params: Any) -> Any:
        """Puts parameters where their logical axes say."""
        if self.mesh is None:
            return params
        return jax.device_put(params, parameter_shardings(self.mesh, axes, params))

    def _shardings(self, args):
        """Shardings of (params, drafter_params, request, rows), hashable, or None."""
        if self.mesh is None:
            return None
        params, drafter_params, *rest = args
        placed = (
            _own_shardings(params),
            _own_shardings(drafter_params),
            *(row_shardings(self.mesh, part) for part in rest),
        )
        return _Frozen(placed)

    def _start_shardings(self, args):
        if self.mesh is None:
            return None
        shape = jax.eval_shape(functools.partial(_start_program, self), *args)
        return _Frozen(row_shardings(self.mesh, shape))


def check_compatible(drafter: Drafter, rule: Rule) -> None:
    """Refuses a drafter that a rule cannot verify without loss, naming the reason."""
    name = type(rule).__name__.lower()
    if not drafter.is_chain and not rule.trees:
        raise ValueError(f"rule '{name}' verifies chains only, and this drafter drafts trees")
    if drafter.reranks and rule.draws == "sample":
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


def _own_shardings(params):
    return jax.tree.map(lambda leaf: getattr(leaf, "sharding", None), params)


def _start_program(programs, params, drafter_params, request, tokens, prompt_of_row):
    _announce("prefill", programs, request, tokens.shape[1])
    return loop.start(
        programs.target,
        params,
        programs.drafter,
        drafter_params,
        programs.rule,
        request,
        tokens,
        chunk=programs.chunk,
        prompt_of_row=prompt_of_row,
    )


def _advance_program(programs, params, drafter_params, request, state, rounds):
    _announce("decode", programs, request, state.context.tokens.shape[1])
    return loop.run(
        programs.target,
        params,
        programs.drafter,
        drafter_params,
        programs.rule,
        request,
        state,
        rounds,
        programs.record,
    )


def _announce(stage, programs, request, buffer):
    """Called while tracing: says which program is compiled, so that nothing does so in silence."""
    log.info(
        "compiling %s: %d rows, %d tokens, drafter %s, rule %s",
        stage,
        request.limit.shape[0],
        buffer,
        type(programs.drafter).__name__,
        type(programs.rule).__name__,
    )


@functools.lru_cache(maxsize=256)
def _start(programs, shardings, out):
    program = functools.partial(_start_program, programs)
    if shardings is None:
        return jax.jit(program)
    return jax.jit(program, in_shardings=shardings.tree, out_shardings=out.tree)


@functools.lru_cache(maxsize=256)
def _advance(programs, shardings):
    program = functools.partial(_advance_program, programs)
    if shardings is None:
        return jax.jit(program, donate_argnums=3)
    state = shardings.tree[3]
    return jax.jit(
        program, in_shardings=(*shardings.tree, None), out_shardings=(state, None), donate_argnums=3
    )

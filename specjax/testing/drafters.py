"""Drafts trees of any fixed shape from a function of the tokens: what every rule is tried with."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from specjax.testing.tables import second_order
from specjax.types import NO_PARENT, NO_TOKEN, ROOT, Context, Draft, Feedback


@dataclass(frozen=True)
class TreeDrafter:
    """Draws the children of each node, level by level, the way the rule wants.

    ``parents`` names the parent of each node, the root's being -1; (-1, 0, 1) is a chain of two.
    The draft model is ``apply(params, tokens [B, S]) -> logits [B, S, V]``, which is given the
    last ``memory`` tokens only, zeros in front of the first. A ``ragged`` drafter drafts a number
    of levels that depends on how long a row is, from none to all, and pads the rest.

    Raises ValueError where a parent does not come before its child.
    """

    parents: tuple[int, ...]
    apply: Callable[[Any, Int[Array, "B S"]], Float[Array, "B S V"]] = second_order
    memory: int = 2
    ragged: bool = False
    has_law: bool = True
    taps: tuple[int, ...] = ()
    needs: tuple[str, ...] = ()
    reranks: bool = False
    forwards: int = 0

    def __post_init__(self):
        ordered = all(ROOT <= parent < node for node, parent in enumerate(self.parents) if node)
        if self.parents[:1] != (NO_PARENT,) or not ordered:
            raise ValueError(
                f"parents is {self.parents}: begin with -1, then name an earlier node for each"
            )

    @property
    def num_nodes(self) -> int:
        return len(self.parents)

    @property
    def max_depth(self) -> int:
        return max(map(self._depth, range(self.num_nodes)))

    @property
    def widths(self) -> tuple[int, ...]:
        return (1, self.num_nodes) if self.ragged and self.num_nodes > 1 else (self.num_nodes,)

    @property
    def is_chain(self) -> bool:
        return self.parents == tuple(range(-1, self.num_nodes - 1))

    def init(self, params, prompt: Context, features, slots: int) -> tuple[()]:
        return ()

    def draft(self, params, state, context: Context, choose) -> tuple[Draft, tuple[()]]:
        tokens = {ROOT: self._committed(context)[:, -1]}
        laws: dict[int, Array] = {}
        for group in self._groups():
            children = [self._children(node) for node in group]
            path = jnp.stack([self._path(node, tokens) for node in group], axis=1)
            logits = jnp.stack([self._logits(params, context, node, tokens) for node in group], 1)
            at = jnp.broadcast_to(jnp.array(group, jnp.int32), path.shape[:2])
            drawn, _, law = choose(logits, at, path, len(children[0]))
            for place, node in enumerate(group):
                tokens |= {child: drawn[:, place, i] for i, child in enumerate(children[place])}
                if law is not None:
                    laws[node] = law[:, place]
        nodes = jnp.stack([tokens[node] for node in range(self.num_nodes)], axis=1)
        return Draft(nodes, self._parents(context), self._stacked(laws)), ()

    def update(self, params, state, feedback: Feedback) -> tuple[()]:
        return ()

    def _children(self, node: int) -> list[int]:
        return [child for child, parent in enumerate(self.parents) if parent == node]

    def _line(self, node: int) -> list[int]:
        """The nodes from below the root down to ``node``."""
        return [] if node == ROOT else [*self._line(self.parents[node]), node]

    def _depth(self, node: int) -> int:
        return len(self._line(node))

    def _groups(self) -> list[list[int]]:
        """Nodes with children, those of one depth and one number of children together."""

        def kind(node):
            return self._depth(node), len(self._children(node))

        inner = sorted((n for n in range(self.num_nodes) if self._children(n)), key=kind)
        return [list(group) for _, group in itertools.groupby(inner, key=kind)]

    def _path(self, node: int, tokens) -> Int[Array, "B D"]:
        above = [tokens[one] for one in self._line(node)]
        padding = [jnp.full_like(tokens[ROOT], NO_TOKEN)] * (self.max_depth - len(above))
        return jnp.stack([*above, *padding], axis=1)

    def _logits(self, params, context: Context, node: int, tokens) -> Float[Array, "B V"]:
        above = [tokens[one][:, None] for one in self._line(node)]
        known = jnp.concatenate([self._committed(context), *above], axis=1)
        return self.apply(params, known[:, -self.memory :])[:, -1]

    def _committed(self, context: Context) -> Int[Array, "B {self.memory}"]:
        """The last committed tokens, zeros where there are fewer."""
        place = context.length[:, None] + jnp.arange(-self.memory, 0)
        last = jnp.take_along_axis(context.tokens, jnp.maximum(place, 0), axis=1)
        return jnp.where(place >= 0, last, 0)

    def _parents(self, context: Context) -> Int[Array, "B N"]:
        parents = jnp.broadcast_to(
            jnp.array(self.parents, jnp.int32), (context.length.shape[0], self.num_nodes)
        )
        if not self.ragged:
            return parents
        levels = context.length % (self.max_depth + 1)
        depth = jnp.array([self._depth(node) for node in range(self.num_nodes)])
        return jnp.where(depth <= levels[:, None], parents, NO_PARENT)

    def _stacked(self, laws) -> Float[Array, "B N V"] | None:
        if not laws:
            return None
        leaf = jnp.full_like(next(iter(laws.values())), -jnp.inf)
        return jnp.stack([laws.get(node, leaf) for node in range(self.num_nodes)], axis=1)

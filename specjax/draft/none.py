"""No draft: every round is a plain step of the target."""

from dataclasses import dataclass

import jax.numpy as jnp

from specjax import tree
from specjax.draft.host import Built, Host
from specjax.types import Context, Draft, Feedback


@dataclass(frozen=True)
class NoDraft:
    """The root alone. Speculation with it is plain decoding, through the same loop."""

    num_nodes: int = 1
    max_depth: int = 0
    widths: tuple[int, ...] = (1,)
    is_chain: bool = True
    has_law: bool = False
    taps: tuple[int, ...] = ()
    needs: tuple[str, ...] = ()
    reranks: bool = False
    forwards: int = 0

    def init(self, params, prompt: Context, features, slots: int) -> tuple[()]:
        return ()

    def draft(self, params, state, context: Context, choose) -> tuple[Draft, tuple[()]]:
        root = jnp.take_along_axis(context.tokens, context.length[:, None] - 1, axis=1)
        return Draft(tokens=root, parents=tree.chain(root.shape[0], 1)), ()

    def update(self, params, state, feedback: Feedback) -> tuple[()]:
        return ()


def build(host: Host) -> Built:
    """Plain decoding; takes no options."""
    return Built(NoDraft(), None)

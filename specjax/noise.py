"""Randomness in three roles, each keyed by the row and by absolute positions alone.

- ``token``: one Gumbel vector for the token at absolute position t. Plain decoding, the bonus, the
  residual's draw and coupled drafting all use it, so a round without a draft *is* a plain step.
- ``draft``: keyed by the position of the round's root and by the parent node. Never by the
  drafted token's own position: rules that look ahead would then reuse a rejected tail's noise.
- ``accept``: keyed by the position of the round's root.

A row's root positions grow by at least one a round and depend on that row alone, so neither
neighbours nor padding, chunking or sharding enter.
"""

import typing

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int, Key

TOKEN, DRAFT, ACCEPT = 0, 1, 2
ROLES = 3


def gumbel(key: Key[Array, ""], size: int) -> Float[Array, " {size}"]:
    """Standard Gumbel noise from one threefry word an entry. The key is consumed.

    The uniform is spaced 2**-32 on the side that decides an argmax, where the usual 23-bit one
    could never draw a token less likely than about 1e-7.
    """
    word = jax.random.bits(key, (size,), jnp.uint32).astype(jnp.float32)
    uniform = jnp.minimum((word + 0.5) * 2.0**-32, 1 - 2.0**-24)
    return -jnp.log(-jnp.log1p(-uniform))


def token(key: Key[Array, ""], position: Int[Array, ""], size: int) -> Float[Array, " {size}"]:
    """Noise of the token emitted at an absolute position of a row."""
    return gumbel(_role_key(key, TOKEN, position), size)


def draft(
    key: Key[Array, ""], root: Int[Array, ""], node: Int[Array, ""], size: int
) -> Float[Array, " {size}"]:
    """Noise of the children of one node, in the round whose root stands at ``root``."""
    return gumbel(jax.random.fold_in(_role_key(key, DRAFT, root), node), size)


def _role_key(key, role, position):
    return jax.random.fold_in(key, position * ROLES + role)


@typing.no_type_check
@struct.dataclass
class Noise:
    """A round's noise for one row, handed to a rule: the row's key and its root's position."""

    key: Key[Array, ""]
    root: Int[Array, ""]

    def token(self, depth: Int[Array, ""], size: int) -> Float[Array, " {size}"]:
        """Noise of the token that follows a node at ``depth``."""
        return token(self.key, self.root + depth + 1, size)

    def accept(self, size: int) -> Float[Array, " {size}"]:
        """Noise of the acceptance decision, an entry a node."""
        return gumbel(_role_key(self.key, ACCEPT, self.root), size)


def row_keys(key: Key[Array, ""], rows: int) -> Key[Array, " {rows}"]:
    """One key a row: row ``i`` gets ``fold_in(key, i)``."""
    return jax.vmap(lambda row: jax.random.fold_in(key, row))(jnp.arange(rows))

"""Rotary position embedding (Su et al., arXiv 2104.09864), half-split layout, angles in float32."""

import math
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from specjax.models.settings import check_numbers

KINDS = ("default", "linear", "llama3", "yarn", "longrope")
Turn = tuple[Float[Array, "B T pairs"], Float[Array, "B T pairs"]]


@dataclass(frozen=True)
class Rope:
    """Base and scaling of the rotation frequencies.

    ``kind`` is "default", "linear" (all frequencies divided by ``factor``), "llama3" (long wave
    lengths divided by ``factor``, short ones kept, those between interpolated), "yarn" (Peng et
    al., arXiv 2309.00071: the same, but interpolated by the pair's index between those that turn
    ``beta_fast`` and ``beta_slow`` times in the original context, which are whole pairs where
    ``truncate``) or "longrope" (Ding et al., arXiv 2402.13753: each frequency divided by its own
    factor). LongRoPE has two sets of factors; which one counts depends on the longest context that
    is served, so that keys in a cache never change: ``short_factors`` up to
    ``original_max_position`` tokens, else ``long_factors``.

    ``partial`` is the part of each head that is turned, its first components. ``attention_factor``
    multiplies cosine and sine.
    """

    theta: float = 10_000.0
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192
    partial: float = 1.0
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()
    attention_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True

    def __post_init__(self):
        if self.kind not in KINDS:
            raise ValueError(f"RoPE type {self.kind!r} is not supported; known: {', '.join(KINDS)}")
        check_numbers(self)

    @property
    def depends_on_length(self) -> bool:
        return self.kind == "longrope"

    def rotated(self, width: int) -> int:
        """How many components of a head of ``width`` are turned."""
        return int(width * self.partial + 1e-6)

    def inverse_frequencies(self, width: int, longest: int = 0) -> np.ndarray:
        """Radians per position of each rotated pair, [pairs], float64.

        ``longest`` is the longest context that is served.
        """
        width = self.rotated(width)
        frequencies = self.theta ** -(np.arange(0, width, 2, dtype=np.float64) / width)
        if self.kind == "linear":
            return frequencies / self.factor
        if self.kind == "llama3":
            return self._llama3(frequencies)
        if self.kind == "yarn":
            return self._yarn(frequencies)
        if self.kind == "longrope":
            is_long = longest > self.original_max_position
            return frequencies / np.asarray(self.long_factors if is_long else self.short_factors)
        return frequencies

    def _yarn(self, frequencies: np.ndarray) -> np.ndarray:
        pairs = len(frequencies)

        def pair_that_turns(times: float) -> float:
            return pairs * math.log(self.original_max_position / (2 * math.pi * times), self.theta)

        first, last = pair_that_turns(self.beta_fast), pair_that_turns(self.beta_slow)
        if self.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, 2 * pairs - 1)
        divided = np.clip((np.arange(pairs) - first) / max(last - first, 1e-3), 0, 1)
        return frequencies * (1 - divided + divided / self.factor)

    def _llama3(self, frequencies: np.ndarray) -> np.ndarray:
        turns = self.original_max_position * frequencies / (2 * math.pi)
        span = self.high_freq_factor - self.low_freq_factor
        keep = np.clip((turns - self.low_freq_factor) / span, 0, 1)
        return frequencies * (keep + (1 - keep) / self.factor)


def rotation(rope: Rope, positions: Int[Array, "B T"], width: int, longest: int = 0) -> Turn:
    """Cosine and sine of each position's angles, float32 whatever the model's dtype."""
    frequencies = jnp.asarray(rope.inverse_frequencies(width, longest), jnp.float32)
    angles = positions[..., None].astype(jnp.float32) * frequencies
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    if rope.attention_factor == 1.0:
        return cos, sin
    return cos * rope.attention_factor, sin * rope.attention_factor


def identity(like: Turn) -> Turn:
    """The rotation that turns nothing, in the shape of another."""
    return jnp.ones_like(like[0]), jnp.zeros_like(like[1])


def rotate(x: Float[Array, "B T *heads W"], turn: Turn) -> Float[Array, "B T *heads W"]:
    """Turns each pair (i, i + R/2) of the last axis by its position's angle.

    R is twice the number of angles; what lies behind the first R components is left as it is.
    """
    heads = range(2, x.ndim - 1)
    cos, sin = (jnp.expand_dims(part, tuple(heads)) for part in turn)
    rotated = 2 * cos.shape[-1]
    if rotated < x.shape[-1]:
        turned = rotate(x[..., :rotated], turn)
        return jnp.concatenate([turned, x[..., rotated:]], -1)
    low, high = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([low * cos - high * sin, high * cos + low * sin], -1).astype(x.dtype)

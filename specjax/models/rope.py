"""Rotary position embedding (Su et al., arXiv 2104.09864), half-split layout, angles in float32."""

import math
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int


@dataclass(frozen=True)
class Rope:
    """Base and scaling of the rotation frequencies.

    ``kind`` is "default", "linear" (all frequencies divided by ``factor``) or "llama3" (long wave
    lengths divided by ``factor``, short ones kept, those between interpolated).
    """

    theta: float = 10_000.0
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192

    def __post_init__(self):
        if self.kind not in ("default", "linear", "llama3"):
            raise ValueError(
                f"RoPE type {self.kind!r} is not supported; known: default, linear, llama3"
            )

    def inverse_frequencies(self, width: int) -> np.ndarray:
        """Radians per position of each rotated pair, [width / 2], float64."""
        frequencies = self.theta ** -(np.arange(0, width, 2, dtype=np.float64) / width)
        if self.kind == "linear":
            return frequencies / self.factor
        if self.kind == "llama3":
            return self._llama3(frequencies)
        return frequencies

    def _llama3(self, frequencies: np.ndarray) -> np.ndarray:
        turns = self.original_max_position * frequencies / (2 * math.pi)
        span = self.high_freq_factor - self.low_freq_factor
        keep = np.clip((turns - self.low_freq_factor) / span, 0, 1)
        return frequencies * (keep + (1 - keep) / self.factor)


def rotation(
    rope: Rope, positions: Int[Array, "B T"], width: int
) -> tuple[Float[Array, "B T {width//2}"], Float[Array, "B T {width//2}"]]:
    """Cosine and sine of each position's angles, float32 whatever the model's dtype."""
    frequencies = jnp.asarray(rope.inverse_frequencies(width), jnp.float32)
    angles = positions[..., None].astype(jnp.float32) * frequencies
    return jnp.cos(angles), jnp.sin(angles)


def rotate(
    x: Float[Array, "B T *heads W"],
    turn: tuple[Float[Array, "B T pairs"], Float[Array, "B T pairs"]],
) -> Float[Array, "B T *heads W"]:
    """Turns each pair (i, i + W/2) of the last axis by its position's angle."""
    heads = range(2, x.ndim - 1)
    cos, sin = (jnp.expand_dims(part, tuple(heads)) for part in turn)
    low, high = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([low * cos - high * sin, high * cos + low * sin], -1).astype(x.dtype)

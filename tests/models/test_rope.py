"""Rotation angles at long positions."""

import jax.numpy as jnp
import numpy as np
import pytest

from specjax.models import Rope
from specjax.models.rope import identity, rotate, rotation

pytestmark = pytest.mark.fast

WIDTH = 64
POSITIONS = [0, 255, 257, 4095, 15962]
LLAMA31 = Rope(500_000.0, "llama3", 8.0, 1.0, 4.0, 8192)
BF16_ROUNDING = 2.0**-8


def _llama31(frequency):
    """Llama 3.1's published scaling, one frequency at a time."""
    wavelength = 2 * np.pi / frequency
    if wavelength < 8192 / 4:
        return frequency
    if wavelength > 8192 / 1:
        return frequency / 8
    smooth = (8192 / wavelength - 1) / (4 - 1)
    return (1 - smooth) * frequency / 8 + smooth * frequency


SHORT_FACTORS = tuple(np.linspace(1.0, 1.5, 24))
LONG_FACTORS = tuple(np.linspace(1.0, 30.0, 24))
PHI4 = Rope(
    10_000.0,
    "longrope",
    original_max_position=4096,
    partial=0.75,
    short_factors=SHORT_FACTORS,
    long_factors=LONG_FACTORS,
    attention_factor=1.2,
)


def _angles(rope, scale):
    frequencies = rope.theta ** (-np.arange(0, WIDTH, 2) / WIDTH)
    return np.outer(POSITIONS, [scale(frequency) for frequency in frequencies])


YARN = Rope(1e6, "yarn", 4.0, original_max_position=32_768)


def _yarn(frequency):
    """Pairs that turn 32 times or more in the original context are kept, at most once divided."""
    pair = -WIDTH / 2 * np.log(frequency) / np.log(1e6)
    first, last = (
        WIDTH / 2 * np.log(32_768 / (2 * np.pi * turns)) / np.log(1e6) for turns in (32, 1)
    )
    divided = np.clip((pair - np.floor(first)) / (np.ceil(last) - np.floor(first)), 0, 1)
    return frequency * (1 - divided) + frequency / 4 * divided


@pytest.mark.parametrize(
    ("rope", "scale"),
    [
        (Rope(10_000.0), lambda frequency: frequency),
        (Rope(10_000.0, "linear", 4.0), lambda frequency: frequency / 4),
        (LLAMA31, _llama31),
        (YARN, _yarn),
    ],
    ids=["plain", "linear", "llama3", "yarn"],
)
def test_NU1_a_bfloat16_model_turns_by_exact_angles(rope, scale):
    """bfloat16 holds no odd integer above 256: positions and frequencies stay float32."""
    cos, sin = rotation(rope, jnp.array([POSITIONS]), WIDTH)
    angles = _angles(rope, scale)
    assert cos.dtype == sin.dtype == jnp.float32
    np.testing.assert_allclose(cos[0], np.cos(angles), atol=BF16_ROUNDING / 2)
    np.testing.assert_allclose(sin[0], np.sin(angles), atol=BF16_ROUNDING / 2)
    ones = jnp.ones((1, len(POSITIONS), WIDTH), jnp.bfloat16)
    turned = rotate(ones, (cos, sin))
    assert turned.dtype == jnp.bfloat16
    expected = np.concatenate([np.cos(angles) - np.sin(angles), np.cos(angles) + np.sin(angles)], 1)
    np.testing.assert_allclose(turned[0].astype(np.float64), expected, atol=2 * BF16_ROUNDING)


def test_NU1_angles_in_bfloat16_would_be_far_off():
    frequencies = 10_000.0 ** (-np.arange(0, WIDTH, 2) / WIDTH)
    rounded = np.asarray(jnp.asarray(POSITIONS, jnp.bfloat16), np.float64)
    off = np.abs(np.cos(np.outer(rounded, frequencies)) - np.cos(np.outer(POSITIONS, frequencies)))
    assert off.max() > 50 * BF16_ROUNDING


@pytest.mark.parametrize(
    ("longest", "factors"), [(4096, SHORT_FACTORS), (4097, LONG_FACTORS), (131_072, LONG_FACTORS)]
)
def test_NU1_longrope_of_a_part_of_each_head(longest, factors):
    """The same factors at every position: those of the longest context that is served."""
    cos, sin = rotation(PHI4, jnp.array([POSITIONS]), WIDTH, longest)
    angles = np.outer(POSITIONS, 10_000.0 ** (-np.arange(0, 48, 2) / 48) / np.array(factors))
    np.testing.assert_allclose(cos[0], 1.2 * np.cos(angles), atol=BF16_ROUNDING / 2)
    np.testing.assert_allclose(sin[0], 1.2 * np.sin(angles), atol=BF16_ROUNDING / 2)
    heads = jnp.asarray(np.random.default_rng(0).normal(size=(1, len(POSITIONS), 2, WIDTH)))
    turned = rotate(heads, (cos, sin))
    np.testing.assert_array_equal(turned[..., 48:], heads[..., 48:])
    norms = [np.linalg.norm(np.asarray(x)[..., :48], axis=-1) for x in (turned, heads)]
    np.testing.assert_allclose(norms[0], 1.2 * norms[1], rtol=1e-4)


def test_the_identity_turns_nothing():
    like = rotation(Rope(), jnp.array([POSITIONS]), WIDTH)
    heads = jnp.asarray(np.random.default_rng(0).normal(size=(1, len(POSITIONS), 2, WIDTH)))
    np.testing.assert_array_equal(rotate(heads, identity(like)), heads)

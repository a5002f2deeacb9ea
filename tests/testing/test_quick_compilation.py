"""Programs that compile with fewer optimisations: of the options what XLA knows, and no more."""

import jax
import jax.numpy as jnp
import pytest

from specjax.testing import quick_compilation
from specjax.testing.quick_compilation import fewer_optimisations, jit_quickly, known

pytestmark = pytest.mark.fast


def test_options_that_xla_does_not_know_are_left_out(monkeypatch):
    monkeypatch.setattr(quick_compilation, "FEWER_PASSES", {"xla_of_another_day": 1})
    assert known({"xla_of_another_day": 1}) == {}
    assert "xla_of_another_day" not in fewer_optimisations()
    assert jit_quickly(lambda x: x + 1)(1) == 2


def test_what_is_known_is_asked_of_the_device_in_use(monkeypatch):
    asked = []
    monkeypatch.setattr(quick_compilation, "_is_known", lambda *what: asked.append(what) or True)
    assert known({"xla_level": 1}) == {"xla_level": 1}
    assert asked == [(jax.devices()[0].platform, "xla_level", 1)]


def test_types_are_those_of_the_caller():
    halved = jit_quickly(lambda x: x / 2)
    with jax.enable_x64(True):
        assert halved(1.0).dtype == jnp.float64
    assert halved(1.0).dtype == jnp.float32

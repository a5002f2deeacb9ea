"""Programs that run for a moment, compiled with fewer optimisations: that is most of their cost."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax

# How XLA's CPU backend emitted fusions before it had MLIR for it.
OLDER_EMITTERS = {"xla_cpu_use_fusion_emitters": False}
FEWER_PASSES = {"xla_backend_optimization_level": 1, "xla_llvm_disable_expensive_passes": True}


def jit_quickly(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """`jax.jit` with these ``options``: two thirds of the time to compile, about as fast to run."""

    @functools.cache
    def jitted(*chosen):
        return jax.jit(function, compiler_options=dict(chosen), **options)

    @functools.wraps(function)
    def call(*args, **kwargs):
        return jitted(*fewer_optimisations().items())(*args, **kwargs)

    return call


def fewer_optimisations() -> dict[str, Any]:
    """The compiler's options that `jit_quickly` gives; none where XLA knows none of them."""
    # Who has asked JAX for hardly any optimisation is not given more.
    hardly_any = jax.config.values["jax_disable_most_optimizations"]
    return known(OLDER_EMITTERS if hardly_any else OLDER_EMITTERS | FEWER_PASSES)


def known(options: Mapping[str, Any]) -> dict[str, Any]:
    """Those that XLA knows for the device in use: their names are not promised."""
    # An array made now, wherever the caller's settings put it.
    platform = jax.device_put(0.0).devices().pop().platform
    return {name: value for name, value in options.items() if _is_known(platform, name, value)}


@functools.cache
def _is_known(platform, name, value) -> bool:
    try:
        jax.jit(lambda x: x + 1, compiler_options={name: value}).lower(1.0).compile()
    except Exception:  # XLA's, of no documented type
        return False
    return True

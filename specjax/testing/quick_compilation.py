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
    def jitted(fewer):
        compiler_options = known(OLDER_EMITTERS) | (known(FEWER_PASSES) if fewer else {})
        return jax.jit(function, compiler_options=compiler_options, **options)

    @functools.wraps(function)
    def call(*args, **kwargs):
        # Who has asked JAX for hardly any optimisation is not given more.
        fewer = not jax.config.values["jax_disable_most_optimizations"]
        return jitted(fewer)(*args, **kwargs)

    return call


def known(options: Mapping[str, Any]) -> dict[str, Any]:
    """Those that this XLA knows: their names are not promised."""
    return {name: value for name, value in options.items() if _is_known(name, value)}


@functools.cache
def _is_known(name, value) -> bool:
    try:
        jax.jit(lambda x: x + 1, compiler_options={name: value}).lower(1.0).compile()
    except Exception:  # XLA's, of no documented type
        return False
    return True

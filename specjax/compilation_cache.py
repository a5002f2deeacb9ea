"""Keeping compiled programs between processes, so that a second start does not compile."""

import jax

CACHE_BYTES = 4 << 30


def enable_compilation_cache() -> None:
    """Turns JAX's persistent cache on, beside the checkpoints, unless the user has chosen a place.

    Programs of any compile time are kept: a scanned decoder compiles in under the second that JAX
    asks for by default, and would be compiled anew at every start.
    """
    from ckpt_convert.fetch import cache_dir

    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
    if jax.config.values["jax_compilation_cache_dir"]:
        return
    jax.config.update("jax_compilation_cache_dir", str(cache_dir() / "programs"))
    # A bound makes JAX lock the folder: two processes would otherwise read half-written programs.
    jax.config.update("jax_compilation_cache_max_size", CACHE_BYTES)

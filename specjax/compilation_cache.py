"""Keeping compiled programs between processes, so that a second start does not compile."""

import os
from pathlib import Path

import jax


def cache_folder() -> Path:
    """``$SPECJAX_CACHE``, else ``specjax`` in the user's cache folder (XDG)."""
    if os.environ.get("SPECJAX_CACHE"):
        return Path(os.environ["SPECJAX_CACHE"]).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "specjax"


def enable_compilation_cache() -> None:
    """Turns JAX's persistent cache on, in the cache folder, unless the user has chosen a place.

    Programs of any compile time are kept: a scanned decoder compiles in under the second that JAX
    asks for by default, and would be compiled anew at every start.
    """
    if not jax.config.values["jax_compilation_cache_dir"]:
        jax.config.update("jax_compilation_cache_dir", str(cache_folder() / "xla"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)

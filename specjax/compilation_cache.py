"""Keeping compiled programs between processes, so that a second start does not compile."""

from pathlib import Path

import jax

MOST_BYTES = 1 << 30


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
    folder = cache_dir() / "programs"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return  # what is kept there is convenient, and nothing that a start should fail for
    # JAX can bound the folder, but then it looks at every file before it keeps one program more:
    # 0.2 s where 4,000 are kept. A program that another process has half written is only compiled
    # again, with a warning.
    prune(folder, MOST_BYTES)
    jax.config.update("jax_compilation_cache_dir", str(folder))


def prune(folder: Path, most_bytes: int) -> None:
    """Deletes what was used longest ago, down to half of ``most_bytes``, if there are more."""
    try:
        kept = [(file, file.stat()) for file in folder.iterdir()]
        size = sum(stat.st_size for _, stat in kept)
        if size <= most_bytes:
            return
        for file, stat in sorted(kept, key=lambda one: max(one[1].st_atime, one[1].st_mtime)):
            if size <= most_bytes // 2:
                return
            file.unlink(missing_ok=True)
            size -= stat.st_size
    except OSError:
        return  # no folder yet, or another process prunes it: nothing that a start should fail for

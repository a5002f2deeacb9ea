"""Programs that are kept between processes: how many, and what a damaged one does."""

import os

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.compilation_cache import compilation_cache

from specjax.compilation_cache import prune


@pytest.mark.fast
@pytest.mark.parametrize("most, left", [(600, "abcdef"), (599, "ef"), (199, ""), (200, "f")])
def test_what_was_used_longest_ago_goes_first(tmp_path, most, left):
    for age, name in enumerate("fedcba"):
        (tmp_path / name).write_bytes(b"x" * 100)
        os.utime(tmp_path / name, (1e9 - age, 1e9 - age))
    prune(tmp_path, most)
    assert sorted(file.name for file in tmp_path.iterdir()) == list(left)


@pytest.mark.fast
def test_a_folder_that_is_not_there_is_no_fault(tmp_path):
    prune(tmp_path / "none", 0)


@pytest.mark.fast
def test_a_program_half_written_is_compiled_again(tmp_path, monkeypatch):
    """What lets processes share the folder without a lock."""

    def run():
        jax.clear_caches()
        return float(jax.jit(lambda x: jnp.sin(x) * 3 + 0.125)(2.0))

    before = jax.config.values["jax_compilation_cache_dir"]
    compilation_cache.reset_cache()
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    try:
        first = run()
        programs = list(tmp_path.iterdir())
        assert programs
        for program in programs:
            program.write_bytes(program.read_bytes()[:-20])
        with pytest.warns(UserWarning, match="persistent compilation cache"):
            assert run() == first
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
        compilation_cache.reset_cache()

"""How every test sees the machine: a CPU that looks like four devices, checked shapes, one cache.

Nothing here may import specjax before `install_import_hook` has run, and nothing may touch JAX's
devices before their number is set.
"""

import gc
import importlib.util
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import pytest
from jax._src import compiler
from jax.experimental import topologies
from jax.experimental.compilation_cache import compilation_cache
from jaxtyping import install_import_hook

CHECKOUT = Path(__file__).parents[1]

# An environment variable, not only a setting: command-line tests start processes of their own.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Workers that compile for an absent TPU side by side don't own one, so none can be in use.
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")

# JAX read its environment when a plugin imported it, perhaps before the line above.
jax.config.update("jax_platforms", os.environ["JAX_PLATFORMS"])
jax.config.update("jax_num_cpu_devices", 4)
# A folder a worker. One for all would have to be bounded, since JAX locks none but those; then it
# looks at every file before it writes another, which takes 0.2 s where 4,000 are there.
WORKER = os.environ.get("PYTEST_XDIST_WORKER", "alone")
jax.config.update("jax_compilation_cache_dir", str(CHECKOUT / ".cache" / "programs" / WORKER))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)

install_import_hook("specjax", "runtime_types.checked")

HAS_TORCH = importlib.util.find_spec("torch") is not None
SCALE = os.environ.get("SPECJAX_TEST_SCALE", "reduced")


def package_folder() -> Path:
    """The folder that `import specjax` takes, found without importing it."""
    spec = importlib.util.find_spec("specjax")
    if spec is None or not spec.submodule_search_locations:
        raise pytest.UsageError("specjax is not importable; run `make test`, which installs it")
    return Path(next(iter(spec.submodule_search_locations)))


def pytest_configure(config: pytest.Config) -> None:
    if SCALE not in ("reduced", "full"):
        raise pytest.UsageError(f"SPECJAX_TEST_SCALE={SCALE!r}: it is 'reduced' or 'full'")
    folder = package_folder()
    if os.environ.get("SPECJAX_TEST_INSTALLED") == "1" and folder == CHECKOUT / "specjax":
        raise pytest.UsageError(f"the installed package was to be tested, {folder} would be")


def pytest_report_header(config: pytest.Config) -> list[str]:
    parity = "installed" if HAS_TORCH else "absent, golden files stand in for the parity tests"
    return [
        f"specjax: {package_folder()}",
        f"jax: {jax.__version__}, scale: {SCALE}, torch: {parity}",
    ]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if HAS_TORCH:
        return
    needs_torch = pytest.mark.skip(reason="torch is absent; golden files stand in for it")
    for item in items:
        if item.get_closest_marker("torch"):
            item.add_marker(needs_torch)


@pytest.fixture(scope="session")
def scale() -> Callable[[int, int], int]:
    """`scale(reduced, full)`: the one of the two sizes that SPECJAX_TEST_SCALE names."""
    return lambda reduced, full: full if SCALE == "full" else reduced


@pytest.fixture
def x64() -> Iterator[None]:
    """Float64 for one test: a law is proven to rounding error, not to single precision."""
    with jax.enable_x64(True):
        yield


@pytest.fixture
def absent_tpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], list[jax.Device]]]:
    """`absent_tpu("v5e:2x4")`: the devices of a TPU that programs can be compiled for, not run on.

    Needs libtpu, which exists for Linux on x86-64 only. The persistent cache is off meanwhile: it
    stores such programs and cannot read them back.
    """
    pytest.importorskip("libtpu", reason="libtpu exists for Linux on x86-64 only")
    # What a TPU machine's metadata server would answer; there is none to ask.
    monkeypatch.setenv("TPU_SKIP_MDS_QUERY", "1")
    monkeypatch.setenv("TPU_ACCELERATOR_TYPE", "v5litepod-4")
    monkeypatch.setenv("TPU_WORKER_HOSTNAMES", "localhost")
    monkeypatch.setenv("TPU_WORKER_ID", "0")
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()
    yield lambda name: list(topologies.get_topology_desc(name, "tpu").devices)
    jax.config.update("jax_enable_compilation_cache", True)
    compilation_cache.reset_cache()


@pytest.fixture
def checkout() -> Path:
    """The checkout the tests lie in: its documents and notebooks, not its sources."""
    return CHECKOUT


# Where only tokens and counts are looked at, on models so small that compiling is all of the time.
COMPILED_QUICKLY = ("cases", "contracts", "drafters", "llm", "models")
COMPILED_QUICKLY_TOO = (
    "test_acceptance",
    "test_choose",
    "test_cli",
    "test_decisions",
    "test_exact_law",
    "test_grammar_law",
    "test_shaping",
    "test_known_laws",
    "test_meshes",
    "test_noise",
    "test_rows",
    "test_greedy_report",
    "test_loop_sampler",
    "test_certificate",
    "test_mutants",
    "test_joint_law",
    "test_trees",
)


# Where compiled programs are read, or their floats compared bit by bit: as users have them.
AS_USERS_HAVE_IT = (
    "test_absent_tpu",
    "test_compile_memory",
    "test_donation",
    "test_noise",
    "test_quantised_memory",
)


@pytest.fixture(scope="module", autouse=True)
def optimization(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fewer optimisations for tests that compile much and run little; the rest keep them all."""
    folder, name = request.path.parent.name, request.path.stem
    quickly = folder in COMPILED_QUICKLY or name in COMPILED_QUICKLY_TOO
    # Not at the top: nothing of specjax may be imported before the hook.
    from specjax.testing.quick_compilation import OLDER_EMITTERS, known

    older_emitters = known(OLDER_EMITTERS)
    usual = compiler.get_compile_options

    def options(*args, **settings):
        made = usual(*args, **settings)
        made.env_option_overrides += list(older_emitters.items())
        return made

    jax.config.update("jax_disable_most_optimizations", quickly)
    with pytest.MonkeyPatch.context() as patch:
        if name not in AS_USERS_HAVE_IT:
            patch.setattr(compiler, "get_compile_options", options)
        yield
    jax.config.update("jax_disable_most_optimizations", False)
    if _memory_maps() > MANY_MAPS:
        jax.clear_caches()
        gc.collect()


# Every program on a CPU is some memory maps, of which Linux grants a process 65,530: beyond them a
# worker that has seen enough tests is aborted.
MANY_MAPS = 20_000


def _memory_maps() -> int:
    try:
        return Path("/proc/self/maps").read_text().count("\n")
    except OSError:
        return 0

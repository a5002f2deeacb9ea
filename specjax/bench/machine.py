"""What the machine allows and where a round's time goes: bandwidth, target forward, the rest."""

import statistics
import time
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from tqdm.auto import tqdm

from specjax import loop
from specjax.bench.table import table
from specjax.llm import LLM
from specjax.sampling_params import SamplingParams

ROUNDS = 16
REPEATS = 7
PROBE_BYTES = 1 << 29
MANY = 8
# Rounds whose program holds no truncation: `LLM`'s always does, so that nothing compiles later.
BARE = "sampled, none compiled"
SHAPED = {
    "top_k": 50,
    "top_p": 0.95,
    "min_p": 0.02,
    "repetition_penalty": 1.1,
    "presence_penalty": 0.1,
    "frequency_penalty": 0.1,
}


@dataclass(frozen=True)
class RoundCost:
    """Milliseconds of one round, and of the target forward inside it."""

    round: str
    rows: int
    width: int
    round_ms: float
    forward_ms: float

    @property
    def overhead(self) -> float:
        """The share of the round that is not the target forward."""
        return max(1 - self.forward_ms / self.round_ms, 0.0)


@dataclass(frozen=True)
class MachineCosts:
    """Read bandwidth of one thread, how much of it plain decoding uses, and rounds' costs.

    ``unused``: what truncations that no row asks for add to a plain and to a speculative round, the
    median of the shares of rounds timed one after the other.
    """

    bandwidth_gb_s: float
    weights_gb: float
    plain_share: float
    rounds: list[RoundCost]
    unused: dict[str, float]


def measure(plain: LLM, speculative: LLM) -> MachineCosts:
    """Times rounds that draft at full width on a periodic context, and plain steps."""
    weights = sum(leaf.nbytes for leaf in jax.tree.leaves(plain.model.params))
    bandwidths, costs = [], {}
    sampled = {"temperature": 0.8}
    kinds = [
        ("plain, greedy", plain, 1, {"temperature": 0.0}),
        ("speculative, greedy", speculative, 1, {"temperature": 0.0}),
        ("speculative, sampled", speculative, 1, sampled),
        (f"plain, {BARE}", plain, MANY, sampled),
        ("plain, sampled", plain, MANY, sampled),
        ("plain, shaped", plain, MANY, sampled | SHAPED),
        (f"speculative, {BARE}", speculative, MANY, sampled),
        ("speculative, sampled", speculative, MANY, sampled),
        ("speculative, shaped", speculative, MANY, sampled | SHAPED),
    ]
    programs = {
        (name, rows): _Rounds(engine, rows, bare=name.endswith(BARE), **params)
        for name, engine, rows, params in kinds
    }
    steps = len(programs) * (REPEATS + 1)
    with tqdm(total=steps, desc="machine", unit=" runs", delay=2, leave=False) as bar:
        for program in programs.values():
            program.time()  # and compiled
            bar.update()
        for _ in range(REPEATS):
            bandwidths.append(read_bandwidth())
            for name, program in programs.items():
                costs.setdefault(name, []).append(program.time())
                bar.update()
    rounds = [
        RoundCost(
            name,
            rows,
            programs[name, rows].width,
            statistics.median(one[0] for one in timed),
            statistics.median(one[1] for one in timed),
        )
        for (name, rows), timed in costs.items()
    ]
    bandwidth = statistics.median(bandwidths)
    share = weights / (rounds[0].round_ms * 1e-3) / bandwidth
    unused = {
        kind: _unused(costs[f"{kind}, {BARE}", MANY], costs[f"{kind}, sampled", MANY])
        for kind in ("plain", "speculative")
    }
    return MachineCosts(bandwidth / 1e9, weights / 1e9, share, rounds, unused)


def _unused(bare: list[tuple[float, float]], sampled: list[tuple[float, float]]) -> float:
    pairs = zip(bare, sampled, strict=True)
    return statistics.median(more / less - 1 for (less, _), (more, _) in pairs)


def report(costs: MachineCosts) -> str:
    """The table, as Markdown."""
    rows = [
        (
            one.round,
            one.rows,
            one.width,
            f"{one.round_ms:.2f}",
            f"{one.forward_ms:.2f}",
            f"{one.overhead:.1%}",
        )
        for one in costs.rounds
    ]
    head = (
        f"one thread reads {costs.bandwidth_gb_s:.1f} GB/s; a plain step reads "
        f"{costs.weights_gb:.3f} GB of weights at {costs.plain_share:.0%} of that"
    )
    columns = ["round", "rows", "width", "round ms", "forward ms", "all else"]
    return f"{head}\n\n{table(columns, rows)}\n\n{_shaping(costs)}"


def _shaping(costs: MachineCosts) -> str:
    shares = []
    for kind in ("plain", "speculative"):
        bare, shaped = (
            next(one.round_ms for one in costs.rounds if (one.round, one.rows) == (name, MANY))
            for name in (f"{kind}, sampled", f"{kind}, shaped")
        )
        shares.append(f"{(shaped - bare) / bare:.0%} of a {kind} round")
    unused = " and ".join(f"{share:+.1%} of a {kind}" for kind, share in costs.unused.items())
    return (
        f"shaped by {', '.join(SHAPED)}: {' and '.join(shares)} of {MANY} rows more; "
        f"truncations that no row asks for: {unused} round"
    )


def read_bandwidth() -> float:
    """Bytes a second that one thread reads from memory, the better of two ways of reading.

    A vectorised maximum, and the C library's search for a byte that is not there.
    """
    # Not zeros: untouched memory is one page that never leaves the cache.
    raw = bytearray(b"\x01") * PROBE_BYTES
    values = np.frombuffer(raw, np.float32)
    seconds = min(_seconds(lambda: np.max(values)), _seconds(lambda: raw.find(b"\xff")))
    return PROBE_BYTES / seconds


class _Rounds:
    """A program of rounds that all begin from the same state, and one of forwards alone."""

    def __init__(self, engine: LLM, rows: int, *, bare: bool, **params: Any):
        self.engine, self.rows = engine, rows
        running = engine._running
        drafter = running.programs.drafter
        self.width = drafter.num_nodes
        wanted = SamplingParams(max_tokens=64, seed=0, **params)
        asked = engine._intake.take([[5, 6, 7, 8] * 16] * rows, wanted, running.programs.rule)
        self.request, state = engine._start(running, engine._rows(asked))
        if bare:
            without = replace(self.request.sampling, truncation=None)
            self.request = replace(self.request, sampling=without)
        self.state = self._periodic(state)
        programs, target = running.programs, engine.model.target

        def rounds(params, drafter_params, request, state):
            def body(_, carry):
                after = loop.step(
                    target, params, drafter, drafter_params, programs.rule, request, carry
                )
                cache = after.cache.rollback(after.context.length - state.context.length)
                return replace(after, context=state.context, finish=state.finish, cache=cache)

            return lax.fori_loop(0, ROUNDS, body, state)

        def forwards(params, state):
            tokens = jnp.full((self.rows, self.width), 5, jnp.int32)

            def body(_, carry):
                cache, kept = carry
                out = target(params, tokens, None, cache)
                return out.cache, kept + out.logits[:, :, 0]

            return lax.fori_loop(0, ROUNDS, body, (state.cache, jnp.zeros((self.rows, self.width))))

        self._rounds = jax.jit(rounds)
        self._forwards = jax.jit(forwards)

    def time(self) -> tuple[float, float]:
        """Milliseconds of a round, and of a forward of the same width."""
        model = self.engine.model
        drafter_params = self.engine._running.drafter_params
        whole = _seconds(
            lambda: self._rounds(model.params, drafter_params, self.request, self.state)
        )
        forward = _seconds(lambda: self._forwards(model.params, self.state))
        return whole / ROUNDS * 1e3, forward / ROUNDS * 1e3

    def _periodic(self, state):
        """The state with its last token replaced by the one that continues the period."""
        context = state.context
        tokens = context.tokens.at[:, context.length[0] - 1].set(5)
        return replace(state, context=replace(context, tokens=tokens))


def _seconds(work) -> float:
    began = time.perf_counter()
    jax.block_until_ready(work())
    return time.perf_counter() - began

"""`LLM`: a checkpoint and its tokenizer behind the interface that vLLM's users know."""

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array

from specjax.checkpoint import Model, check_loaded, load
from specjax.detokenizer import Detokenizer
from specjax.draft import Host
from specjax.draft.host import Loaded
from specjax.generation import next_power_of_two
from specjax.intake import Asked, Intake
from specjax.metrics import Counts, Metrics
from specjax.outputs import CompletionOutput, Delta, RequestOutput, token_logprobs
from specjax.programs import Programs
from specjax.requests import (
    SMALLEST_BUFFER,
    Prompt,
    Row,
    distinct_prompts,
    groups,
    seed_key,
)
from specjax.sampling_arrays import request_arrays
from specjax.sampling_params import SamplingParams, require_integer
from specjax.speculative_config import SpeculativeConfig
from specjax.types import FINISH_REASONS, RUNNING, STOPPED, Request, Stats, Trace

QUIET_SECONDS = 2.0


class _Running(NamedTuple):
    """The programs that serve, and what they are given."""

    programs: Programs
    params: Any
    drafter_params: Any


class LLM:
    """Generates text, with or without speculation; the law of the output is the same.

    Args:
        model: a known name, a checkpoint folder, a Hugging Face folder, a GGUF file, or a loaded
            `Model`.
        speculative_config: vLLM's or Transformers' keys, see `SpeculativeConfig`; None decodes
            plainly.
        dtype: "auto", "float32", "bfloat16" or "float16".
        quantization: "int8" or "int4" for weights in small integers; None as the model has them.
        max_model_len: most tokens of prompt and output together; None is the model's own limit.
            A model with LongRoPE takes its short factors where this is short enough for them.
        max_num_seqs: rows decoded together; longer lists are served in groups.
        mesh: devices to shard over (`specjax.sharding.make_mesh`).
        seed: the engine's seed, for requests that name none.
        rounds_per_chunk: rounds between two looks of the host; results don't depend on it.

    Raises:
        ValueError: one sentence that names the fault and the remedy, before anything is compiled.
    """

    def __init__(
        self,
        model: str | Path | Model = "smollm2-135m-instruct",
        *,
        speculative_config: Mapping[str, Any] | SpeculativeConfig | None = None,
        dtype: str = "auto",
        quantization: str | None = None,
        max_model_len: int | None = None,
        max_num_seqs: int = 8,
        mesh: Mesh | None = None,
        seed: int = 0,
        rounds_per_chunk: int = 16,
    ):
        speculation = _parsed(speculative_config)
        require_integer("max_num_seqs", max_num_seqs, at_least=1)
        require_integer("rounds_per_chunk", rounds_per_chunk, at_least=1)
        if max_model_len is not None:
            require_integer("max_model_len", max_model_len)
        self._key = seed_key(seed)
        if isinstance(model, Model):
            check_loaded(model, quantization, dtype)
            self.model = model
        else:
            self.model = load(model, dtype=dtype, mesh=mesh, quantization=quantization)
        self.tokenizer = self.model.tokenizer
        self.max_model_len = self._model_len(max_model_len)
        if (served := self._served(self.model.target)) is not self.model.target:
            self.model = replace(self.model, target=served)
        self.max_num_seqs = max_num_seqs
        self.rounds_per_chunk = rounds_per_chunk
        self._intake = Intake(
            self.tokenizer,
            self.model.vocab_size,
            self.model.eos_ids,
            self.max_model_len,
            self.get_default_sampling_params(),
        )
        self._mesh, self._dtype = mesh, dtype
        self._requests = 0
        self.speculative_config = speculation
        self.set_speculation(speculation)

    def set_speculation(self, speculative_config: Mapping[str, Any] | SpeculativeConfig | None):
        """Changes the drafter and the rule; the model stays loaded. None decodes plainly."""
        speculative_config = _parsed(speculative_config)
        chunk = 64 if jax.default_backend() == "cpu" else 256
        host = Host(
            target=self.model.target,
            params=self.model.params,
            vocab_size=self.model.vocab_size,
            max_context=self.model.max_position,
            prefill_chunk=chunk,
            load=self._load_draft,
        )
        built, rule = speculative_config.build(host)
        if built.drafter.num_nodes > self.max_model_len:
            raise ValueError(
                f"num_speculative_tokens is {built.drafter.num_nodes - 1}, more than the "
                f"{self.max_model_len} tokens of max_model_len can hold: choose fewer"
            )
        programs = Programs(
            target=self.model.target,
            drafter=built.drafter,
            rule=rule,
            chunk=chunk,
            record=self.rounds_per_chunk,
            mesh=self._mesh,
        )
        placed = programs.place_all(self.model.params, built.params)
        # All together and last: a configuration that is refused leaves the engine as it was.
        self._running = _Running(programs, *placed)
        self.speculative_config = speculative_config

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Continues one or many prompts, given as text or token ids.

        ``sampling_params`` is one for all or one a prompt; None is what the model's makers
        recommend. An interrupt (Ctrl-C) stops at the next chunk and returns what is there, with
        finish reason "abort".
        """
        asked = self._intake.take(prompts, sampling_params, self._running.programs.rule)
        rows = self._rows(asked)
        with _progress(len(rows), use_tqdm) as advance, contextlib.suppress(KeyboardInterrupt):
            for _ in self._serve(rows, advance):
                pass
        for row in rows:  # those whose group an interrupt kept from its turn
            if row.output is None:
                self._finish(row, "abort", None, 0.0)
        return _collect(asked, rows)

    def chat(
        self,
        messages: Sequence[Any],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answers a conversation, or several, given as ``{"role": ..., "content": ...}`` each."""
        return self.generate(
            self._intake.conversations(messages), sampling_params, use_tqdm=use_tqdm
        )

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> Iterator[Delta]:
        """Yields what is new of each sample as it comes; texts joined are `generate`'s texts."""
        asked = self._intake.take(prompts, sampling_params, self._running.programs.rule)
        return self._deltas(self._rows(asked))

    def stream_chat(
        self,
        messages: Sequence[Any],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> Iterator[Delta]:
        """`stream` for a conversation, or several."""
        return self.stream(self._intake.conversations(messages), sampling_params)

    def get_default_sampling_params(self) -> SamplingParams:
        """How the model's makers recommend to sample; plain sampling where they say nothing."""
        return self.model.sampling_params

    def warmup(self, *, rows: int = 1, max_tokens: int | None = None) -> None:
        """Compiles the programs for ``rows`` rows of up to ``max_tokens`` tokens with the prompt.

        None is the smallest buffer. Later calls of that size start without compiling, but for
        several samples of one prompt, whose shared prefill is a program of its own.
        """
        require_integer("rows", rows, at_least=1)
        wanted = SMALLEST_BUFFER if max_tokens is None else max_tokens
        require_integer("max_tokens", wanted, at_least=2)
        wanted = min(wanted, self.max_model_len)
        usual = self.get_default_sampling_params()
        params = replace(usual, max_tokens=wanted - 1, temperature=0.0)
        batch = [
            Row(row, 0, [0], params, jax.random.key(0), self._detokenizer(params))
            for row in range(rows)
        ]
        running = self._running
        request, state = self._start(running, batch)
        jax.block_until_ready(self._advance(running, request, state, np.ones(rows, bool)))

    # Requests.

    def _rows(self, asked: list[Asked]) -> list[Row]:
        rows = []
        for number, one in enumerate(asked):
            key = self._request_key(one.params)
            for sample in range(one.params.n):
                row = Row(
                    request=number,
                    index=sample,
                    prompt=one.ids,
                    params=one.params,
                    key=jax.random.fold_in(key, sample),
                    detokenizer=self._detokenizer(one.params),
                    bad_words=one.bad_words,
                    grammar=one.grammar,
                )
                rows.append(row)
        return rows

    def _request_key(self, params: SamplingParams):
        number, self._requests = self._requests, self._requests + 1
        if params.seed is not None:
            return seed_key(params.seed)
        return jax.random.fold_in(self._key, number)

    def _detokenizer(self, params: SamplingParams) -> Detokenizer:
        return Detokenizer(
            self.tokenizer,
            stop=params.stop_strings,
            include_stop=params.include_stop_str_in_output,
            skip_special_tokens=params.skip_special_tokens,
        )

    # Decoding.

    def _serve(self, rows: list[Row], advance=lambda finished: None) -> Iterator[list[Row]]:
        """Decodes all rows, in groups; yields the group after each chunk."""
        for group in groups(rows, self.max_num_seqs):
            for _ in self._serve_group(group):
                advance(sum(row.output is not None for row in rows))
                yield group

    def _serve_group(self, group: list[Row]) -> Iterator[None]:
        first = began = time.perf_counter()
        # A stream goes on with what it began with, whatever `set_speculation` does meanwhile.
        running = self._running
        try:
            request, state = self._start(running, group)
            jax.block_until_ready(state.finish)
            first = time.perf_counter()
            for row in group:
                row.ttft = first - began
            self._take(group, state, None, first)
            yield
            while True:
                ended = np.array([row.output is not None for row in group])
                if all(ended):
                    return
                state, trace = self._advance(running, request, state, ended)
                self._take(group, state, jax.device_get(trace), first)
                yield
        finally:
            for row in group:
                if row.output is None:
                    self._finish(row, "abort", None, time.perf_counter() - first)

    def _start(self, running: "_Running", group: list[Row]):
        request, tokens, prompt_of_row = self._request(group)
        state = running.programs.start(
            running.params, running.drafter_params, request, tokens, prompt_of_row
        )
        return request, state

    def _advance(self, running: "_Running", request, state, ended: np.ndarray):
        """One chunk of rounds, without the rows that the host has ended at stop strings."""
        halt = np.pad(ended, (0, len(request.limit) - len(ended)))
        rounds = np.int32(self.rounds_per_chunk)
        return running.programs.advance(
            running.params, running.drafter_params, request, state, rounds, halt
        )

    def _request(self, group: list[Row]) -> tuple[Request, Array, Array | None]:
        """Arrays of a group, padded to a power of two of rows that are done from the start."""
        prompts = distinct_prompts(group)
        shared = len(prompts) < len(group)
        rows = next_power_of_two(len(group))
        wanted = max(len(row.prompt) + (row.params.max_tokens or 0) for row in group)
        buffer = min(next_power_of_two(max(wanted, SMALLEST_BUFFER)), self.max_model_len)
        tokens = np.zeros((next_power_of_two(len(prompts)), buffer), np.int32)
        for place, ids in enumerate(prompts.values()):
            tokens[place, : len(ids)] = ids
        source = [list(prompts).index(row.request) for row in group]
        idle = [None] * (rows - len(group))
        return (
            request_arrays([*group, *idle], buffer, self.model.eos_ids, self.model.vocab_size),
            jnp.asarray(tokens),
            jnp.asarray(source + [0] * len(idle), jnp.int32) if shared else None,
        )

    def _take(self, group, state, trace: Trace | None, since: float) -> None:
        """Brings new tokens to the host, turns them to text, and ends rows that are through."""
        context, finish, stats, scores = jax.device_get(
            (state.context, state.finish, state.stats, state.scores)
        )
        seconds = time.perf_counter() - since
        for place, row in enumerate(group):
            if row.output is not None:
                continue
            begin = len(row.prompt) + len(row.token_ids)
            new = context.tokens[place, begin : context.length[place]].tolist()
            if row.params.logprobs is not None:
                output = slice(len(row.prompt), int(context.length[place]))
                row.scores = jax.tree.map(
                    lambda part, at=place, output=output: part[at, output], scores
                )
            self._take_row(row, place, new, int(finish[place]), stats, trace, seconds)

    def _take_row(self, row, place, new, finish, stats: Stats, trace, seconds) -> None:
        before, row.counts = row.counts, Counts.of_row(stats, place)
        had = len(row.token_ids)
        text = row.detokenizer.push(new)
        stop = row.detokenizer.finished
        if stop is not None:
            new = new[: row.detokenizer.tokens_kept - had]
            if before is not None and trace is not None:
                row.counts = before.cut(row.counts, trace, place, len(new))
        row.token_ids += new
        row.pending_ids += new
        row.text += text
        row.pending_text += text
        if stop is not None:
            self._finish(row, "stop", stop, seconds)
        elif finish != RUNNING:
            self._finish(row, FINISH_REASONS[finish], _stop_id(row, finish), seconds)

    def _finish(self, row: Row, reason: str, stop, seconds: float) -> None:
        rest = row.detokenizer.flush()
        row.text += rest
        row.pending_text += rest
        none = np.zeros(self._running.programs.drafter.max_depth, np.int64)
        metrics = Metrics(
            prompt_tokens=len(row.prompt),
            output_tokens=len(row.token_ids),
            ttft=row.ttft,
            decode_seconds=seconds if len(row.token_ids) > 1 else 0.0,
            counts=row.counts or Counts(0, 0, none, none, 0, 0),
        )
        logprobs = token_logprobs(row.scores, row.token_ids, row.params.logprobs)
        row.output = CompletionOutput(
            row.index, row.text, row.token_ids, reason, stop, metrics, logprobs
        )

    def _deltas(self, rows: list[Row]) -> Iterator[Delta]:
        told = set()
        for group in self._serve(rows):
            for row in group:
                if id(row) in told or not (row.pending_ids or row.pending_text or row.output):
                    continue
                text, row.pending_text = row.pending_text, ""
                ids, row.pending_ids = row.pending_ids, []
                if row.output is not None:
                    told.add(id(row))
                yield Delta(row.request, row.index, text, ids, row.output)

    # Loading.

    def _model_len(self, wanted: int | None) -> int:
        limit = self.model.max_position
        if wanted is None:
            return limit
        if not 2 <= wanted <= limit:
            raise ValueError(f"max_model_len is {wanted}: this model takes 2 to {limit}")
        return wanted

    def _load_draft(self, model) -> Loaded:
        is_loaded = isinstance(model, Model)
        loaded = model if is_loaded else load(model, dtype=self._dtype, mesh=self._mesh)
        difference = self.tokenizer.first_difference(loaded.tokenizer)
        if difference is not None:
            raise ValueError(
                f"the draft model's tokenizer differs at id {difference.id}: the target has "
                f"{difference.mine!r}, the draft {difference.theirs!r}; draft with a model of the "
                "same tokenizer"
            )
        return Loaded(self._served(loaded.target), loaded.params, loaded.max_position)

    def _served(self, target):
        """The target for contexts of ``max_model_len``, where that makes a difference to it."""
        return target.within(self.max_model_len) if hasattr(target, "within") else target


def _parsed(config: Mapping[str, Any] | SpeculativeConfig | None) -> SpeculativeConfig:
    return config if isinstance(config, SpeculativeConfig) else SpeculativeConfig.parse(config)


def _stop_id(row: Row, finish: int) -> int | None:
    last = row.token_ids[-1]
    return last if finish == STOPPED and last in (row.params.stop_token_ids or ()) else None


def _collect(asked: list[Asked], rows: list[Row]) -> list[RequestOutput]:
    outputs: list[list[Any]] = [[] for _ in asked]
    for row in rows:
        outputs[row.request].append(row.output)
    return [
        RequestOutput(one.text, one.ids, done) for one, done in zip(asked, outputs, strict=True)
    ]


@contextlib.contextmanager
def _progress(total: int, wanted: bool):
    """A bar of finished samples that appears only where the work takes over two seconds."""
    if not wanted:
        yield lambda finished: None
        return
    from tqdm.auto import tqdm

    with tqdm(total=total, desc="generating", unit=" samples", delay=QUIET_SECONDS) as bar:

        def advance(finished):
            bar.update(finished - bar.n)

        yield advance

"""The sampler that is certified: `specjax.generate` after one prompt, through the whole loop."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from specjax.generation import generate, next_power_of_two
from specjax.sampling import Sampling
from specjax.testing.quick_compilation import jit_quickly
from specjax.testing.reference import Sequences, require_in_range, require_in_vocabulary
from specjax.types import NO_TOKEN, Generation

CHUNK = 8
Settings = tuple[Mapping[str, Any], ...]
# Parameters that are a number a row, as they are where nothing is asked for; and all others.
NUMBERS = {
    "temperature": 1.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "min_tokens": 0,
}
OTHERS = (
    *("logit_bias", "allowed_token_ids", "banned_token_ids", "bad_words", "stop_token_ids"),
    *("grammar", "logits_processor", "num_speculative_tokens"),
)


@dataclass(frozen=True, eq=False)
class LoopSampler:
    """Rows of ``depth`` tokens by a rule and a drafter; a row that ends repeats its last token.

    ``model`` has a ``target``, its ``params``, a ``prompt`` and a ``vocabulary``, as
    `specjax.testing.tables.Table` does. ``settings`` are parameters in the names of
    `specjax.testing.reference.log_probs`; of several, each row takes one at random, so that rows
    asked for different things lie side by side, and begins with that one's number: a row that got
    its neighbour's would not show in the average. ``num_speculative_tokens`` among them limits what
    a row drafts. Raises ValueError for a parameter of another name, a value that `SamplingParams`
    refuses, and no settings at all.
    """

    model: Any
    depth: int
    rule: Any
    drafter: Any = None
    drafter_params: Any = None
    settings: Settings = ({},)

    def __post_init__(self):
        for name in {name for setting in self.settings for name in setting}:
            if name not in (*NUMBERS, *OTHERS):
                known = ", ".join((*NUMBERS, *OTHERS))
                raise ValueError(f"unknown parameter {name!r}; known: {known}")
        if not self.settings:
            raise ValueError("settings is empty: give one at least, {} for the model's own law")
        for setting in self.settings:
            require_in_range(setting)
            require_in_vocabulary(setting, self.model.vocabulary)

    def __call__(self, seed: int, rows: int) -> Int[Array, "rows depth"]:
        generation = self.generate(seed, rows)
        place = generation.prompt_length[:, None] + jnp.arange(self.depth)
        last = generation.length[:, None] - 1
        tokens = jnp.take_along_axis(generation.tokens, jnp.minimum(place, last), axis=1)
        if len(self.settings) == 1:
            return tokens
        return jnp.concatenate([self.setting_of(seed, rows)[:, None], tokens], axis=1)

    def setting_of(self, seed: int, rows: int) -> Int[np.ndarray, " rows"]:
        """The number of the setting that each row takes."""
        return np.random.default_rng(seed).integers(len(self.settings), size=rows)

    def generate(self, seed: int, rows: int) -> Generation:
        """What `specjax.generate` returns for these rows."""
        model = self.model
        of_row = self.setting_of(seed, rows)
        ends = _padded(_column(self.settings, "stop_token_ids", ()))[of_row]
        limits = _column(self.settings, "num_speculative_tokens", None)
        limited = any(limit is not None for limit in limits)
        most = 0 if self.drafter is None else self.drafter.max_depth
        drafted = np.array([most if limit is None else limit for limit in limits])[of_row]
        return _generate(
            (model.target, self.drafter, self.rule, self.depth),
            (model.params, self.drafter_params),
            jnp.asarray(model.prompt, jnp.int32),
            jax.random.key(seed),
            _sampling(self.settings, of_row, ends, model.vocabulary),
            jnp.asarray(ends),
            jnp.asarray(drafted) if limited else None,
        )


@functools.partial(jit_quickly, static_argnums=0)
def _generate(run, params, prompt, key, sampling, ends, max_drafted) -> Generation:
    target, drafter, rule, depth = run
    rows, width = len(ends), len(prompt)
    return generate(
        target,
        params[0],
        jnp.broadcast_to(prompt, (rows, width)),
        key,
        drafter=drafter,
        drafter_params=params[1],
        rule=rule,
        sampling=sampling,
        max_new_tokens=depth,
        eos_ids=ends,
        buffer=next_power_of_two(width + depth),
        prefill_chunk=CHUNK,
        max_drafted=max_drafted,
    )


def settings_law(model: Any, depth: int, settings: Settings) -> np.ndarray | Sequences:
    """The law of `LoopSampler`'s rows: [V, ..., V], or of a setting's number and its tokens."""
    laws = [model.law(depth, **_for_reference(one)) for one in settings]
    if len(laws) == 1:
        return laws[0]
    return {
        (number, *map(int, np.unravel_index(place, law.shape))): float(law.flat[place]) / len(laws)
        for number, law in enumerate(laws)
        for place in np.flatnonzero(law)
    }


def _for_reference(setting):
    of_drafter = {"num_speculative_tokens"}
    kept = {name: value for name, value in setting.items() if name not in of_drafter}
    if "logits_processor" in kept:
        kept["logits_processor"] = kept["logits_processor"].reference
    return kept


def _sampling(settings, of_row, ends, vocabulary) -> Sampling:
    """The parameters of each row; what no setting has is left out."""
    used = {name for setting in settings for name in setting}
    columns: dict[str, Any] = {
        name: np.array(_column(settings, name, default))[of_row]
        for name, default in NUMBERS.items()
        if name in used
    }
    if "min_tokens" in used:
        columns["ends"] = ends
    if used & {"logit_bias", "allowed_token_ids", "banned_token_ids"}:
        columns["bias"] = np.stack([_bias(one, vocabulary) for one in settings])[of_row]
    if "bad_words" in used:
        words = [_padded(words, left=True) for words in _column(settings, "bad_words", [[]])]
        columns["bad_words"] = _stacked(words)[of_row]
    if "grammar" in used:
        columns |= _grammar(settings, of_row, vocabulary)
    if "logits_processor" in used:
        each = _column(settings, "logits_processor", None)
        columns["processor"] = next(one for one in each if one is not None)
        columns["processed"] = np.array([one is not None for one in each])[of_row]
    return Sampling.create(len(of_row), **columns)


def _column(settings, name, default) -> list[Any]:
    return [setting.get(name, default) for setting in settings]


def _bias(setting, vocabulary):
    bias = np.zeros(vocabulary, np.float32)
    for token, value in setting.get("logit_bias", {}).items():
        bias[token] = value
    bias[list(setting.get("banned_token_ids", ()))] = -np.inf
    allowed = setting.get("allowed_token_ids", range(vocabulary))
    return np.where(np.isin(np.arange(vocabulary), list(allowed)), bias, -np.inf)


def _grammar(settings, of_row, vocabulary):
    """One automaton for all rows: a state that allows everything, then table below table."""
    from specjax.grammar import Grammar

    tables = [np.zeros((1, vocabulary), np.int32)]
    offsets: dict[bytes, int] = {}
    starts = []
    for table in _column(settings, "grammar", None):
        if table is None:
            starts.append(0)
            continue
        content = table.tobytes()
        if content not in offsets:
            offset = offsets[content] = sum(map(len, tables))
            tables.append(np.where(table < 0, -1, table + offset))
        starts.append(offsets[content])
    grammar = Grammar(
        jnp.asarray(np.concatenate(tables), jnp.int32), jnp.arange(vocabulary), jnp.int32(0)
    )
    return {"grammar": grammar, "grammar_start": np.array(starts)[of_row]}


def _padded(rows, left=False) -> Int[np.ndarray, "rows width"]:
    width = max(1, *map(len, rows))
    padded = np.full((len(rows), width), NO_TOKEN, np.int32)
    for row, ids in zip(padded, rows, strict=True):
        if len(ids):
            row[slice(width - len(ids), None) if left else slice(len(ids))] = ids
    return padded


def _stacked(tables) -> Int[np.ndarray, "settings words width"]:
    """Tables of several sizes as one, padded with -1 at the start of words and after the last."""
    words, width = (max(table.shape[axis] for table in tables) for axis in (0, 1))
    each = [
        np.pad(
            table,
            ((0, words - table.shape[0]), (width - table.shape[1], 0)),
            constant_values=NO_TOKEN,
        )
        for table in tables
    ]
    return np.stack(each)

"""The small models, the scripted drafter and the oracles that tests share.

- ``TABLE`` scores the next token from the last four, by four tables that are its parameters:
  `markov` (only the last token counts), `counting` (last + 1, certain) and `lagged` (all four).
- ``TINY`` is a random transformer with a sliding window on one of its layers.
- `Script` drafts what it is told to, so that acceptance patterns are forced.
- `oracle_decode` decodes one token at a time in NumPy, recomputing the whole sequence without a
  cache; it shares no code with what it judges, but for the noise, which is part of the contract.
"""

import contextlib
import functools
import inspect
import logging
import os
import re
import typing
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from specjax import noise, tree
from specjax.accept import RULES, default_rule
from specjax.checkpoint import Model
from specjax.draft import DRAFTERS
from specjax.draft.host import Built, Host, Loaded
from specjax.generation import generate
from specjax.llm import LLM
from specjax.models import DecoderConfig, DecoderTarget, Rope
from specjax.programs import Programs, check_compatible
from specjax.recompute import Recompute
from specjax.sampling import Sampling
from specjax.tokenizer import Tokenizer
from specjax.types import (
    NO_TOKEN,
    Context,
    Draft,
    Feedback,
    Generation,
    Request,
    SpecState,
    Stats,
)

VOCABULARY = 16
LAGS = 4
ROWS = 4
FULL_SCALE = os.environ.get("SPECJAX_TEST_SCALE") == "full"
# Draft lengths for what must hold at each of them.
DRAFT_LENGTHS = tuple(range(1, 9)) if FULL_SCALE else (1, 5)
BUFFER = 64
CHUNK = 8
EOS_IDS = 2


# --- TABLE: MARKOV, COUNT and a law with a memory -----------------------------------------------


def table_logits(params, tokens):
    """Sum over lags of params[lag][token that many places back]; missing tokens add nothing."""
    place = jnp.arange(tokens.shape[1])
    total = params[0][tokens]
    for lag in range(1, LAGS):
        earlier = params[lag][jnp.roll(tokens, lag, axis=1)]
        total = total + jnp.where((place >= lag)[:, None], earlier, 0.0)
    return total


TABLE = Recompute(table_logits)


def table_oracle(params, tokens: np.ndarray) -> np.ndarray:
    """What TABLE computes, in float64: [B, L] token ids to [B, L, V] logits."""
    params = np.asarray(params, np.float64)
    total = params[0][tokens]
    for lag in range(1, min(LAGS, tokens.shape[1])):
        total[:, lag:] += params[lag][tokens[:, :-lag]]
    return total


def lagged(seed: int = 0, vocabulary: int = VOCABULARY, scale: float = 1.0) -> jax.Array:
    """Tables of all lags drawn at random: a law that a wrong or stale context changes."""
    rng = np.random.default_rng(seed)
    tables = rng.normal(size=(LAGS, vocabulary, vocabulary)) * scale
    return jnp.asarray(tables, jnp.float32)


def markov(table: np.ndarray) -> jax.Array:
    """Parameters that make TABLE the Markov chain with these logits [V, V]."""
    table = np.asarray(table, np.float32)
    return jnp.zeros((LAGS, *table.shape), jnp.float32).at[0].set(table)


def near(params: jax.Array, seed: int, distance: float) -> jax.Array:
    """Parameters some way off: a draft model that is right now and then."""
    shift = np.random.default_rng(seed).normal(size=params.shape) * distance
    return params + jnp.asarray(shift, params.dtype)


# --- TINY: a transformer and its NumPy twin -----------------------------------------------------

TINY_CONFIG = DecoderConfig(
    vocab_size=61,
    hidden_size=32,
    intermediate_size=48,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    max_position=512,
    windows=(None, 8, None),
)
TINY = DecoderTarget(TINY_CONFIG)


def random_params(target: DecoderTarget, seed: int = 0) -> dict[str, Any]:
    """Weights under which attention matters as much as the last token does."""
    rng = np.random.default_rng(seed)

    def draw(path, leaf):
        name = path[-1].key
        value = rng.normal(size=leaf.shape)
        if name.endswith("norm"):
            value = 1 + 0.1 * value
        elif name.endswith("bias"):
            value = 0.3 * value
        elif name != "embed":
            value = value * 1.5 / np.sqrt(_inputs(name, leaf.shape, target.stacked))
        return jnp.asarray(value, leaf.dtype)

    return jax.tree_util.tree_map_with_path(draw, target.abstract_params())


def _inputs(name, shape, stacked):
    if name == "head":
        return shape[1]
    own = shape[1:] if stacked else shape
    return np.prod(own[:-1]) if name == "out" else own[0]


@functools.cache
def tiny_params(seed: int = 0) -> dict[str, Any]:
    return random_params(TINY, seed)


def decoder_oracle(
    config: DecoderConfig, params: dict[str, Any], tokens: np.ndarray, dtype=np.float64
) -> np.ndarray:
    """Logits [B, L, V] of a Llama-like decoder: every layer over the whole sequence, no cache."""
    return decoder_residuals(config, params, tokens, dtype)[1]


def decoder_residuals(
    config: DecoderConfig, params: dict[str, Any], tokens: np.ndarray, dtype=np.float64
) -> tuple[list[np.ndarray], np.ndarray]:
    """The residual stream after each layer and the logits, in NumPy."""
    params = jax.tree.map(lambda leaf: np.asarray(leaf, dtype), params)
    angles = _angles(config.rope, tokens.shape[1], config.head_dim).astype(dtype)
    x, residuals = params["embed"][tokens], []
    for layer in range(config.num_layers):
        x = _layer(config, _layer_weights(params["layers"], layer), layer, x, angles)
        residuals.append(x)
    x = _rms(x, params["norm"], config.rms_norm_eps)
    head = params["embed"] if config.tie_embeddings else params["head"]
    return residuals, x @ head.T


def _layer_weights(layers, index):
    if index in layers:
        return layers[index]
    return {name: weight[index] for name, weight in layers.items()}


def _layer(config, weights, index, x, angles):
    normed = _rms(x, weights["attention_norm"], config.rms_norm_eps)
    heads = np.einsum("ble,ekgw->blkgw", normed, weights["qkv"]) + weights.get("qkv_bias", 0)
    q, k, v = heads[..., :-2, :], heads[..., -2, :], heads[..., -1, :]
    if config.qk_norm:
        q = _rms(q, weights["q_norm"], config.rms_norm_eps)
        k = _rms(k, weights["k_norm"], config.rms_norm_eps)
    q, k = _turn(q, angles[:, None, None]), _turn(k, angles[:, None])
    scores = np.einsum("blkgw,bmkw->bkglm", q, k) / np.sqrt(config.head_dim)
    behind = np.arange(x.shape[1])[:, None] - np.arange(x.shape[1])
    window = (config.windows or (None,) * config.num_layers)[index]
    seen = (behind >= 0) & (behind < (window or np.inf))
    scores = np.where(seen, scores, -np.inf)
    weight = np.exp(scores - scores.max(-1, keepdims=True))
    weight /= weight.sum(-1, keepdims=True)
    mixed = np.einsum("bkglm,bmkw->blkgw", weight, v)
    x = x + np.einsum("blkgw,kgwe->ble", mixed, weights["out"])
    normed = _rms(x, weights["mlp_norm"], config.rms_norm_eps)
    gate, up = (normed @ weights["gate_up"][:, half] for half in (0, 1))
    return x + (gate / (1 + np.exp(-gate)) * up) @ weights["down"]


def _rms(x, weight, eps):
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * weight


def _angles(rope: Rope, length: int, width: int) -> np.ndarray:
    frequency = 1.0 / rope.theta ** (np.arange(0, width, 2) / width)
    if rope.kind == "linear":
        frequency = frequency / rope.factor
    if rope.kind == "llama3":
        frequency = np.array([_llama3(rope, one) for one in frequency])
    return np.arange(length)[:, None] * frequency


def _llama3(rope, frequency):
    wavelength = 2 * np.pi / frequency
    if wavelength > rope.original_max_position / rope.low_freq_factor:
        return frequency / rope.factor
    if wavelength < rope.original_max_position / rope.high_freq_factor:
        return frequency
    smooth = rope.original_max_position / wavelength - rope.low_freq_factor
    smooth /= rope.high_freq_factor - rope.low_freq_factor
    return (1 - smooth) * frequency / rope.factor + smooth * frequency


def _turn(x, angles):
    low, high = np.split(x, 2, axis=-1)
    cos, sin = np.cos(angles), np.sin(angles)
    return np.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1)


# --- ORACLE -------------------------------------------------------------------------------------

Logits = Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True)
class Prompts:
    """Right-padded prompts [B, BUFFER] and their lengths [B]."""

    tokens: np.ndarray
    length: np.ndarray

    @classmethod
    def of(cls, *rows, buffer: int = BUFFER, padding: int = 0) -> "Prompts":
        tokens = np.full((len(rows), buffer), padding, np.int32)
        for row, prompt in zip(tokens, rows, strict=True):
            row[: len(prompt)] = prompt
        return cls(tokens, np.array([len(row) for row in rows], np.int32))

    @classmethod
    def random(cls, lengths, vocabulary: int, seed: int = 0, buffer: int = BUFFER) -> "Prompts":
        rng = np.random.default_rng(seed)
        return cls.of(*(rng.integers(0, vocabulary, size) for size in lengths), buffer=buffer)

    def take(self, rows) -> "Prompts":
        return Prompts(self.tokens[rows], self.length[rows])


def oracle_decode(
    logits: Logits, prompts: Prompts, new_tokens: int, sampling: Sampling | None = None, keys=None
) -> np.ndarray:
    """Plain decoding of every row, one token at a time, to at most the buffer's end: [B, L].

    Without ``sampling`` it is greedy; else it draws argmax(log p + g_t), g_t the row's own noise.
    """
    tokens, length = prompts.tokens.copy(), prompts.length.copy()
    rows = np.arange(len(length))
    for _ in range(new_tokens):
        writes = length < tokens.shape[1]
        after = logits(tokens[:, : length.max()])[rows, length - 1]
        if sampling is not None:
            after = oracle_log_probs(sampling, after) + token_noise(keys, length, after.shape[-1])
        tokens[rows[writes], length[writes]] = np.argmax(after, axis=-1)[writes]
        length = length + writes
    return tokens


def token_noise(keys, position: np.ndarray, size: int) -> np.ndarray:
    """The noise of each row's token at an absolute position."""
    draw = jax.vmap(noise.token, in_axes=(0, 0, None))
    return np.asarray(draw(keys, jnp.asarray(position), size), np.float64)


def oracle_log_probs(sampling: Sampling, logits: np.ndarray) -> np.ndarray:
    """Each row's law [B, V]: temperature, min-p, top-k, top-p, by sorting."""
    values = jax.tree.map(np.asarray, sampling)
    return np.stack([_row_law(values, row, logits[row]) for row in range(len(logits))])


def _row_law(values, row, logits):
    if values.temperature[row] < 1e-5:
        return np.where(np.arange(len(logits)) == np.argmax(logits), 0.0, -np.inf)
    law = _normalised(logits / np.float64(values.temperature[row]))
    cuts = values.truncation
    if cuts is None:
        return law
    order = np.argsort(-law, kind="stable")
    if cuts.min_p[row] > 0:
        law = _normalised(np.where(np.exp(law - law.max()) >= cuts.min_p[row], law, -np.inf))
    if 0 < cuts.top_k[row] < len(law):
        law = _normalised(_only(law, order[: cuts.top_k[row]]))
    if cuts.top_p[row] < 1:
        reached = np.cumsum(np.exp(law[order])) >= cuts.top_p[row]
        law = _normalised(_only(law, order[: np.argmax(reached) + 1] if reached.any() else order))
    return law


def _only(law, kept):
    return np.where(np.isin(np.arange(len(law)), kept), law, -np.inf)


def _normalised(logits):
    peak = logits.max()
    return logits - peak - np.log(np.sum(np.exp(logits - peak)))


# --- SCRIPT -------------------------------------------------------------------------------------


@typing.no_type_check
@struct.dataclass
class Prescription:
    """What `Script` drafts, a row each; rounds beyond the last begin again.

    ``proposal`` holds the token to propose for each absolute position. In round r ``drafted[r]``
    tokens are drafted, of which the one after the first ``right[r]`` is replaced by ``wrong[r]``,
    or, where that is -1, by another than proposed.
    """

    proposal: Any
    right: Any
    wrong: Any
    drafted: Any

    @classmethod
    def create(cls, proposal, *, right, drafted, wrong=NO_TOKEN) -> "Prescription":
        """Scalars, one list of rounds for all rows, or one list a row."""
        proposal = jnp.asarray(proposal, jnp.int32)
        rounds = max(
            np.shape(values)[-1] if np.ndim(values) else 1 for values in (right, drafted, wrong)
        )
        shape = (proposal.shape[0], rounds)

        def fill(values):
            return jnp.broadcast_to(jnp.asarray(values, jnp.int32), shape)

        return cls(proposal, fill(right), fill(wrong), fill(drafted))

    def take(self, rows) -> "Prescription":
        return jax.tree.map(lambda x: x[np.asarray(rows)], self)


@dataclass(frozen=True)
class Script:
    """Drafts chains as its `Prescription` says, round by round."""

    num_speculative_tokens: int
    has_law: bool = False
    is_chain: bool = True
    taps: tuple[int, ...] = ()
    needs: tuple[str, ...] = ()
    reranks: bool = False
    forwards: int = 0

    @property
    def num_nodes(self) -> int:
        return self.num_speculative_tokens + 1

    @property
    def max_depth(self) -> int:
        return self.num_speculative_tokens

    @property
    def widths(self) -> tuple[int, ...]:
        return (1, self.num_nodes)

    def init(self, params, prompt: Context, features, slots: int):
        return jnp.zeros_like(prompt.length)

    def draft(self, params, state, context: Context, choose) -> tuple[Draft, Any]:
        def this_round(values):
            return jnp.take_along_axis(values, (state % values.shape[1])[:, None], axis=1)

        place = context.length[:, None] + jnp.arange(-1, self.num_speculative_tokens)
        limit = params.proposal.shape[1] - 1
        tokens = jnp.take_along_axis(params.proposal, jnp.clip(place, 0, limit), axis=1)
        root = jnp.take_along_axis(context.tokens, context.length[:, None] - 1, axis=1)
        tokens = tokens.at[:, :1].set(root)
        another = jnp.where(tokens == 0, 1, tokens - 1)
        wrong = jnp.where(this_round(params.wrong) == NO_TOKEN, another, this_round(params.wrong))
        tokens = jnp.where(
            jnp.arange(self.num_nodes) == this_round(params.right) + 1, wrong, tokens
        )
        drafted = this_round(params.drafted)[:, 0]
        return Draft(tokens, tree.padded_chain(drafted, self.num_nodes)), state

    def update(self, params, state, feedback: Feedback):
        return state + (feedback.count > 0)


# --- Methods of the registry, built for the small models ----------------------------------------

DRAFT_LENGTH = 4
# Options that a method needs and that no default serves; a newcomer's go here.
OPTIONS = {
    "num_speculative_tokens": DRAFT_LENGTH,
    "exit_layer": 1,
    "model": "a draft model",
    "prompt_lookup_min": 1,
}


@dataclass(frozen=True, eq=False)
class Method:
    """A drafter of the registry with a target that it works on, and the target's oracle."""

    name: str
    drafter: Any
    drafter_params: Any
    target: Any
    params: Any
    oracle: Callable[[Any, np.ndarray], np.ndarray]
    vocabulary: int

    def logits(self, tokens: np.ndarray) -> np.ndarray:
        return self.oracle(self.params, tokens)

    @property
    def default_rule(self) -> str:
        return default_rule(self.drafter.has_law, self.drafter.is_chain)

    def plain(self) -> "Method":
        built = DRAFTERS["none"](host_of(self))
        return replace(self, name="none", drafter=built.drafter, drafter_params=built.params)


def host_of(method: Method) -> Host:
    return _host(method.target, method.params, method.vocabulary, lambda name: None)


def _host(target, params, vocabulary, load) -> Host:
    return Host(target, params, vocabulary, 10_000, CHUNK, load)


def table_host(params=None, draft_params=None) -> Host:
    """TABLE as the target, and a draft model that agrees with it now and then."""
    params = lagged() if params is None else params
    draft_params = near(params, 1, 0.5) if draft_params is None else draft_params
    return _host(TABLE, params, params.shape[-1], lambda name: Loaded(TABLE, draft_params, 10_000))


def tiny_host() -> Host:
    """TINY as the target, and its first layer with other noise as a draft model."""
    loaded = Loaded(TINY.first_layers(2), tiny_params(), 10_000)
    return _host(TINY, tiny_params(), TINY_CONFIG.vocab_size, lambda name: loaded)


def build(name: str, host: Host, **options) -> Built:
    """Builds a method of the registry, with `OPTIONS` for whatever it takes of them."""
    takes = inspect.signature(DRAFTERS[name]).parameters
    known = {option: value for option, value in OPTIONS.items() if option in takes}
    return DRAFTERS[name](host, **known | {k: v for k, v in options.items() if k in takes})


def on_table(name: str, **options) -> Method:
    host = table_host()
    built = build(name, host, **options)
    return Method(name, *built, TABLE, host.params, table_oracle, VOCABULARY)


def on_tiny(name: str, **options) -> Method:
    host = tiny_host()
    oracle = functools.partial(decoder_oracle, TINY_CONFIG)
    return Method(
        name, *build(name, host, **options), TINY, host.params, oracle, TINY_CONFIG.vocab_size
    )


@functools.cache
def method(name: str) -> Method:
    """The method on TABLE, which compiles fast; on TINY if it refuses a target without layers."""
    try:
        return on_table(name)
    except ValueError:
        return on_tiny(name)


def scripted(
    subject: Method,
    prompts: Prompts,
    *,
    right,
    drafted=None,
    wrong=NO_TOKEN,
    draft_length: int = DRAFT_LENGTH,
    proposal: np.ndarray | None = None,
) -> Method:
    """A `Script` on ``subject``'s target: it knows the greedy output, or takes ``proposal``."""
    if proposal is None:
        proposal = oracle_decode(subject.logits, prompts, prompts.tokens.shape[1])
    drafted = draft_length if drafted is None else drafted
    prescription = Prescription.create(proposal, right=right, drafted=drafted, wrong=wrong)
    return replace(
        subject, name="script", drafter=Script(draft_length), drafter_params=prescription
    )


def counting(vocabulary: int = VOCABULARY, unused: int = 0) -> Method:
    """COUNT, decoded plainly; it never says the last ``unused`` ids of the vocabulary."""
    said = vocabulary - unused
    table = np.full((vocabulary, vocabulary), -np.inf)
    table[np.arange(vocabulary), (np.arange(vocabulary) + 1) % said] = 0
    return replace(on_table("none"), params=markov(table))


METHODS = tuple(DRAFTERS)
SPECULATING = tuple(name for name in DRAFTERS if name != "none")


def allowed(name: str) -> tuple[str, ...]:
    """Names of the rules that may verify this method's drafts."""
    return tuple(rule for rule in RULES if _compatible(method(name).drafter, RULES[rule]))


def _compatible(drafter, rule) -> bool:
    try:
        check_compatible(drafter, rule)
    except ValueError:
        return False
    return True


def rules_tried(*, sampling: bool = False) -> tuple[str, ...]:
    """Rules for what hardly depends on the rule: all at full scale, else one of each kind.

    The contracts and the laws try every rule.
    """
    kinds = ("greedy", default_rule(True), "matching", "coupled")
    names = RULES if FULL_SCALE else kinds
    return tuple(name for name in names if not (sampling and RULES[name].greedy_only))


def _pairs(rules_of: Callable[[str], tuple[str, ...]]) -> tuple[tuple[str, str], ...]:
    return tuple(
        (name, rule) for name in METHODS for rule in allowed(name) if rule in rules_of(name)
    )


def _usual(name: str) -> tuple[str, ...]:
    return rules_tried() if name == "draft_model" else (method(name).default_rule, "coupled")


# At full scale every method with every rule; else every method with two rules and one with a rule
# of each kind, and for what is most easily broken that one with all of them.
PAIRS = _pairs((lambda name: tuple(RULES)) if FULL_SCALE else _usual)
EVERY_RULE = tuple(
    dict.fromkeys([*PAIRS, *(("draft_model", one) for one in allowed("draft_model"))])
)


# --- LLM over TABLE -----------------------------------------------------------------------------

LETTERS = "abcdefghijklmnop"
ECHO = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def letter_tokenizer() -> Tokenizer:
    """One token a letter, a to p; spaces are no tokens."""
    import tokenizers

    backend = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({letter: id for id, letter in enumerate(LETTERS)}, "?")
    )
    backend.normalizer = tokenizers.normalizers.Replace(tokenizers.Regex(r"\s"), "")
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex("."), "isolated")
    backend.decoder = tokenizers.decoders.Fuse()
    return Tokenizer(backend, chat_template=ECHO)


def letter_model(params, *, eos_ids=(), max_position: int = BUFFER, tokenizer=None) -> Model:
    return Model(
        target=TABLE,
        params=params,
        tokenizer=tokenizer or letter_tokenizer(),
        eos_ids=tuple(eos_ids),
        vocab_size=VOCABULARY,
        max_position=max_position,
    )


NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1}


def alphabet_llm(*, eos_ids=(), **options) -> LLM:
    """Goes on with the alphabet, and drafts it from the prompt or the output so far."""
    options = {"speculative_config": NGRAM} | options
    return LLM(letter_model(counting().params, eos_ids=eos_ids), **options)


def uniform_llm(**options) -> LLM:
    """Says every letter equally often."""
    flat = markov(np.zeros((VOCABULARY, VOCABULARY)))
    return LLM(letter_model(flat), **{"speculative_config": NGRAM} | options)


# --- Running ------------------------------------------------------------------------------------


def row_keys(seed: int, rows: int) -> jax.Array:
    return noise.row_keys(jax.random.key(seed), rows)


def eos_rows(eos_ids, rows: int) -> jax.Array:
    """[B, EOS_IDS] padded with -1, from one list or one a row."""
    lists = eos_ids if eos_ids and not isinstance(eos_ids[0], int) else [eos_ids] * rows
    return jnp.asarray([[*ids, *[-1] * (EOS_IDS - len(ids))] for ids in lists], jnp.int32)


def sampling_for(rule: str, rows: int, **values) -> Sampling:
    """Sampling rows, but greedy ones for a rule that only decides greedily."""
    return Sampling.create(
        rows, **values | ({"temperature": 0.0} if RULES[rule].greedy_only else {})
    )


def decode(
    method: Method,
    rule: str,
    prompts: Prompts,
    keys,
    *,
    sampling: Sampling | None = None,
    budget=BUFFER,
    eos_ids=(),
    chunk: int = CHUNK,
    mesh=None,
) -> Generation:
    """`generate` with shapes that all tests share: rows, buffer, chunk and end ids."""
    rows, buffer = prompts.tokens.shape
    return generate(
        method.target,
        method.params,
        jnp.asarray(prompts.tokens),
        keys,
        drafter=method.drafter,
        drafter_params=method.drafter_params,
        rule=rule,
        sampling=sampling_for(rule, rows) if sampling is None else sampling,
        max_new_tokens=jnp.asarray(budget, jnp.int32) if np.ndim(budget) else int(budget),
        eos_ids=eos_rows(eos_ids, rows),
        prompt_length=jnp.asarray(prompts.length),
        buffer=buffer,
        prefill_chunk=chunk,
        mesh=mesh,
    )


@dataclass(frozen=True, eq=False)
class Session:
    """A generation advanced by hand, some rounds at a time, by the programs `decode` uses."""

    method: Method
    programs: Programs
    request: Request
    state: SpecState

    @classmethod
    def begin(
        cls,
        method: Method,
        rule: str,
        prompts: Prompts,
        keys,
        *,
        sampling: Sampling | None = None,
        budget=BUFFER,
        eos_ids=(),
        mesh=None,
    ) -> "Session":
        rows, buffer = prompts.tokens.shape
        programs = Programs(method.target, method.drafter, RULES[rule], CHUNK, mesh=mesh)
        params, drafter_params = programs.place_all(method.params, method.drafter_params)
        method = replace(method, params=params, drafter_params=drafter_params)
        length = jnp.asarray(prompts.length)
        request = Request(
            prompt_length=length,
            limit=jnp.minimum(length + jnp.asarray(budget, jnp.int32), buffer),
            eos_ids=eos_rows(eos_ids, rows),
            keys=keys,
            sampling=sampling_for(rule, rows) if sampling is None else sampling,
        )
        tokens = jnp.asarray(prompts.tokens)
        state = programs.start(method.params, method.drafter_params, request, tokens)
        return cls(method, programs, request, state)

    def advance(self, rounds: int = 1) -> "Session":
        """The session after some more rounds; this one's state is used up."""
        state, _ = self.programs.advance(
            self.method.params,
            self.method.drafter_params,
            self.request,
            self.state,
            np.int32(rounds),
        )
        return replace(self, state=state)

    @property
    def running(self) -> bool:
        return bool(np.any(~np.asarray(self.state.done)))

    def snapshot(self) -> SpecState:
        """A copy on the host, which later rounds cannot use up."""
        return jax.tree.map(np.array, self.state)


@contextlib.contextmanager
def compilations() -> Iterator[list[str]]:
    """The names of all functions compiled meanwhile, single operations too, as JAX logs them."""
    with jax.log_compiles(), _logged("jax", r"Compiling (\S+) ") as names:
        yield names


@contextlib.contextmanager
def announcements() -> Iterator[list[str]]:
    """The programs compiled meanwhile, as the package itself announces them."""
    logger = logging.getLogger("specjax")
    level = logger.level
    logger.setLevel(logging.INFO)
    try:
        with _logged("specjax", r"compiling (.+)") as programs:
            yield programs
    finally:
        logger.setLevel(level)


@contextlib.contextmanager
def _logged(logger: str, pattern: str) -> Iterator[list[str]]:
    found: list[str] = []

    class Collect(logging.Handler):
        def emit(self, record):
            if match := re.match(pattern, record.getMessage()):
                found.append(match[1])

    handler = Collect()
    logging.getLogger(logger).addHandler(handler)
    try:
        yield found
    finally:
        logging.getLogger(logger).removeHandler(handler)


# --- Judging ------------------------------------------------------------------------------------


def outputs(result: Generation | SpecState) -> list[list[int]]:
    """Prompt and output of each row, without what lies beyond."""
    context = result.context if isinstance(result, SpecState) else result
    tokens, length = np.asarray(context.tokens), np.asarray(context.length)
    return [row[:end].tolist() for row, end in zip(tokens, length, strict=True)]


def trimmed(tokens: np.ndarray, length) -> list[list[int]]:
    """Each row of an oracle's tokens, cut to a length."""
    return [row[:end].tolist() for row, end in zip(tokens, np.asarray(length), strict=True)]


def assert_same(first: Any, second: Any) -> None:
    """Two pytrees are equal bit for bit."""
    assert jax.tree.structure(first) == jax.tree.structure(second)
    for one, other in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))


def acceptance_rate(stats: Stats) -> float:
    return float(np.sum(stats.accepted) / np.sum(stats.drafted))

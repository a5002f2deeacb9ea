"""Cases TR1, TR3, R3: branching drafts through the whole loop."""

import functools
import itertools
import typing
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from accept.registry import TREES
from fixtures import (
    BUFFER,
    FULL_SCALE,
    ROWS,
    TINY,
    Method,
    Prompts,
    Session,
    decode,
    markov,
    on_table,
    on_tiny,
    oracle_decode,
    oracle_log_probs,
    outputs,
    row_keys,
    token_noise,
    trimmed,
)
from flax import struct

from specjax import loop
from specjax.generation import generate
from specjax.history import drafted_paths
from specjax.sampling import Sampling
from specjax.sharding import make_mesh
from specjax.testing.pearson import pearson
from specjax.types import Context, Draft, Feedback

GREEDY = Sampling.create(ROWS, temperature=0.0)


@typing.no_type_check
@struct.dataclass
class Told:
    """What the last round told the drafter."""

    features: Any
    path: Any


@dataclass(frozen=True)
class Branches:
    """Drafts one tree in every round: known tokens down one path, others beside it.

    Its parameters are the tokens [B, L] that it knows. Node n beside the path carries the token
    that is known there plus n, modulo the vocabulary, so siblings differ.
    """

    parents: tuple[int, ...]
    path: tuple[int, ...]
    vocabulary: int
    taps: tuple[int, ...] = ()
    has_law: bool = False
    is_chain: bool = False
    reranks: bool = False
    forwards: int = 0

    @property
    def num_nodes(self) -> int:
        return len(self.parents)

    @property
    def depths(self) -> tuple[int, ...]:
        depths = [0]
        for parent in self.parents[1:]:
            depths.append(depths[parent] + 1)
        return tuple(depths)

    @property
    def max_depth(self) -> int:
        return max(self.depths)

    @property
    def widths(self) -> tuple[int, ...]:
        return (self.num_nodes,)

    @property
    def needs(self) -> tuple[str, ...]:
        return ("features",) if self.taps else ()

    def init(self, params, prompt: Context, features, slots: int):
        rows, depths = prompt.tokens.shape[0], self.max_depth + 1
        width = None if features is None else jnp.zeros((rows, depths, *features.shape[2:]))
        return Told(width, jnp.zeros((rows, depths), jnp.int32))

    def draft(self, params, state, context: Context, choose) -> tuple[Draft, Any]:
        place = context.length[:, None] - 1 + jnp.array(self.depths)
        known = jnp.take_along_axis(params, jnp.minimum(place, params.shape[1] - 1), axis=1)
        node = jnp.arange(self.num_nodes)
        beside = (known + node) % self.vocabulary
        on_path = jnp.isin(node, jnp.array([0, *self.path]))
        parents = jnp.broadcast_to(jnp.array(self.parents), known.shape)
        root = jnp.take_along_axis(context.tokens, context.length[:, None] - 1, axis=1)
        tokens = jnp.where(on_path, known, beside).at[:, :1].set(root)
        return Draft(tokens, parents), state

    def update(self, params, state, feedback: Feedback):
        return Told(feedback.features, feedback.path)


# Paths that are out of order, so that accepted nodes must be moved.
SHAPES = {
    "two": ((-1, 0, 0, 2), (2, 3)),
    "three": ((-1, 0, 0, 1, 2, 4, 4), (2, 4, 6)),
}


def branching(subject: Method, shape: str, known: np.ndarray, **options) -> Method:
    drafter = Branches(*SHAPES[shape], subject.vocabulary, **options)
    return replace(subject, name="branches", drafter=drafter, drafter_params=jnp.asarray(known))


def prefilled(tokens):
    """Cache and features of committed tokens, forwarded afresh and all at once."""
    cache = TINY.init_cache(*tokens.shape)
    return jax.jit(functools.partial(TINY, taps=(0, 1, 2)))(
        on_tiny("none").params, jnp.asarray(tokens), None, cache
    )


EACH = itertools.product(SHAPES, (1, 2)) if FULL_SCALE else [("two", 1), ("three", 2)]


@pytest.mark.parametrize(("shape", "devices"), EACH)
def test_TR1_what_a_path_leaves_is_what_a_fresh_prefill_would(shape, devices):
    """Cache, features and ids after each round, full and sliding layers; then plain output."""
    plain = on_tiny("none")
    prompts = Prompts.random((5, 9, 2, 7), plain.vocabulary, seed=2)
    known = oracle_decode(plain.logits, prompts, BUFFER)
    subject = branching(plain, shape, known, taps=(0, 1, 2))
    mesh = make_mesh(data=1, model=2) if devices == 2 else None
    session = Session.begin(
        subject, "matching", prompts, row_keys(0, ROWS), sampling=GREEDY, mesh=mesh
    )
    accepted = len(SHAPES[shape][1])
    for rounds in range(1, 4):
        before = session.snapshot().context.length
        session = session.advance()
        state = session.snapshot()
        np.testing.assert_array_equal(state.context.length, before + accepted + 1)
        np.testing.assert_array_equal(state.cache.length, state.context.length - 1)
        assert outputs(state) == trimmed(known, state.context.length)
        fresh = prefilled(state.context.tokens)
        for row, length in enumerate(state.cache.length):
            for part in ("k", "v"):
                held, anew = (getattr(cache, part)[:, row] for cache in (state.cache, fresh.cache))
                np.testing.assert_allclose(held[:, :, :length], anew[:, :, :length], atol=1e-5)
            told = state.draft_state.features[row]
            at = slice(before[row] - 1, before[row] + accepted)
            np.testing.assert_allclose(told, fresh.features[row, at], atol=2e-5)
        np.testing.assert_array_equal(state.draft_state.path, [[0, *SHAPES[shape][1]]] * ROWS)
        assert np.all(state.stats.accepted == rounds)
    result = decode(subject, "matching", prompts, row_keys(0, ROWS), sampling=GREEDY, mesh=mesh)
    assert outputs(result) == trimmed(known, result.length)


def test_TR1_nodes_left_where_they_were_are_found(monkeypatch):
    """The twin: commits as if the path had been the first nodes."""
    monkeypatch.setattr("specjax.cache.KVCache._gather", lambda self, slots: self)
    plain = on_tiny("none")
    prompts = Prompts.random((5, 9, 2, 7), plain.vocabulary, seed=2, buffer=BUFFER // 2)
    known = oracle_decode(plain.logits, prompts, BUFFER // 2)
    subject = branching(plain, "two", known)
    result = decode(subject, "matching", prompts, row_keys(0, ROWS), sampling=GREEDY)
    assert outputs(result) != trimmed(known, result.length)


# --- history of a node ----------------------------------------------------------------------------

PENALISED = {"presence_penalty": 1.5, "frequency_penalty": 0.4}
WARM = Sampling.create(ROWS, temperature=[0.0, 1.0, 0.7, 0.0], **PENALISED)


def never_twice(logits, past):
    """No token comes twice in a row."""
    last = past.tokens[past.length - 1]
    return jnp.where(jnp.arange(logits.shape[0]) == last, -jnp.inf, logits)


def plain_output(subject, prompts, keys, sampling, steps):
    """In NumPy: penalties over the output, no token twice, and the row's own noise."""
    rows = []
    for row, size in enumerate(prompts.length):
        tokens = prompts.tokens[row, :size].tolist()
        own = Sampling.create(1, temperature=sampling.temperature[row])
        for _ in range(steps):
            logits = subject.logits(np.array([tokens]))[0, -1].copy()
            counts = np.bincount(tokens[size:], minlength=len(logits))
            logits -= 1.5 * (counts > 0) + np.float32(0.4) * counts
            logits[tokens[-1]] = -np.inf
            law = oracle_log_probs(own, logits[None])[0]
            drawn = law + token_noise(keys[row : row + 1], np.array([len(tokens)]), len(law))[0]
            tokens.append(int(np.argmax(drawn)))
        rows.append(tokens)
    return rows


@functools.cache
def scene():
    plain = on_table("none")
    prompts, keys = Prompts.random((5, 9, 2, 7), plain.vocabulary, seed=3), row_keys(1, ROWS)
    rows = plain_output(plain, prompts, keys, WARM, 24)
    known = Prompts.of(*rows).tokens
    return branching(plain, "three", known), prompts, keys, rows


def penalised(rule, buffer=BUFFER):
    subject, prompts, keys, rows = scene()
    roomier = Prompts.of(
        *(row[:size] for row, size in zip(rows, prompts.length, strict=True)), buffer=buffer
    )
    sampling = replace(WARM, processor=never_twice, processed=jnp.ones(ROWS, bool))
    return decode(subject, rule, roomier, keys, sampling=sampling, budget=24), rows


@pytest.mark.parametrize("rule", TREES)
def test_TR3_a_nodes_history_is_its_own_path(rule):
    """Greedy rows by every rule, sampled ones by the rule that promises plain sampling's tokens.

    Siblings carry tokens next to the right ones, which a flat history would have penalised.
    """
    result, rows = penalised(rule)
    said = outputs(result)
    for row, temperature in enumerate(WARM.temperature):
        if rule == "coupled" or temperature == 0:
            assert said[row] == rows[row]
        assert all(a != b for a, b in zip(said[row][-24:], said[row][-23:], strict=False))
    assert np.asarray(result.stats.accepted)[[0, 3]].sum() > ROWS


def flat_paths(draft, depth):
    """The twin: all nodes of the list that come before a node count as its history."""
    nodes = draft.tokens.shape[1]
    before = jnp.tril(jnp.ones((nodes, nodes), bool)).at[:, 0].set(False)[:, 1:]
    own = drafted_paths(draft, depth)
    flat = jnp.where(before[None, :, :depth], draft.tokens[:, None, 1 : depth + 1], -1)
    return jnp.where(own[..., :1] == -1, own, flat)


def test_TR3_siblings_taken_for_history_are_found(monkeypatch):
    """Another buffer is another program."""
    monkeypatch.setattr(loop, "drafted_paths", flat_paths)
    result, rows = penalised("coupled", buffer=BUFFER + 16)
    assert outputs(result) != rows


# --- what follows a branch ------------------------------------------------------------------------

FORK = {0: [0.9, 0.1, 0, 0], 1: [0.1, 0.9, 0, 0], 2: [0.5, 0.5, 0, 0], 3: [0, 0, 1, 0]}


@pytest.mark.parametrize("rule", TREES)
def test_R3_the_token_after_a_branch_is_that_branchs(rule, scale):
    """After a 2 the drafts 0 and 1 branch, with opposite laws after them."""
    rows = scale(4_000, 100_000)
    with np.errstate(divide="ignore"):
        table = np.log(np.array([FORK[token] for token in range(4)]))
    drafter = Branches((-1, 0, 0), (2,), 4)
    generation = generate(
        on_table("none").target,
        markov(table),
        jnp.full((rows, 1), 3),
        jax.random.key(5),
        drafter=drafter,
        drafter_params=jnp.zeros((rows, 8), jnp.int32),
        rule=rule,
        max_new_tokens=3,
        buffer=8,
        prefill_chunk=4,
    )
    tokens = np.asarray(generation.tokens)[:, 1:4]
    assert np.all(tokens[:, 0] == 2)
    pairs = np.bincount(2 * tokens[:, 1] + tokens[:, 2], minlength=4)
    assert abs(pearson(pairs, np.array([0.45, 0.05, 0.05, 0.45])).z) < 5
    assert np.asarray(generation.stats.accepted)[:, 0].mean() > 0.4

"""Grammars inside verification: the output matches, and is plain decoding's under the grammar."""

import functools
import re

import jax.numpy as jnp
import numpy as np
import pytest
from fixtures import (
    METHODS,
    ROWS,
    SPECULATING,
    Prompts,
    decode,
    method,
    oracle_log_probs,
    outputs,
    row_keys,
    token_noise,
)

from specjax.grammar import compile_regex, union
from specjax.history import History
from specjax.sampling import Sampling

NEW = 24
PATTERNS = ("(?:[abc]{2}|d)*e", "f?(?:[a-i]b?){3,9}", None, "(?:ab|ba|c){2,}d")
TEMPERATURES = (1.0, 0.7, 1.0, 0.0)
LETTERS = "abcdefghijklmn"


def letters_of(id: int) -> str:
    """One letter for each of the first ids, then two."""
    first = LETTERS[id % len(LETTERS)]
    return first if id < len(LETTERS) else first + LETTERS[id // len(LETTERS) - 1]


def ends(vocabulary: int) -> list[int]:
    return [vocabulary - 2, vocabulary - 1]


@functools.cache
def constrained(vocabulary: int) -> Sampling:
    """A row for each pattern; the last two ids are ends."""
    pieces = [letters_of(id).encode() for id in range(vocabulary - 2)] + [None, None]
    each = [pattern and compile_regex(pattern, pieces, ends(vocabulary)) for pattern in PATTERNS]
    grammar, starts = union(each)
    return Sampling.create(ROWS, temperature=TEMPERATURES, grammar=grammar, grammar_start=starts)


@functools.cache
def expected(name: str):
    """Plain decoding in NumPy, each row's automaton followed by hand."""
    subject, keys = method(name), row_keys(3, ROWS)
    prompts = Prompts.random((5, 9, 1, 7), subject.vocabulary, seed=6)
    sampling = constrained(subject.vocabulary)
    next_state, token_class = map(
        np.asarray, (sampling.grammar.next_state, sampling.grammar.token_class)
    )
    rows = []
    for row, state in enumerate(np.asarray(sampling.grammar_start)):
        tokens = prompts.tokens[row, : prompts.length[row]].tolist()
        own = Sampling.create(1, temperature=TEMPERATURES[row])
        for _ in range(NEW):
            ahead = next_state[state, token_class]
            logits = np.where(ahead < 0, -np.inf, subject.logits(np.array([tokens]))[0, -1])
            law = oracle_log_probs(own, logits[None])
            noise = token_noise(keys[row : row + 1], np.array([len(tokens)]), len(logits))
            tokens.append(int(np.argmax((law + noise)[0])))
            state = ahead[tokens[-1]]
            if tokens[-1] in ends(subject.vocabulary):
                break
        rows.append(tokens)
    return prompts, keys, rows


def decoded(name, rule, sampling=None, budget=NEW):
    subject = method(name)
    prompts, keys, _ = expected(name)
    return decode(
        subject,
        rule,
        prompts,
        keys,
        sampling=constrained(subject.vocabulary) if sampling is None else sampling,
        budget=budget,
        eos_ids=ends(subject.vocabulary),
    )


@pytest.mark.parametrize("name", METHODS)
def test_coupled_output_is_plain_decodings_under_the_grammar(name):
    """Rows with three grammars and without one, one of them greedy, in one call."""
    result = decoded(name, "coupled")
    assert outputs(result) == expected(name)[2]
    if name in SPECULATING:
        assert np.asarray(result.stats.accepted).sum() > 0


@pytest.mark.parametrize("name", METHODS)
def test_what_ends_matches_and_the_rest_can_be_completed(name):
    """By the drafter's own rule, which is another than `coupled`."""
    subject = method(name)
    prompts, _, _ = expected(name)
    result = decoded(name, subject.default_rule)
    sampling = constrained(subject.vocabulary)
    reasons = []
    for row, pattern in enumerate(PATTERNS):
        *ids, last = outputs(result)[row][prompts.length[row] :]
        ended = last in ends(subject.vocabulary)
        reasons.append(ended)
        if pattern is None:
            continue
        if ended:
            assert re.fullmatch(pattern, "".join(map(letters_of, ids)))
        state = sampling.grammar_start[row]
        for id in [*ids, last]:
            state = sampling.grammar.next_state[state, sampling.grammar.token_class[id]]
            assert state >= 0
    assert any(reasons)


def forgetful(self, sampling):
    """The root's state at every node: what was drafted above a node is forgotten."""
    return jnp.broadcast_to(self.seen.grammar_state[:, None], self.path.shape[:2])


def test_a_state_that_does_not_follow_the_path_is_found(monkeypatch):
    """The twin of the first test. Another budget's buffer is another program."""
    name = SPECULATING[0]
    monkeypatch.setattr(History, "grammar_state", forgetful)
    subject = method(name)
    prompts, keys, rows = expected(name)
    wide = Prompts.of(
        *(row[:n] for row, n in zip(prompts.tokens, prompts.length, strict=True)), buffer=80
    )
    result = decode(
        subject,
        "coupled",
        wide,
        keys,
        sampling=constrained(subject.vocabulary),
        budget=NEW,
        eos_ids=ends(subject.vocabulary),
    )
    assert outputs(result) != rows

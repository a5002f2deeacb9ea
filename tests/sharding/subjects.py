"""The transformer that is run over meshes: every axis that is split divides by 2 and by 4."""

import functools
from typing import Any

import jax.numpy as jnp
import numpy as np
from fixtures import Prompts, random_params

from specjax.draft import DRAFTERS, Built, Host
from specjax.models import DecoderConfig, DecoderTarget
from specjax.sampling import Sampling

CHUNK, BUFFER, NEW_TOKENS = 8, 64, 24
CONFIG = DecoderConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=64,
    num_layers=2,
    num_heads=8,
    num_kv_heads=4,
    head_dim=8,
    max_position=512,
)
TARGET = DecoderTarget(CONFIG)
OPTIONS = {
    "none": {},
    "ngram": {"num_speculative_tokens": 3, "prompt_lookup_min": 1},
    "early_exit": {"exit_layer": 1, "num_speculative_tokens": 2},
}
SETTINGS = {
    "buffer": BUFFER,
    "prefill_chunk": CHUNK,
    "max_new_tokens": NEW_TOKENS,
    "rule": "coupled",
}


@functools.cache
def params() -> dict[str, Any]:
    return random_params(TARGET)


def built(method: str, target: DecoderTarget, weights: dict[str, Any]) -> Built:
    host = Host(target, weights, target.config.vocab_size, 10_000, CHUNK, lambda name: None)
    return DRAFTERS[method](host, **OPTIONS[method])


def prompts() -> Prompts:
    """Four ragged prompts in which single tokens come again, so that prompt lookup drafts."""
    return Prompts.random([3, 17, 8, 11], CONFIG.vocab_size, seed=1, buffer=20)


def greedy_and_sampled() -> Sampling:
    return Sampling.create(4, temperature=jnp.asarray([0.0, 0.9, 0.0, 1.0]))


def output(generation) -> list[list[int]]:
    """The tokens of each row that count, prompt and output."""
    lengths = np.asarray(generation.length)
    rows = np.asarray(generation.tokens)
    return [list(row[:length]) for row, length in zip(rows, lengths, strict=True)]

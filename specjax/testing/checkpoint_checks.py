"""The certificate of a checkpoint: its own law, made small by top-k.

With top-k 3 two tokens have at most nine sequences, whatever the vocabulary, and their law takes
four forwards of the plain model. A checkpoint is slow beside a table, so there are fewer rows, and
the certificate says how much larger a bias they are sure to find.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from specjax.checkpoint import Model
from specjax.draft import DRAFTERS, Host
from specjax.testing.evidence import Evidence
from specjax.testing.joint import joint_law_test
from specjax.testing.loop_sampler import CHUNK, LoopSampler
from specjax.testing.reference import Sequences, sequence_law

ROWS_OF_BUDGET = {"fast": 2_000, "full": 20_000}
ROWS_A_CALL = 100
DEPTH, TOP_K, DRAFTED = 2, 3, 3
CELLS = TOP_K**DEPTH
# Something to look up, and something to go on with.
PROMPT = "The cat sat on the mat. The dog sat on the"


@dataclass(frozen=True)
class CheckpointCheck:
    """A rule and a drafter on the checkpoint."""

    rule: str
    drafter: str
    shape: str = "chain"
    model: str = "checkpoint"
    asks: str = f"top_k {TOP_K}"


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """A loaded model as `specjax.testing.tables.Table` is: target, parameters, prompt and law."""

    loaded: Model

    @property
    def target(self) -> Any:
        return self.loaded.target

    @property
    def params(self) -> Any:
        return self.loaded.params

    @property
    def vocabulary(self) -> int:
        return self.loaded.vocab_size

    @functools.cached_property
    def prompt(self) -> tuple[int, ...]:
        return tuple(self.loaded.tokenizer.encode(PROMPT))

    @functools.cached_property
    def law(self) -> Sequences:
        """The law of the first tokens after the prompt, by the plain model."""
        return sequence_law(self._next_logits, self.prompt, DEPTH, top_k=TOP_K)

    def _next_logits(self, contexts):
        rows, length = contexts.shape
        padded = np.zeros((TOP_K ** (DEPTH - 1), len(self.prompt) + DEPTH), np.int32)
        padded[:rows, :length] = contexts
        last = jnp.full(len(padded), length - 1, jnp.int32)
        return np.asarray(_logits(self.target, self.params, jnp.asarray(padded), last))[:rows]

    def build(self, drafter: str) -> tuple[Any, Any]:
        """A drafter that needs no other checkpoint, and its parameters."""
        window = {"num_speculative_tokens": DRAFTED}
        options: Mapping[str, dict[str, Any]] = {
            "none": {},
            "ngram": window | {"prompt_lookup_min": 1},
            "early_exit": window | {"exit_layer": self.target.config.num_layers // 2},
        }

        def load(_):
            raise ValueError("the certificate of a checkpoint loads no second one")

        host = Host(
            self.target, self.params, self.vocabulary, self.loaded.max_position, CHUNK, load
        )
        return tuple(DRAFTERS[drafter](host, **options[drafter]))


def checkpoint_checks(model: Checkpoint) -> list[CheckpointCheck]:
    """Each drafter that needs no second checkpoint, with the rules for it."""
    pairs = [("matching", "none"), ("matching", "ngram"), ("coupled", "ngram")]
    if model.target.config.num_layers > 1:
        pairs += [("rejection", "early_exit"), ("block", "early_exit"), ("coupled", "early_exit")]
    return [CheckpointCheck(*pair) for pair in pairs]


def gather(
    check: CheckpointCheck, model: Checkpoint, rules: Mapping[str, Any], rows: int, seed: int
) -> Evidence:
    """The sampled law of one check, from ``rows`` rows."""
    drafter, params = model.build(check.drafter)
    settings = ({"top_k": TOP_K},)
    sampler = LoopSampler(model, DEPTH, rules[check.rule], drafter, params, settings)
    result = joint_law_test(sampler, model.law, rows=rows, rows_a_call=ROWS_A_CALL, seed=seed)
    return Evidence(None, result.fit, result.independent)


@functools.partial(jax.jit, static_argnums=0)
def _logits(
    target: Any, params: Any, tokens: Int[Array, "B T"], last: Int[Array, " B"]
) -> Float[Array, "B V"]:
    cache = target.init_cache(*tokens.shape)
    return target(params, tokens, None, cache, logits_at=last).logits[:, 0].astype(jnp.float32)

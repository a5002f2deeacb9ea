"""A tiny random transformer whose joint law is computed from its own logits."""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from specjax.models.decoder import DecoderConfig, DecoderTarget
from specjax.testing import reference
from specjax.testing.tables import DEPTH, PROMPT, VOCABULARY

CONFIG = DecoderConfig(
    vocab_size=VOCABULARY,
    hidden_size=8,
    intermediate_size=16,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=4,
    max_position=64,
)
CONTEXT = 16


@dataclass(frozen=True, eq=False)
class Transformer:
    """Two layers with a KV cache, for drafters that need a target with layers.

    Offers what `specjax.testing.tables.Table` does: ``target``, ``params``, ``prompt``, ``law``.
    """

    seed: int = 5
    about: str = "a transformer with a KV cache"
    prompt: tuple[int, ...] = PROMPT

    @property
    def vocabulary(self) -> int:
        return VOCABULARY

    @property
    def target(self) -> DecoderTarget:
        return DecoderTarget(CONFIG)

    @functools.cached_property
    def params(self) -> dict[str, Any]:
        """Random weights, enlarged until the context matters as much as the last token."""
        params = self.target.init_params(jax.random.key(self.seed))
        layers = {
            name: weight if name.endswith("norm") else 16 * weight
            for name, weight in params["layers"].items()
        }
        return params | {
            "embed": 50 * params["embed"],
            "layers": layers,
            "head": 12 * params["head"],
        }

    def law(self, depth: int = DEPTH, **parameters: Any) -> Float[np.ndarray, "..."]:
        """Probability [V, ..., V] of each sequence of ``depth`` tokens after the prompt."""
        law = np.zeros((VOCABULARY,) * depth)
        sequences = reference.sequence_law(self._next_logits, self.prompt, depth, **parameters)
        for sequence, probability in sequences.items():
            law[sequence] = probability
        return law

    def _next_logits(self, contexts):
        rows, length = contexts.shape
        padded = np.zeros((VOCABULARY ** (DEPTH - 1), CONTEXT), np.int32)
        padded[:rows, :length] = contexts
        logits = _logits(self.target, self.params, jnp.asarray(padded))
        return np.asarray(logits)[:rows, length - 1]


@functools.partial(jax.jit, static_argnums=0)
def _logits(target: DecoderTarget, params: Any, tokens: Int[Array, "B T"]) -> Float[Array, "B T V"]:
    return target(params, tokens, None, target.init_cache(*tokens.shape)).logits

"""Next-token laws of a model, and of its early exit, along text that the model wrote itself."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from specjax.bench.compare import complete
from specjax.bench.prompts import read_prompts
from specjax.checkpoint import Model
from specjax.generation import next_power_of_two
from specjax.llm import LLM
from specjax.sampling_params import SamplingParams, require_integer
from specjax.testing.acceptance import Acceptance, Laws, sibling_acceptance
from specjax.types import Rule, Target


def text_laws(
    model: Model,
    exit_layer: int,
    prompts: Sequence[list[int]] | None = None,
    *,
    temperature: float = 1.0,
    positions: int = 384,
    seed: int = 0,
) -> tuple[Float[np.ndarray, "P V"], Float[np.ndarray, "P V"]]:
    """(log_p, log_q): the model's law and that of its first ``exit_layer`` layers.

    ``prompts`` (token ids; None: those that come with the package) are continued by sampling at
    ``temperature``, evenly until there are ``positions`` sampled tokens; the laws are those that
    each of them was, or would be, drawn from. Raises ValueError for a layer that the model lacks,
    and for a temperature of 0, at which every law is a point mass.
    """
    require_integer("positions", positions, at_least=1)
    if not temperature > 0:
        raise ValueError(f"temperature {temperature} leaves no law to draw from: choose above 0")
    early = model.target.first_layers(exit_layer)
    if prompts is None:
        prompts = [prompt.token_ids(model.tokenizer) for prompt in read_prompts()]
    each = -(-positions // len(prompts))
    sampled = SamplingParams(temperature=temperature, max_tokens=each, ignore_eos=True, seed=seed)
    outputs = complete(LLM(model, max_num_seqs=len(prompts)), prompts, sampled)
    size = next_power_of_two(max(map(len, prompts)) + each)

    def laws(target, prompt, output):
        text = np.zeros(size, np.int32)
        text[: len(prompt) + each] = [*prompt, *output.token_ids]
        drawn_at = len(prompt) - 1 + jnp.arange(each)
        return np.asarray(_laws(target, model.params, jnp.asarray(text), drawn_at, temperature))

    log_p, log_q = (
        np.concatenate([laws(target, *pair) for pair in zip(prompts, outputs, strict=True)])
        for target in (model.target, early)
    )
    return log_p[:positions], log_q[:positions]


def text_acceptance(
    model: Model,
    exit_layer: int,
    prompts: Sequence[list[int]] | None = None,
    *,
    rules: Mapping[str, Rule] | None = None,
    temperatures: Sequence[float] = (1.0, 0.7),
    positions: int = 384,
    drafts: int = 8,
    seed: int = 0,
) -> list[Acceptance]:
    """`sibling_acceptance` of ``rules`` (every lossless one) on `text_laws`, at each temperature.

    An early exit that was not trained agrees with its model rarely, so the figures are low; their
    shares of the bound tell more.
    """
    rows = []
    for temperature in temperatures:
        options = {"temperature": temperature, "positions": positions, "seed": seed}
        log_p, log_q = text_laws(model, exit_layer, prompts, **options)
        name = f"exit after {exit_layer} layers, temperature {temperature:g}"
        rows += sibling_acceptance(Laws(name, log_p, log_q), rules, drafts=drafts, seed=seed)
    return rows


@functools.partial(jax.jit, static_argnums=0)
def _laws(
    target: Target,
    params: Any,
    tokens: Int[Array, " T"],
    places: Int[Array, " P"],
    temperature: float | Float[Array, ""],
) -> Float[Array, "P V"]:
    """Log-laws of the tokens that follow ``places``."""
    cache = target.init_cache(1, tokens.shape[0])
    logits = target(params, tokens[None], None, cache).logits[0, places]
    return jax.nn.log_softmax(logits.astype(jnp.float32) / temperature, axis=-1)

"""Transformers as a peer: the same weights and prompts, in the same process, interleaved.

Needs PyTorch. Compared is the wall time of a whole request, prefill included, at equal numbers of
new tokens; Transformers decodes plainly and with its prompt lookup.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from specjax.bench.prompts import BenchPrompt
from specjax.bench.table import table
from specjax.checkpoint import Model
from specjax.llm import LLM
from specjax.models import DecoderConfig, Rope
from specjax.sampling_params import SamplingParams


@dataclass(frozen=True)
class PeerSummary:
    """Tokens a second of whole requests, medians over the prompts of one kind, and ratios."""

    kind: str
    prompts: int
    ours_plain: float
    theirs_plain: float
    ours_speculative: float
    theirs_speculative: float
    plain_ratio: float
    speculative_ratio: float


def compare_with_transformers(
    plain: LLM,
    speculative: LLM,
    prompts: Sequence[BenchPrompt],
    *,
    max_tokens: int,
    repeats: int,
    on_step: Callable[[], Any] = lambda: None,
) -> list[PeerSummary]:
    """Measures each prompt four ways, alternating, after one warm-up each; greedy, no EOS."""
    peer = to_transformers(plain.model)
    lookup = dict(speculative.speculative_config.options).get("num_speculative_tokens", 5)
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    ways = {
        "ours_plain": lambda ids: _ours(plain, ids, params),
        "theirs_plain": lambda ids: _theirs(peer, ids, max_tokens),
        "ours_speculative": lambda ids: _ours(speculative, ids, params),
        "theirs_speculative": lambda ids: _theirs(
            peer, ids, max_tokens, prompt_lookup_num_tokens=lookup
        ),
    }
    speeds: list[dict[str, float]] = []
    for prompt in prompts:
        ids = prompt.token_ids(plain.tokenizer)
        timed: dict[str, list[float]] = {name: [] for name in ways}
        for turn in range(repeats + 1):
            for name, way in ways.items():
                seconds = way(ids)
                if turn:
                    timed[name].append(max_tokens / seconds)
                on_step()
        speeds.append({name: statistics.median(values) for name, values in timed.items()})
    kinds = dict.fromkeys(prompt.kind for prompt in prompts)
    return [
        _summary(kind, [one for one, p in zip(speeds, prompts, strict=True) if p.kind == kind])
        for kind in kinds
    ]


def report(summaries: Sequence[PeerSummary], version: str) -> str:
    """The table, as Markdown."""
    header = ["prompts", "n", "plain", f"Transformers {version}", "ratio", "speculative"]
    header += ["its prompt lookup", "ratio "]
    rows = [
        (
            one.kind,
            one.prompts,
            f"{one.ours_plain:.1f}",
            f"{one.theirs_plain:.1f}",
            f"{one.plain_ratio:.2f}x",
            f"{one.ours_speculative:.1f}",
            f"{one.theirs_speculative:.1f}",
            f"{one.speculative_ratio:.2f}x",
        )
        for one in summaries
    ]
    return f"tokens/s of whole requests, prefill included\n\n{table(header, rows)}"


def to_transformers(model: Model) -> Any:
    """The model as Transformers' Llama, with the same weights in the same dtype.

    Raises ValueError without PyTorch, and for a model that is not plainly a Llama.
    """
    try:
        import torch  # pyright: ignore[reportMissingImports]
        from transformers import LlamaConfig, LlamaForCausalLM
    except ImportError:
        raise ValueError("--peer transformers needs PyTorch: pip install torch") from None
    config = model.target.config
    if model.target.quantization is not None:
        raise ValueError("--peer transformers compares the same weights: leave --quantization out")
    if config != _plain(config):
        raise ValueError("--peer transformers takes plain Llama models only, such as SmolLM2")
    settings = LlamaConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        rms_norm_eps=config.rms_norm_eps,
        tie_word_embeddings=config.tie_embeddings,
        max_position_embeddings=config.max_position,
        rope_parameters={"rope_type": "default", "rope_theta": _theta(config)},
        eos_token_id=None,
    )
    dtype = getattr(torch, model.dtype)
    peer = LlamaForCausalLM(settings).to(dtype).eval()
    tensors = {
        name: torch.from_numpy(np.array(value, np.float32)).to(dtype)
        for name, value in _state_dict(config, model.params).items()
    }
    missing, unexpected = peer.load_state_dict(tensors, strict=False)
    if unexpected or set(missing) - {"lm_head.weight"}:
        raise ValueError(f"weights don't fit Transformers' Llama: {missing} {unexpected}")
    peer.tie_weights()
    return peer


def _plain(config: DecoderConfig) -> DecoderConfig:
    """The Llama of the same sizes, and nothing else that a decoder may have."""
    return DecoderConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_layers=config.num_layers,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        max_position=config.max_position,
        rms_norm_eps=config.rms_norm_eps,
        rope=Rope(_theta(config)),
        tie_embeddings=config.tie_embeddings,
    )


def _theta(config: DecoderConfig) -> float:
    return Rope().theta if config.rope is None else config.rope.theta


def _state_dict(config: DecoderConfig, params: Any) -> dict[str, Any]:
    named = {"model.embed_tokens.weight": params["embed"], "model.norm.weight": params["norm"]}
    if not config.tie_embeddings:
        named["lm_head.weight"] = params["head"]
    for index in range(config.num_layers):
        named |= _layer_dict(config, _layer(params["layers"], index), f"model.layers.{index}.")
    return named


def _layer(layers, index):
    if index in layers:
        return layers[index]
    return {name: stacked[index] for name, stacked in layers.items()}


def _layer_dict(config, layer, at):
    width, group = config.hidden_size, config.group
    queries, keys, values = layer["qkv"][:, :, :group], *jnp.moveaxis(layer["qkv"], 2, 0)[-2:]
    return {
        f"{at}input_layernorm.weight": layer["attention_norm"],
        f"{at}self_attn.q_proj.weight": queries.reshape(width, -1).T,
        f"{at}self_attn.k_proj.weight": keys.reshape(width, -1).T,
        f"{at}self_attn.v_proj.weight": values.reshape(width, -1).T,
        f"{at}self_attn.o_proj.weight": layer["out"].reshape(-1, width).T,
        f"{at}post_attention_layernorm.weight": layer["mlp_norm"],
        f"{at}mlp.gate_proj.weight": layer["gate_up"][:, 0].T,
        f"{at}mlp.up_proj.weight": layer["gate_up"][:, 1].T,
        f"{at}mlp.down_proj.weight": layer["down"].T,
    }


def _ours(engine: LLM, ids, params) -> float:
    began = time.perf_counter()
    engine.generate([ids], params, use_tqdm=False)
    return time.perf_counter() - began


def _theirs(peer, ids, max_tokens, **lookup) -> float:
    import torch  # pyright: ignore[reportMissingImports]

    tokens = torch.tensor([ids])
    began = time.perf_counter()
    with torch.no_grad():
        peer.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            do_sample=False,
            max_new_tokens=max_tokens,
            pad_token_id=0,
            **lookup,
        )
    return time.perf_counter() - began


def _summary(kind: str, speeds: list[dict[str, float]]) -> PeerSummary:
    def middle(name):
        return statistics.median(one[name] for one in speeds)

    def ratio(ours, theirs):
        return statistics.median(one[ours] / one[theirs] for one in speeds)

    return PeerSummary(
        kind=kind,
        prompts=len(speeds),
        ours_plain=middle("ours_plain"),
        theirs_plain=middle("theirs_plain"),
        ours_speculative=middle("ours_speculative"),
        theirs_speculative=middle("theirs_speculative"),
        plain_ratio=ratio("ours_plain", "theirs_plain"),
        speculative_ratio=ratio("ours_speculative", "theirs_speculative"),
    )

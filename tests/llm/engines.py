"""The engines that these tests share: a tiny transformer behind a byte-level tokenizer."""

import functools

import tiny_tokenizers
from fixtures import random_params
from tokenizers import Tokenizer as Backend

from specjax import LLM
from specjax.checkpoint import Model
from specjax.models import DecoderConfig, DecoderTarget
from specjax.outputs import CompletionOutput
from specjax.tokenizer import Tokenizer

CORPUS = ["the quick brown fox jumps over the lazy dog", "déjà vu", "👍🏽 한글"]
VOCABULARY = 288
# EOS and BOS, as `byte_level` numbers them.
BOS, EOS = 0, 1
MAX_MODEL_LEN = 128
TURNS = "{% for m in messages %}<s>{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant:"
PROMPTS = ["the quick brown fox, the quick brown", "déjà vu déjà", "ab ab ab a", "dog 👍"]
# What each method of the registry needs to draft with the tiny transformer.
OPTIONS = {
    "none": {},
    "ngram": {"num_speculative_tokens": 3, "prompt_lookup_min": 1},
    "draft_model": {"num_speculative_tokens": 3},
    "early_exit": {"num_speculative_tokens": 3, "exit_layer": 1},
}
CONFIG = DecoderConfig(
    vocab_size=VOCABULARY,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    max_position=256,
)
TARGET = DecoderTarget(CONFIG)


def byte_level(swapped: tuple[str, str] | None = None) -> Tokenizer:
    """A byte-level BPE with two special tokens; optionally two of its tokens change places."""
    plain = tiny_tokenizers.byte_level(VOCABULARY, CORPUS)
    backend = plain.backend
    if swapped is not None:
        first, second = swapped
        text = backend.to_str().replace(f'"{first}":', '"<swap>":', 1)
        text = text.replace(f'"{second}":', f'"{first}":', 1).replace(
            '"<swap>":', f'"{second}":', 1
        )
        backend = Backend.from_str(text)
    return Tokenizer(backend, named_tokens=plain.named_tokens, chat_template=TURNS)


@functools.cache
def tiny_model(seed: int = 0) -> Model:
    return Model(
        target=TARGET,
        params=random_params(TARGET, seed),
        tokenizer=byte_level(),
        eos_ids=(EOS,),
        vocab_size=VOCABULARY,
        max_position=CONFIG.max_position,
    )


def tiny_llm(method: str = "ngram", **options) -> LLM:
    """The tiny transformer with a method of drafting, verified by the coupled rule."""
    config = {"method": method, "rule": "coupled", **OPTIONS[method]}
    if method == "draft_model":
        config["model"] = tiny_model(seed=1)
    return LLM(
        tiny_model(), **{"speculative_config": config, "max_model_len": MAX_MODEL_LEN} | options
    )


def first_outputs(llm: LLM, prompts, params) -> list[CompletionOutput]:
    return [result.outputs[0] for result in llm.generate(prompts, params)]


def told(outputs: list[CompletionOutput]) -> list[tuple]:
    """All that an output says, but for the time it took."""
    timing = ("ttft", "tpot", "tokens_per_second")
    return [
        (
            output.text,
            output.token_ids,
            output.finish_reason,
            output.stop_reason,
            {k: v for k, v in output.metrics.as_dict().items() if k not in timing},
        )
        for output in outputs
    ]

"""Calls with values of the wrong type, and the sentence that each must end in.

Run as a script, it prints what they raise: in tests the signatures are checked at run time, which
would stop such a value before the library sees it, and a user has no such check.
"""

import json

import jax
import numpy as np
from fixtures import NGRAM, TABLE, alphabet_llm, lagged

from specjax import LLM, SamplingParams
from specjax.generation import generate as specjax_generate
from specjax.outputs import RequestOutput
from specjax.sharding import make_mesh

GREEDY = {"temperature": 0.0, "max_tokens": 4}


def generate(prompts) -> list[RequestOutput]:
    return alphabet_llm().generate(prompts, SamplingParams(**GREEDY))


def chat(messages) -> list[RequestOutput]:
    return alphabet_llm().chat(messages, SamplingParams(**GREEDY))


def arrays(prompt=((0, 1), (2, 3)), key=None, **options):
    """`specjax.generate` of two rows."""
    key = jax.random.key(0) if key is None else key
    return specjax_generate(TABLE, lagged(), prompt, key, **options)


CASES = {
    "no prompt at all": (lambda: generate(None), "prompt 0 is None: give text, or a list"),
    "a number": (lambda: generate(5), "prompt 0 is 5: give text"),
    "a fraction": (lambda: generate(1.5), "prompt 0 is 1.5"),
    "bytes": (lambda: generate(b"abc"), "prompt 0 is b'abc'"),
    "fractions": (lambda: generate([1.0, 2.0]), "prompt 0 has 1.0 where a token id, an integer,"),
    "one fraction": (lambda: generate([1, 2.5]), "prompt 0 has 2.5 where"),
    "a letter among ids": (lambda: generate([1, "a"]), "prompt 0 has 'a' where"),
    "None among prompts": (lambda: generate(["ab", None]), "prompt 1 is None"),
    "a number among prompts": (lambda: generate(["ab", 3]), "prompt 1 is 3"),
    "lists in a prompt": (lambda: generate([[1, [2]]]), "prompt 0 has [2] where"),
    "lists in lists": (lambda: generate([[[1]]]), "prompt 0 has [1] where"),
    "an array of fractions": (lambda: generate(np.array([0.5])), "where a token id, an integer,"),
    "three dimensions": (lambda: generate(np.ones((1, 1, 1), int)), "prompt 0 has array([1])"),
    "a prompt's field": (lambda: generate({"prompt": 5}), "prompt 0 is 5"),
    "no messages": (lambda: chat(None), "a conversation is a list of"),
    "a bare message": (lambda: chat({"role": "user", "content": "a"}), "not dict"),
    "a message of text": (
        lambda: chat([{"role": "user", "content": "a"}, "b"]),
        "'b' is no message",
    ),
    "n": (lambda: SamplingParams(n="2"), "n is '2': it must be an integer"),
    "max_tokens": (lambda: SamplingParams(max_tokens=2.0), "max_tokens is 2.0: it must be an"),
    "temperature": (lambda: SamplingParams(temperature=None), "temperature is None: it must be a"),
    "top_p": (lambda: SamplingParams(top_p="0.9"), "top_p is '0.9': it must be a number"),
    "top_k": (lambda: SamplingParams(top_k=1.5), "top_k is 1.5: it must be an integer"),
    "seed": (lambda: SamplingParams(seed="7"), "seed is '7': it must be an integer"),
    "stop": (lambda: SamplingParams(stop=5), "stop is 5: it must be a string or a list of"),
    "stops": (lambda: SamplingParams(stop=[5]), "stop is [5]: it must be"),
    "ignore_eos": (lambda: SamplingParams(ignore_eos="no"), "ignore_eos is 'no': it must be True"),
    "special": (lambda: SamplingParams(skip_special_tokens="x"), "skip_special_tokens is 'x'"),
    "a set": (lambda: generate({1, 2}), "prompt 0 is {1, 2}"),
    "a number as conversation": (lambda: chat([5]), "5 is no conversation"),
    "a word as conversation": (lambda: chat(["hello"]), "'hello' is no conversation"),
    "a mesh": (lambda: alphabet_llm(mesh="x"), "mesh is 'x': make one with"),
    "a part of a mesh": (lambda: make_mesh(1.5), "data is 1.5: it must be an integer"),
    "stop id": (lambda: SamplingParams(stop_token_ids=5), "stop_token_ids is 5: it must be a list"),
    "stop ids": (lambda: SamplingParams(stop_token_ids=[1.5]), "stop_token_ids is [1.5]"),
    "biases": (
        lambda: SamplingParams(logit_bias=[(1, 2.0)]),
        "logit_bias is [(1, 2.0)]: it must be a dictionary",
    ),
    "no banned ids": (
        lambda: SamplingParams(banned_token_ids=None),
        "banned_token_ids is None: it must be a list",
    ),
    "a key of a config": (
        lambda: alphabet_llm(speculative_config={"method": "ngram", 3: 4}),
        "has the key 3: keys are strings",
    ),
    "a processor": (
        lambda: SamplingParams(logits_processor=3),
        "logits_processor is 3: it must be",
    ),
    "logprobs": (lambda: SamplingParams(logprobs=1.5), "logprobs is 1.5: it must be an integer"),
    "a bias": (lambda: SamplingParams(logit_bias={1: "2"}), "logit_bias of token 1 is '2'"),
    "allowed": (lambda: SamplingParams(allowed_token_ids=3), "allowed_token_ids is 3: it must be"),
    "bad words": (lambda: SamplingParams(bad_words=[3]), "bad_words is [3]: it must be a list"),
    "structure": (lambda: SamplingParams(structured_outputs="a"), "structured_outputs is 'a'"),
    "penalty": (lambda: SamplingParams(presence_penalty="1"), "presence_penalty is '1'"),
    "a true temperature": (
        lambda: SamplingParams(temperature=True),
        "temperature is True: it must",
    ),
    "a true top_p": (lambda: SamplingParams(top_p=True), "top_p is True: it must be a number"),
    "a false min_p": (lambda: SamplingParams(min_p=False), "min_p is False: it must be a number"),
    "a true penalty": (
        lambda: SamplingParams(presence_penalty=True),
        "presence_penalty is True: it must be a finite number",
    ),
    "a true bias": (lambda: SamplingParams(logit_bias={1: True}), "logit_bias of token 1 is True"),
    "params": (lambda: alphabet_llm().generate("ab", GREEDY), "is no SamplingParams: give one"),
    "a name as config": (
        lambda: alphabet_llm(speculative_config="ngram"),
        "speculative_config is 'ngram': give a dictionary such as",
    ),
    "no length": (
        lambda: alphabet_llm(
            speculative_config=NGRAM | {"num_speculative_tokens": None} | {"k": 1}
        ),
        "unknown key 'k'",
    ),
    "max_model_len": (lambda: alphabet_llm(max_model_len="32"), "max_model_len is '32': it must"),
    "max_num_seqs": (lambda: alphabet_llm(max_num_seqs=1.5), "max_num_seqs is 1.5: it must be an"),
    "the engine's seed": (lambda: alphabet_llm(seed=None), "seed is None: it must be an integer"),
    "rows": (lambda: alphabet_llm().warmup(rows=1.5), "rows is 1.5: it must be an integer"),
    "a draft model": (
        lambda: alphabet_llm(speculative_config={"method": "draft_model", "model": 5}),
        "the model is 5: give a name, a path or a loaded Model",
    ),
    "rows of fractions": (lambda: arrays([[0.5]]), "prompt is of type float64: give integers"),
    "ragged rows": (lambda: arrays([[0], [1, 2]]), "prompt has parts of different lengths: pad"),
    "rows of rows": (lambda: arrays([[[0]]]), "the prompt has shape (1, 1, 1): give"),
    "an integer key": (lambda: arrays(key=0), "key is 0: make one with jax.random.key"),
    "an old-style key": (
        lambda: arrays(key=jax.random.PRNGKey(0)),
        "key is an array of uint32: make one with jax.random.key, not PRNGKey",
    ),
    "a rule": (lambda: arrays(rule=3), "rule is 3: give a rule, or a name of greedy"),
    "a drafter": (lambda: arrays(drafter="ngram"), "drafter is 'ngram': give one of specjax.draft"),
    "sampling": (lambda: arrays(sampling={}), "sampling is {}: make it with Sampling.create(2"),
    "max_new_tokens": (lambda: arrays(max_new_tokens=2.5), "max_new_tokens is of type float64"),
    "end ids": (lambda: arrays(eos_ids=(1.5,)), "eos_ids is of type float64: give integers"),
    "end ids of 3 rows": (
        lambda: arrays(eos_ids=np.ones((3, 1), int)),
        "eos_ids has the shape [3, 1]: give [Z] for all rows, or [2, Z]",
    ),
    "buffer": (lambda: arrays(buffer=3.9), "buffer is 3.9: it must be an integer"),
    "prompt_length": (lambda: arrays(prompt_length=1.5), "prompt_length is of type float64"),
    "prefill_chunk": (lambda: arrays(prefill_chunk=8.0), "prefill_chunk is 8.0: it must be an"),
    "model": (lambda: LLM(5), "the model is 5: give a name, a path or a loaded Model"),
}


def fault(call) -> str:
    try:
        call()
    except Exception as raised:
        return f"{type(raised).__name__}: {raised}"
    return "nothing"


if __name__ == "__main__":
    print(json.dumps({name: fault(call) for name, (call, _) in CASES.items()}))

"""Anybody's sampler: a JAX function, a server, and Transformers' assisted generation."""

import contextlib
import functools
import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest

from specjax.testing.joint import joint_law_test
from specjax.testing.samplers import (
    EndpointSampler,
    HuggingFaceSampler,
    JaxSampler,
    hugging_face_law,
)
from specjax.testing.tables import TABLES

TABLE = TABLES["trigram"]


@pytest.fixture
def unchecked_types():
    """Arguments of other types come to specjax's own checks, as they do where no test runs."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


# --- a JAX function ---


@functools.partial(jax.jit, static_argnums=(1, 2))
def plain(key, rows, temperature):
    """Four tokens a row from the table, one after another."""
    params, last = TABLE.params, jnp.broadcast_to(jnp.array(TABLE.prompt[-2:]), (rows, 2))
    tokens = []
    for step in range(4):
        logits = params[last[:, 0], last[:, 1]] / temperature
        tokens.append(jax.random.categorical(jax.random.fold_in(key, step), logits))
        last = jnp.stack([last[:, 1], tokens[-1]], axis=1)
    return jnp.stack(tokens, axis=1)


@pytest.mark.parametrize("temperature, passes", [(0.7, True), (0.75, False)])
def test_a_jax_function(temperature, passes, capsys):
    sampler = JaxSampler(lambda key, rows: plain(key, rows, temperature))
    result = joint_law_test(sampler, TABLE.law(temperature=0.7), rows=50_000)
    assert result.passed is passes
    assert "50,000 rows find any bias of total variation >= 2.60%" in capsys.readouterr().err


# --- a server ---


class Server(BaseHTTPRequestHandler):
    """OpenAI's completions over a table of one token; ``answer`` makes the faults."""

    requests: list = []
    answer = staticmethod(lambda choices: {"choices": choices})
    status = 200
    delay = 0.0
    missing: int | None = None

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.requests.append((body, self.headers.get("Authorization")))
        time.sleep(self.delay)
        rng = np.random.default_rng(body["seed"])
        law = np.array([0.5, 0.3, 0.2]) ** (1 / body.get("temperature", 1.0))
        drawn = rng.choice(3, size=(body["n"], body["max_tokens"]), p=law / law.sum())
        choices = [{"text": "abc"[row[0]], "token_ids": row.tolist()} for row in drawn]
        answer = self.answer(choices)
        reply = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        with contextlib.suppress(BrokenPipeError):
            self.send_response(self.status)
            if self.missing is not None:
                self.send_header("Content-Length", str(len(reply) + self.missing))
            self.end_headers()
            self.wfile.write(reply)

    def log_message(self, *arguments):
        pass


@pytest.fixture
def server():
    """`server(status=..., answer=..., delay=...)`: an address, and the requests that came."""
    with contextlib.ExitStack() as stack:

        def start(**settings):
            if "answer" in settings:
                settings["answer"] = staticmethod(settings["answer"])
            handler = type("Handler", (Server,), {"requests": []} | settings)
            running = ThreadingHTTPServer(("127.0.0.1", 0), handler)
            threading.Thread(target=running.serve_forever, daemon=True).start()
            stack.callback(running.server_close)
            stack.callback(running.shutdown)
            return f"http://127.0.0.1:{running.server_port}/v1/completions", handler.requests

        yield start


LAW = np.array([0.5, 0.3, 0.2])


def test_a_server_that_keeps_its_law(server):
    url, requests = server()
    sampler = EndpointSampler(
        url, "tiny", "hello", 2, samples_a_request=64, headers={"Authorization": "Bearer x"}
    )
    assert joint_law_test(sampler, np.outer(LAW, LAW), rows=1000).passed
    bodies = [body for body, _ in requests]
    assert [body["n"] for body in bodies] == ([64] * 7 + [52]) * 2
    assert len({body["seed"] for body in bodies}) == 16
    assert bodies[0]["prompt"] == "hello" and bodies[0]["max_tokens"] == 2
    assert {token for _, token in requests} == {"Bearer x"}


def test_a_server_at_another_temperature_fails(server):
    sampler = EndpointSampler(server()[0], "tiny", [1, 2], 1, {"temperature": 0.5})
    result = joint_law_test(sampler, LAW, rows=1000)
    assert not result.passed


def test_a_server_of_text_is_tokenized(server):
    url, _ = server(answer=lambda choices: {"choices": [{"text": one["text"]} for one in choices]})
    with_tokenizer = EndpointSampler(
        url, "tiny", "hello", 1, tokenize=lambda text: ["abc".index(letter) for letter in text]
    )
    assert joint_law_test(with_tokenizer, LAW, rows=1000).passed
    with pytest.raises(ValueError, match="give tokenize"):
        EndpointSampler(url, "tiny", "hello", 1)(0, 2)


FAULTS = {
    "status": ({"status": 404, "answer": lambda _: {"error": "no tiny"}}, "answered 404.*no tiny"),
    "no JSON": ({"answer": lambda _: b"<html>"}, "no JSON"),
    "too few": ({"answer": lambda choices: {"choices": choices[:1]}}, "1 choices where 3"),
    "no choices": ({"answer": lambda _: {"result": 1}}, "no choices"),
    "slow": ({"delay": 0.5}, "within 0.1 s"),
    "truncated": ({"missing": 5}, "broke its answer off"),
    "no choice": ({"answer": lambda choices: {"choices": [None] * len(choices)}}, "None for a ch"),
    "ids as text": ({"answer": lambda _: choices_of("0 1 2")}, "is '0 1 2': give a list"),
    "no ids": ({"answer": lambda _: choices_of(None)}, "without token_ids: give tokenize"),
    "too short": (
        {"answer": lambda _: choices_of([1])},
        "returned 1 of 2 tokens and none of them ends the text: raise max_tokens, or name eos_ids",
    ),
    "empty": ({"answer": lambda _: choices_of([])}, "returned 0 of 2 tokens"),
}


def choices_of(token_ids):
    return {"choices": [{"token_ids": token_ids}] * 3}


@pytest.mark.fast
@pytest.mark.parametrize("settings, sentence", FAULTS.values(), ids=list(FAULTS))
def test_a_servers_faults_are_named(server, settings, sentence):
    url, _ = server(**settings)
    timeout = 0.1 if "delay" in settings else 30.0
    kind = ConnectionError if {"delay", "missing"} & set(settings) else ValueError
    with pytest.raises(kind, match=sentence):
        EndpointSampler(url, "tiny", "hello", 2, timeout=timeout)(0, 3)


@pytest.mark.fast
@pytest.mark.parametrize("ids", [[1], []])
def test_a_short_answer_is_not_blamed_on_tokenize_that_was_given(server, ids):
    url, _ = server(answer=lambda _: choices_of(ids))
    with pytest.raises(ValueError, match=f"returned {len(ids)} of 2 tokens"):
        EndpointSampler(url, "tiny", "hello", 2, tokenize=lambda text: [0, 0])(0, 3)


@pytest.mark.fast
@pytest.mark.parametrize("ids, row", [([7], [7, 7, 7]), ([0, 8], [0, 8, 8]), ([7, 1, 8], [7] * 3)])
def test_a_row_repeats_the_end_that_came(server, ids, row):
    url, _ = server(answer=lambda _: choices_of(ids))
    sampler = EndpointSampler(url, "tiny", "hello", 3, eos_ids=(7, 8))
    assert sampler(0, 3).tolist() == [row] * 3


@pytest.mark.fast
def test_a_prompt_may_be_an_array(server):
    url, requests = server()
    assert EndpointSampler(url, "tiny", np.array([1, 2]), 1)(0, 3).shape == (3, 1)
    assert requests[0][0]["prompt"] == [1, 2]


ADDRESS = "http://localhost:8000/v1/completions"
REFUSED = {
    "no address": ({"url": "localhost:8000"}, "give the whole address"),
    "another scheme": ({"url": "ftp://localhost/v1"}, "give the whole address"),
    "no port": ({"url": "http://localhost:port/v1"}, "give the whole address"),
    "a space": ({"url": "http://localhost/v1 completions"}, "give the whole address"),
    "no samples": ({"samples_a_request": 0}, "samples_a_request is 0: it must be at least 1"),
    "no depth": ({"depth": 0}, "depth is 0: it must be at least 1"),
    "no time": ({"timeout": 0.0}, "timeout is 0.0: give the seconds"),
    "no prompt": ({"prompt": []}, "the prompt is empty: give at least one token id"),
    "half a token": ({"prompt": [1.5]}, r"the prompt is \[1.5\]: give a list of token ids"),
    "one seed": ({"options": {"seed": 1}}, "seed is set by the adapter itself: leave it out"),
    "another n": ({"options": {"n": 1}}, "n is set by the adapter itself: leave it out"),
    "too few": ({"options": {"max_tokens": 1}}, "max_tokens is 1: it must be at least 2"),
}


@pytest.mark.fast
@pytest.mark.usefixtures("unchecked_types")
@pytest.mark.parametrize("attributes, sentence", REFUSED.values(), ids=list(REFUSED))
def test_what_no_server_can_be_asked_is_refused(attributes, sentence):
    whole = {"url": ADDRESS, "model": "tiny", "prompt": "hello", "depth": 2}
    with pytest.raises(ValueError, match=sentence):
        EndpointSampler(**whole | attributes)


def test_a_server_that_is_not_there_is_named():
    with pytest.raises(ConnectionError, match="cannot be reached"):
        EndpointSampler("http://127.0.0.1:9/v1/completions", "tiny", "hello", 1)(0, 1)


# --- Transformers ---

VOCABULARY, DEPTH, TEMPERATURE = 4, 2, 0.6
PROMPT = (1, 2, 0, 3)


def llama(seed, eos=None):
    """A random PyTorch Llama whose laws are far from flat, and no token of which ends a row.

    ``eos`` are tokens that do, after all.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=32,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=eos,
    )
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def models():
    """A target and its assistant, on one thread: many small calls are what takes the time."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield llama(7), llama(5)
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def law(models):
    return hugging_face_law(models[0], PROMPT, DEPTH, temperature=TEMPERATURE)


def assisted(models, **options):
    target, assistant = models
    every = {"temperature": TEMPERATURE, "top_k": 0, "assistant_model": assistant}
    return HuggingFaceSampler(target, PROMPT, DEPTH, every | options)


@pytest.mark.torch
def test_plain_generation_keeps_the_law(models, law, scale):
    sampler = HuggingFaceSampler(models[0], PROMPT, DEPTH, {"temperature": TEMPERATURE, "top_k": 0})
    assert joint_law_test(sampler, law, rows=scale(20_000, 200_000)).passed


@pytest.mark.torch
def test_assisted_generation_keeps_the_law(models, law, scale, capsys):
    result = joint_law_test(assisted(models), law, rows=scale(1_000, 20_000))
    assert result.passed, str(result)
    assert "find any bias of total variation" in capsys.readouterr().err


@pytest.mark.torch
def test_a_draft_law_without_the_temperature_is_found(models, law, scale, monkeypatch):
    """The assistant draws at the temperature; the accept test and the residual forget it for q."""
    from transformers.generation import utils

    right = utils._speculative_sampling

    def one_sided(ids, draft_logits, *rest, **more):
        return right(ids, draft_logits * TEMPERATURE, *rest, **more)

    monkeypatch.setattr(utils, "_speculative_sampling", one_sided)
    result = joint_law_test(assisted(models), law, rows=scale(1_000, 20_000))
    assert not result.passed, str(result)


@pytest.mark.torch
@pytest.mark.parametrize("of_model", [True, False], ids=["the model's", "an option"])
def test_a_row_ends_with_the_eos_that_came(models, scale, of_model):
    """Of two, as Llama 3 and Qwen have, Transformers pads with the first."""
    target = llama(7, eos=[2, 1] if of_model else None)
    options = {"temperature": TEMPERATURE, "top_k": 0}
    options |= {} if of_model else {"eos_token_id": [2, 1]}
    law = hugging_face_law(target, PROMPT, 3, temperature=TEMPERATURE, stop_token_ids=[2, 1])
    assert min(law[1, 1, 1], law[2, 2, 2]) > 0.05
    result = joint_law_test(
        HuggingFaceSampler(target, PROMPT, 3, options), law, rows=scale(5_000, 50_000)
    )
    assert result.passed, str(result)


REFUSED_PROMPTS = {
    "text": ("hello", "the prompt is 'hello': give a list of token ids"),
    "nothing": ([], "the prompt is empty: give at least one token id"),
    "a batch": ([[1, 2]], r"the prompt is \[\[1, 2\]\]: give a list of token ids"),
}


@pytest.mark.fast
@pytest.mark.usefixtures("unchecked_types")
@pytest.mark.parametrize("prompt, sentence", REFUSED_PROMPTS.values(), ids=list(REFUSED_PROMPTS))
def test_a_prompt_that_is_no_list_of_token_ids_is_refused(prompt, sentence):
    with pytest.raises(ValueError, match=sentence):
        HuggingFaceSampler(None, prompt, DEPTH)


@pytest.mark.fast
@pytest.mark.parametrize("name", ["do_sample", "max_new_tokens", "attention_mask"])
def test_options_that_the_adapter_sets_are_refused(name):
    with pytest.raises(ValueError, match=f"{name} is set by the adapter itself: leave it out"):
        HuggingFaceSampler(None, PROMPT, DEPTH, {name: 1})

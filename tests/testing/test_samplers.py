"""Anybody's sampler: a JAX function, a server, and Transformers' assisted generation."""

import contextlib
import functools
import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import jax
import jax.numpy as jnp
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
}


@pytest.mark.parametrize("settings, sentence", FAULTS.values(), ids=list(FAULTS))
def test_a_servers_faults_are_named(server, settings, sentence):
    url, _ = server(**settings)
    with pytest.raises((ValueError, ConnectionError), match=sentence):
        EndpointSampler(url, "tiny", "hello", 1, timeout=0.1 if "delay" in settings else 30.0)(0, 3)


def test_a_server_that_is_not_there_is_named():
    with pytest.raises(ConnectionError, match="cannot be reached"):
        EndpointSampler("http://127.0.0.1:9/v1/completions", "tiny", "hello", 1)(0, 1)


# --- Transformers ---

VOCABULARY, DEPTH, TEMPERATURE = 4, 2, 0.6
PROMPT = (1, 2, 0, 3)


def llama(seed):
    """A random PyTorch Llama whose laws are far from flat, and no token of which ends a row."""
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
        eos_token_id=None,
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

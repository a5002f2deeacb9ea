"""Adapters that turn anybody's sampler into what `specjax.testing.joint_law_test` draws from.

Each is a callable ``(seed, rows) -> tokens [rows, depth]``. Before it is first called it is told
what so many rows can find, and prints that, so that a sampler too slow for many rows is not taken
for one that is right. A row that ends early repeats its last token, as the laws of
`specjax.testing.reference.sequence_law` do.
"""

import json
import socket
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jaxtyping import Int

from specjax.testing.power_analysis import Plan
from specjax.testing.reference import Sequences, sequence_law

ROWS_A_BATCH = 512


@dataclass(frozen=True, eq=False)
class JaxSampler:
    """A function ``(key, rows) -> tokens [rows, depth]`` with a typed key; jit it yourself."""

    function: Callable[[Any, int], Any]

    def told(self, plan: Plan) -> None:
        _print(plan)

    def __call__(self, seed: int, rows: int) -> Int[np.ndarray, "rows depth"]:
        import jax

        return np.asarray(self.function(jax.random.key(seed), rows))


@dataclass(frozen=True, eq=False)
class HuggingFaceSampler:
    """Transformers' ``model.generate(prompt, do_sample=True, **options)``.

    ``options`` may hold ``assistant_model`` or ``prompt_lookup_num_tokens``, which Transformers
    runs one row at a time.
    """

    model: Any
    prompt: Sequence[int]
    depth: int
    options: Mapping[str, Any] = field(default_factory=dict)

    def told(self, plan: Plan) -> None:
        _print(plan)

    def __call__(self, seed: int, rows: int) -> Int[np.ndarray, "rows depth"]:
        import torch

        torch.manual_seed(seed)
        assisted = {"assistant_model", "prompt_lookup_num_tokens"} & set(self.options)
        batch = 1 if assisted else ROWS_A_BATCH
        drawn = [self._batch(min(batch, rows - done)) for done in range(0, rows, batch)]
        return np.concatenate(drawn)

    def _batch(self, rows):
        import torch

        prompt = torch.tensor([list(self.prompt)] * rows, device=self.model.device)
        end = self.model.generation_config.eos_token_id
        pad = end[0] if isinstance(end, list) else end
        tokens = self.model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=True,
            max_new_tokens=self.depth,
            **{"pad_token_id": pad} | dict(self.options),
        )
        return _to_depth(tokens[:, len(self.prompt) :].cpu().numpy(), self.depth)


def hugging_face_law(model: Any, prompt: Sequence[int], depth: int, **parameters: Any) -> Sequences:
    """The exact law of a PyTorch model's sequences, from its own logits.

    ``parameters`` are those of `specjax.testing.reference.log_probs`, in vLLM's order: Transformers
    applies ``min_p`` after ``top_k`` and ``top_p``, so don't mix these.
    """
    import torch

    def next_logits(contexts):
        with torch.no_grad():
            tokens = torch.as_tensor(contexts, dtype=torch.long, device=model.device)
            return model(tokens).logits[:, -1].double().cpu().numpy()

    return sequence_law(next_logits, prompt, depth, **parameters)


@dataclass(frozen=True)
class EndpointSampler:
    """A server with OpenAI's completions: ``POST url`` with ``n`` samples a request.

    Attributes:
        url: the whole address, ``http://localhost:8000/v1/completions``.
        model: the name that the server knows it by.
        prompt: text, or token ids where the server takes them.
        depth: tokens of each sample.
        options: more fields of each request, such as ``temperature``.
        samples_a_request: ``n``; servers have a limit.
        timeout: seconds that a request may take.
        tokenize: text to token ids, for a server that returns text only. Text may be tokenized
            otherwise than it was sampled: then the law must be that of the tokenized text.
        headers: more headers, such as ``{"Authorization": "Bearer ..."}``.

    Raises ConnectionError where there is no answer, ValueError where the answer is no completion.
    Token ids are read from ``token_ids`` (vLLM's ``return_token_ids``), else from text.
    """

    url: str
    model: str
    prompt: str | Sequence[int]
    depth: int
    options: Mapping[str, Any] = field(default_factory=dict)
    samples_a_request: int = 64
    timeout: float = 60.0
    tokenize: Callable[[str], Sequence[int]] | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    def told(self, plan: Plan) -> None:
        _print(plan)

    def __call__(self, seed: int, rows: int) -> Int[np.ndarray, "rows depth"]:
        each = []
        for request, done in enumerate(range(0, rows, self.samples_a_request)):
            samples = min(self.samples_a_request, rows - done)
            choices = self._choices(self._ask(seed + request, samples), samples)
            each += [self._token_ids(choice) for choice in choices]
        return np.concatenate([_to_depth(np.array([ids]), self.depth) for ids in each])

    def _ask(self, seed: int, samples: int) -> Any:
        body = {
            "model": self.model,
            "prompt": self.prompt if isinstance(self.prompt, str) else list(self.prompt),
            "n": samples,
            "max_tokens": self.depth,
            "seed": seed,
            "return_token_ids": True,
            **self.options,
        }
        request = urllib.request.Request(
            self.url,
            json.dumps(body).encode(),
            {"Content-Type": "application/json", **self.headers},
        )
        try:
            with urllib.request.urlopen(request, timeout=self.timeout) as answer:
                return json.loads(answer.read())
        except urllib.error.HTTPError as fault:
            said = fault.read(300).decode(errors="replace")
            raise ValueError(f"{self.url} answered {fault.code}: {said}") from None
        except TimeoutError:
            raise ConnectionError(
                f"{self.url} did not answer within {self.timeout:g} s: raise timeout, or lower "
                "samples_a_request"
            ) from None
        except (urllib.error.URLError, OSError) as fault:
            reason = getattr(fault, "reason", fault)
            if isinstance(reason, TimeoutError | socket.timeout):
                reason = f"no answer within {self.timeout:g} s"
            raise ConnectionError(f"{self.url} cannot be reached: {reason}") from None
        except ValueError:
            raise ValueError(f"{self.url} answered something that is no JSON") from None

    def _choices(self, answer: Any, samples: int) -> list[Any]:
        choices = answer.get("choices") if isinstance(answer, dict) else None
        if not isinstance(choices, list) or len(choices) != samples:
            got = len(choices) if isinstance(choices, list) else "no"
            raise ValueError(f"{self.url} returned {got} choices where {samples} were asked for")
        return choices

    def _token_ids(self, choice: Any) -> list[int]:
        ids = choice.get("token_ids")
        if ids is None and self.tokenize is not None:
            ids = list(self.tokenize(choice.get("text", "")))
        if not ids:
            raise ValueError(
                f"{self.url} returned a choice without token_ids: give tokenize, which makes token "
                "ids of its text"
            )
        return ids


def _print(plan: Plan) -> None:
    print(plan, file=sys.stderr)


def _to_depth(tokens: Int[np.ndarray, "rows _"], depth: int) -> Int[np.ndarray, "rows depth"]:
    """The first ``depth`` tokens of each row; a shorter row repeats its last."""
    place = np.minimum(np.arange(depth), tokens.shape[1] - 1)
    return tokens[:, place]

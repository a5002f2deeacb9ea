"""Adapters that turn anybody's sampler into what `specjax.testing.joint_law_test` draws from.

Each is a callable ``(seed, rows) -> tokens [rows, depth]``. Before it is first called it is told
what so many rows can find, and prints that, so that a sampler too slow for many rows is not taken
for one that is right. A row that ends early repeats its last token, as the laws of
`specjax.testing.reference.sequence_law` do, and after an end nothing else comes.
"""

import http.client
import json
import socket
import sys
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any

import numpy as np
from jaxtyping import Int

from specjax.sampling_params import require_integer
from specjax.testing.power_analysis import Plan
from specjax.testing.reference import Sequences, sequence_law

ROWS_A_BATCH = 512
# What an adapter sets itself, and its options may not.
SET_FOR_TRANSFORMERS = (
    *("do_sample", "max_new_tokens", "attention_mask", "inputs", "input_ids"),
    *("num_return_sequences", "return_dict_in_generate"),
)
SET_FOR_SERVERS = ("model", "prompt", "n", "best_of", "seed", "stream")

TokenIds = Sequence[int] | Int[np.ndarray, " T"]


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
    runs one row at a time. Raises ValueError for a prompt that is no list of token ids, and for
    options that the adapter sets itself.
    """

    model: Any
    prompt: TokenIds
    depth: int
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self):
        require_integer("depth", self.depth, at_least=1)
        _token_ids("the prompt", self.prompt)
        _require_free(self.options, SET_FOR_TRANSFORMERS)

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

        ids = _token_ids("the prompt", self.prompt)
        prompt = torch.tensor([ids] * rows, device=self.model.device)
        ends = self._ends()
        tokens = self.model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=True,
            max_new_tokens=self.depth,
            **{"pad_token_id": ends[0] if ends else None} | dict(self.options),
        )
        # Of several ends Transformers pads with one, whichever came.
        return _to_depth(_ended(tokens[:, len(ids) :].cpu().numpy(), ends), self.depth)

    def _ends(self) -> list[int]:
        """The ids that end a row of this model with these options."""
        config = self.options.get("generation_config", self.model.generation_config)
        end = self.options.get("eos_token_id", config.eos_token_id)
        return [] if end is None else np.atleast_1d(end).tolist()


def hugging_face_law(model: Any, prompt: TokenIds, depth: int, **parameters: Any) -> Sequences:
    """The exact law of a PyTorch model's sequences, from its own logits.

    ``parameters`` are those of `specjax.testing.reference.sequence_law`, in vLLM's order:
    Transformers applies ``min_p`` after ``top_k`` and ``top_p``, so don't mix these. The model's
    EOS ids are ``stop_token_ids``. Raises ValueError where `sequence_law` does, and for a prompt
    that is no list of token ids.
    """
    import torch

    prompt = _token_ids("the prompt", prompt)

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
        eos_ids: ids that end a sample, which may then be shorter than ``depth``. Text doesn't hold
            them: have the server ignore EOS there.

    Raises ConnectionError where there is no whole answer, ValueError where the answer is no
    completion, or one that is too short and has not ended, and for attributes that cannot be.
    Token ids are read from ``token_ids`` (vLLM's ``return_token_ids``), else from text.
    """

    url: str
    model: str
    prompt: str | TokenIds
    depth: int
    options: Mapping[str, Any] = field(default_factory=dict)
    samples_a_request: int = 64
    timeout: float = 60.0
    tokenize: Callable[[str], Sequence[int]] | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    eos_ids: Sequence[int] = ()

    def __post_init__(self):
        _require_address(self.url)
        require_integer("depth", self.depth, at_least=1)
        require_integer("samples_a_request", self.samples_a_request, at_least=1)
        if not self.timeout > 0:
            raise ValueError(f"timeout is {self.timeout}: give the seconds that a request may take")
        if not isinstance(self.prompt, str):
            _token_ids("the prompt", self.prompt)
        _require_free(self.options, SET_FOR_SERVERS)
        require_integer(
            "max_tokens", self.options.get("max_tokens", self.depth), at_least=self.depth
        )

    def told(self, plan: Plan) -> None:
        _print(plan)

    def __call__(self, seed: int, rows: int) -> Int[np.ndarray, "rows depth"]:
        each = []
        for request, done in enumerate(range(0, rows, self.samples_a_request)):
            samples = min(self.samples_a_request, rows - done)
            choices = self._choices(self._ask(seed + request, samples), samples)
            each += [self._row(self._token_ids(choice)) for choice in choices]
        return np.concatenate(each)

    def _ask(self, seed: int, samples: int) -> Any:
        text = isinstance(self.prompt, str)
        body = {
            "model": self.model,
            "prompt": self.prompt if text else _token_ids("the prompt", self.prompt),
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
        answer = self._answer(request)
        try:
            return json.loads(answer)
        except ValueError:
            raise ValueError(f"{self.url} answered something that is no JSON") from None

    def _answer(self, request: urllib.request.Request) -> bytes:
        try:
            with urllib.request.urlopen(request, timeout=self.timeout) as answer:
                return answer.read()
        except urllib.error.HTTPError as fault:
            said = fault.read(300).decode(errors="replace")
            raise ValueError(f"{self.url} answered {fault.code}: {said}") from None
        except TimeoutError:
            raise ConnectionError(
                f"{self.url} did not answer within {self.timeout:g} s: raise timeout, or lower "
                "samples_a_request"
            ) from None
        except http.client.IncompleteRead:
            raise ConnectionError(
                f"{self.url} broke its answer off: look into the server's log, or lower "
                "samples_a_request"
            ) from None
        except (OSError, http.client.HTTPException) as fault:
            reason = getattr(fault, "reason", fault)
            if isinstance(reason, TimeoutError | socket.timeout):
                reason = f"no answer within {self.timeout:g} s"
            raise ConnectionError(f"{self.url} cannot be reached: {reason}") from None

    def _choices(self, answer: Any, samples: int) -> list[Any]:
        choices = answer.get("choices") if isinstance(answer, dict) else None
        if not isinstance(choices, list) or len(choices) != samples:
            got = len(choices) if isinstance(choices, list) else "no"
            raise ValueError(f"{self.url} returned {got} choices where {samples} were asked for")
        wrong = [choice for choice in choices if not isinstance(choice, dict)]
        if wrong:
            raise ValueError(
                f"{self.url} returned {wrong[0]!r} for a choice: give the address of OpenAI's "
                "completions"
            )
        return choices

    def _token_ids(self, choice: Mapping[str, Any]) -> list[int]:
        ids, text = choice.get("token_ids"), choice.get("text")
        if ids is None and self.tokenize is not None and isinstance(text, str):
            return _token_ids("what tokenize returned", self.tokenize(text), at_least=0)
        if ids is None:
            raise ValueError(
                f"{self.url} returned a choice without token_ids: give tokenize, which makes token "
                "ids of its text"
            )
        return _token_ids(f"token_ids from {self.url}", ids, at_least=0)

    def _row(self, ids: list[int]) -> Int[np.ndarray, "1 depth"]:
        if len(ids) < self.depth and not set(ids) & set(self.eos_ids):
            raise ValueError(
                f"{self.url} returned {len(ids)} of {self.depth} tokens and none of them ends the "
                "text: raise max_tokens, or name eos_ids"
            )
        return _to_depth(_ended(np.array([ids]), self.eos_ids), self.depth)


def _print(plan: Plan) -> None:
    print(plan, file=sys.stderr)


def _token_ids(name: str, ids: Any, at_least: int = 1) -> list[int]:
    """Token ids as Python's integers, from a list or from an array of any library."""
    listed = ids.tolist() if hasattr(ids, "tolist") else ids
    is_list = isinstance(listed, Sequence) and not isinstance(listed, str)
    if not is_list or not all(_is_token_id(id) for id in listed):
        raise ValueError(f"{name} is {listed!r}: give a list of token ids")
    if len(listed) < at_least:
        raise ValueError(f"{name} is empty: give at least one token id, such as that of BOS")
    return [int(id) for id in listed]


def _is_token_id(id: Any) -> bool:
    return isinstance(id, Integral) and not isinstance(id, bool) and int(id) >= 0


def _require_free(options: Mapping[str, Any], taken: Sequence[str]) -> None:
    wrong = [name for name in options if name in taken]
    if wrong:
        raise ValueError(f"{wrong[0]} is set by the adapter itself: leave it out of options")


def _require_address(url: str) -> None:
    try:
        parts = urllib.parse.urlsplit(url)
        whole = parts.scheme in ("http", "https") and parts.hostname and (parts.port or 1)
    except ValueError:
        whole = False
    if not whole or url != "".join(url.split()):
        raise ValueError(
            f"url is {url!r}: give the whole address, such as http://localhost:8000/v1/completions"
        )


def _ended(tokens: Int[np.ndarray, "rows _"], ends: Sequence[int]) -> Int[np.ndarray, "rows _"]:
    """``tokens``, each row's first end repeated in place of what follows it."""
    is_end = np.isin(tokens, list(ends))
    first = np.where(is_end.any(axis=1), is_end.argmax(axis=1), tokens.shape[1])
    place = np.minimum(np.arange(tokens.shape[1]), first[:, None])
    return np.take_along_axis(tokens, place, axis=1)


def _to_depth(tokens: Int[np.ndarray, "rows _"], depth: int) -> Int[np.ndarray, "rows depth"]:
    """The first ``depth`` tokens of each row; a shorter row repeats its last."""
    place = np.minimum(np.arange(depth), tokens.shape[1] - 1)
    return tokens[:, place]

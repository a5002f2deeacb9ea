"""Takes in what a user asks of an engine: prompts to token ids, and everything checked at once.

Whatever is refused here is refused before anything is compiled, in one sentence.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from specjax.grammar import Grammar, compile_regex
from specjax.json_schema import json_schema_regex
from specjax.requests import is_list_of_ids, listed, params_of_each, prompt_of_mapping, token_id
from specjax.sampling import GREEDY_BELOW
from specjax.sampling_params import SamplingParams
from specjax.shaping import check_processor
from specjax.token_bytes import token_bytes
from specjax.tokenizer import Tokenizer
from specjax.types import Rule

GRAMMARS_KEPT = 64


@dataclass(frozen=True)
class Asked:
    """One prompt, ready to decode: its text if it was text, and its parameters resolved to ids."""

    text: str | None
    ids: list[int]
    params: SamplingParams
    bad_words: list[list[int]] = field(default_factory=list)
    grammar: Grammar | None = None


@dataclass
class Intake:
    """What prompts and parameters are checked against; keeps the grammars that it has compiled.

    ``default`` stands in for parameters that are not given.
    """

    tokenizer: Tokenizer
    vocab_size: int
    eos_ids: Sequence[int]
    max_model_len: int
    default: SamplingParams = SamplingParams()
    grammars: dict[Any, Grammar] = field(default_factory=dict)

    def take(self, prompts: Any, sampling_params: Any, rule: Rule) -> list[Asked]:
        """Raises ValueError naming the prompt and the remedy."""
        prompts = listed(prompts)
        if not prompts:
            raise ValueError("no prompt given: the list of prompts is empty")
        given = self.default if sampling_params is None else sampling_params
        every = params_of_each(given, len(prompts))
        pairs = [self._one(*one, rule) for one in enumerate(zip(prompts, every, strict=True))]
        self._check_processors(every)
        return pairs

    def conversations(self, messages: Any) -> list[list[int]]:
        """The prompts of a conversation, or of several."""
        if not isinstance(messages, Sequence) or isinstance(messages, str):
            raise ValueError(
                "a conversation is a list of {'role': ..., 'content': ...}, not "
                f"{type(messages).__name__}"
            )
        if not messages:
            raise ValueError("no message given: the conversation is empty")
        several = [messages] if isinstance(messages[0], Mapping) else messages
        for one in several:
            if not isinstance(one, Sequence) or isinstance(one, str):
                raise ValueError(
                    f"{one!r} is no conversation: give lists of {{'role': ..., 'content': ...}}"
                )
        return [self.tokenizer.apply_chat_template(one) for one in several]

    def _one(self, number: int, pair, rule: Rule) -> Asked:
        prompt, params = pair
        text, ids = self._tokenize(number, prompt)
        self._check_prompt(number, ids)
        if params.max_tokens is None:
            params = replace(params, max_tokens=self.max_model_len - len(ids))
        self._check_ids(number, ids, params)
        if rule.greedy_only and params.temperature >= GREEDY_BELOW:
            raise ValueError(
                f"rule 'greedy' would ignore temperature {params.temperature}: set it to 0, or "
                "choose the rule 'coupled' or another"
            )
        if params.logprobs is not None and params.logprobs > self.vocab_size:
            raise ValueError(
                f"prompt {number} asks for {params.logprobs} logprobs: the vocabulary has "
                f"{self.vocab_size} ids"
            )
        impossible = self._impossible(params)
        if len(impossible) == self.vocab_size:
            raise ValueError(f"prompt {number}: every allowed token is banned, leave at least one")
        self._check_minimum(number, params, impossible)
        words = [ids for word in params.bad_words or () for ids in self._spellings(word)]
        return Asked(text, ids, params, words, self._grammar(params, impossible))

    def _tokenize(self, number: int, prompt: Any) -> tuple[str | None, list[int]]:
        if isinstance(prompt, Mapping):
            prompt = prompt_of_mapping(number, prompt)
        if isinstance(prompt, str):
            return prompt, self.tokenizer.encode(prompt)
        if not is_list_of_ids(prompt):
            raise ValueError(f"prompt {number} is {prompt!r}: give text, or a list of token ids")
        return None, [token_id(number, token) for token in prompt]

    def _check_prompt(self, number: int, ids: list[int]) -> None:
        if not ids:
            raise ValueError(f"prompt {number} is empty: give at least one token")
        if len(ids) >= self.max_model_len:
            raise ValueError(
                f"prompt {number} has {len(ids)} tokens and max_model_len is "
                f"{self.max_model_len}: at most {self.max_model_len - 1} leave room for an answer"
            )

    def _check_ids(self, number: int, ids: list[int], params: SamplingParams) -> None:
        every = {
            "token": ids,
            "stop token": params.stop_token_ids or (),
            "allowed token": params.allowed_token_ids or (),
            "banned token": params.banned_token_ids,
            "logit_bias": params.logit_bias or {},
        }
        for name, given in every.items():
            wrong = [id for id in given if not 0 <= token_id(number, id) < self.vocab_size]
            if wrong:
                raise ValueError(
                    f"prompt {number} has the {name} id {wrong[0]}: the vocabulary has "
                    f"{self.vocab_size}, 0 to {self.vocab_size - 1}"
                )

    def _check_minimum(self, number: int, params: SamplingParams, impossible: frozenset[int]):
        """Where only ends may come, the first of them would end the output all the same."""
        if not params.min_tokens:
            return
        if len(impossible.union(params.ends(self.eos_ids))) == self.vocab_size:
            raise ValueError(
                f"prompt {number} has min_tokens {params.min_tokens}, and every allowed token is "
                "EOS or a stop id: allow another, or leave min_tokens out"
            )

    def _impossible(self, params: SamplingParams) -> frozenset[int]:
        """The ids that bans, a bias or a list of others keep from ever coming."""
        banned = {id for id, bias in (params.logit_bias or {}).items() if bias == float("-inf")}
        banned |= set(params.banned_token_ids)
        if params.allowed_token_ids is not None:
            banned |= set(range(self.vocab_size)) - set(params.allowed_token_ids)
        return frozenset(banned)

    def _spellings(self, word: str) -> list[list[int]]:
        """The tokens of a word at the start of a text and, where they differ, after a space."""
        bare = word.lstrip(" ")
        plain = self.tokenizer.encode(bare, add_special_tokens=False)
        spaced = self.tokenizer.encode(" " + bare, add_special_tokens=False)
        spellings = [ids for ids in ([plain] if plain == spaced else [plain, spaced]) if ids]
        if not spellings:
            raise ValueError(f"the bad word {word!r} has no tokens, so it could not be kept away")
        return spellings

    def _grammar(self, params: SamplingParams, impossible: frozenset[int]) -> Grammar | None:
        """The grammar over the tokens that are possible at all, so that none leads nowhere."""
        structure = params.structured_outputs
        if structure is None:
            return None
        pattern = _regex(structure)
        name = pattern, impossible
        if name not in self.grammars:
            if len(self.grammars) == GRAMMARS_KEPT:
                del self.grammars[next(iter(self.grammars))]
            pieces = enumerate(token_bytes(self.tokenizer))
            vocabulary = [None if id in impossible else piece for id, piece in pieces]
            ends = [id for id in self.eos_ids if id not in impossible]
            if not ends:
                raise ValueError(
                    "structured_outputs needs an EOS id that may come: the model has none, or all "
                    "are banned"
                )
            self.grammars[name] = compile_regex(pattern, vocabulary, ends, width=self.vocab_size)
        return self.grammars[name]

    def _check_processors(self, every: Sequence[SamplingParams]) -> None:
        wanted = [one.logits_processor for one in every]
        functions = {function for function in wanted if function is not None}
        if len(functions) > 1:
            raise ValueError(
                f"{len(functions)} different logits_processor in one call: the rows of a call are "
                "one program; call once for each, or write one function that tells them apart"
            )
        for function in functions:
            check_processor(function, self.vocab_size, self.max_model_len)


def _regex(structure: Mapping[str, Any]) -> str:
    """What a text must match under ``structured_outputs``."""
    kind, wanted = next(iter(structure.items()))
    if kind == "json":
        return json_schema_regex(wanted)
    return "|".join(re.escape(text) for text in wanted) if kind == "choice" else wanted

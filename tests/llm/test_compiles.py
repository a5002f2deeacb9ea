"""What `warmup` leaves to compile: nothing, whatever is asked for in its size."""

import logging

import pytest
from fixtures import NGRAM, lagged, letter_model

from specjax import LLM, SamplingParams

# A buffer of this size is used by no other test: its programs cannot have been compiled before.
LENGTH = 52
REQUESTS = [
    SamplingParams(temperature=0.0, max_tokens=3),
    SamplingParams(temperature=0.9, top_k=3, top_p=0.5, min_p=0.1, seed=3, max_tokens=30),
    SamplingParams(stop=("ab", "c"), stop_token_ids=[1, 2, 3, 4, 5], max_tokens=30),
    SamplingParams(ignore_eos=True, seed=(1 << 64) - 1, max_tokens=1 << 40),
]


@pytest.fixture
def compiled(caplog):
    caplog.set_level(logging.INFO, "specjax")

    def messages() -> list[str]:
        found = [one.getMessage() for one in caplog.records if "compiling" in one.getMessage()]
        caplog.clear()
        return found

    return messages


def test_warmup_leaves_nothing_to_compile(compiled):
    llm = LLM(
        letter_model(lagged(), eos_ids=(0, 7)),
        speculative_config=NGRAM,
        max_model_len=LENGTH,
        rounds_per_chunk=2,
    )
    llm.warmup(rows=4)
    assert len(compiled()) >= 2, "the test can see what is compiled"
    llm.warmup(rows=4)
    prompts = ["abc", "a" * 40, [0], "ponmlkjihgfedcba"]
    llm.generate(prompts, REQUESTS)
    llm.generate(prompts[:3], REQUESTS[1:])
    list(llm.stream(prompts, REQUESTS[1]))
    assert compiled() == []
    llm.generate(prompts[:2], REQUESTS[0])
    assert compiled(), "two rows are another program"

"""Cases O1, O3, P3: log-probabilities are the target's at the very token, drafted or not."""

import jax.numpy as jnp
import numpy as np
import pytest
from fixtures import (
    BUFFER,
    CHUNK,
    ROWS,
    Prompts,
    alphabet_llm,
    lagged,
    method,
    on_table,
    oracle_decode,
    oracle_log_probs,
    outputs,
    row_keys,
    rules_tried,
    scripted,
)

from specjax import SamplingParams
from specjax.accept import RULES
from specjax.generation import generate
from specjax.sampling import Sampling

TOP = 3
EACH_WAY = Sampling.create(ROWS, temperature=[0.0, 1.0, 0.0, 1.0])


def scored(subject, rule, prompts, keys, sampling=EACH_WAY):
    """A generation with its scores; rows are decoded to the end of the buffer."""
    return generate(
        subject.target,
        subject.params,
        jnp.asarray(prompts.tokens),
        keys,
        drafter=subject.drafter,
        drafter_params=subject.drafter_params,
        rule=rule,
        sampling=sampling,
        max_new_tokens=BUFFER,
        prompt_length=jnp.asarray(prompts.length),
        buffer=BUFFER,
        prefill_chunk=CHUNK,
        logprobs=TOP,
    )


def normalised(logits):
    return logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)


def _truncation(sampling, row):
    whole = sampling.truncation
    return {} if whole is None else {name: value[row] for name, value in vars(whole).items()}


def assert_right(subject, prompts, result, sampling=EACH_WAY):
    """Every emitted token against the target on the whole output, in float64."""
    tokens = np.asarray(result.tokens)
    law = normalised(subject.logits(tokens))
    for row, size in enumerate(prompts.length):
        places = np.arange(size, result.length[row])
        own = Sampling.create(
            len(places), temperature=sampling.temperature[row], **_truncation(sampling, row)
        )
        before, said = law[row, places - 1], tokens[row, places]
        processed = oracle_log_probs(own, before)
        chosen = np.arange(len(places)), said
        scores = {name: np.asarray(value)[row] for name, value in vars(result.scores).items()}
        np.testing.assert_allclose(scores["raw"][places], before[chosen], atol=1e-5)
        np.testing.assert_allclose(scores["processed"][places], processed[chosen], atol=1e-5)
        best = np.argsort(-before, axis=-1, kind="stable")[:, :TOP]
        np.testing.assert_array_equal(scores["top_ids"][places], best)
        np.testing.assert_allclose(
            scores["top"][places], np.take_along_axis(before, best, -1), atol=1e-5
        )
        assert np.isnan(np.delete(scores["raw"], places)).all()


# How many of four drafts are right, round by round.
PATTERNS = {"all": [4], "none": [0], "mixed": [4, 0, 2, 1, 3]}


@pytest.mark.parametrize("pattern", PATTERNS)
def test_O1_of_accepted_corrected_and_bonus_tokens(pattern):
    prompts, keys = Prompts.random((5, 9, 1, 7), 16, seed=3), row_keys(4, ROWS)
    subject = on_table("none")
    proposal = oracle_decode(subject.logits, prompts, BUFFER, EACH_WAY, keys)
    subject = scripted(subject, prompts, right=PATTERNS[pattern], proposal=proposal)
    result = scored(subject, "coupled", prompts, keys)
    accepted = np.asarray(result.stats.accepted).sum()
    drafted = np.asarray(result.stats.drafted).sum()
    assert {"all": accepted > 0.9 * drafted, "none": accepted == 0, "mixed": accepted > 0}[pattern]
    assert_right(subject, prompts, result)


@pytest.mark.parametrize("rule", rules_tried())
def test_O1_by_every_rule(rule):
    """A placeholder of 0, a certain token, would be far from any of the table's."""
    prompts = Prompts.random((5, 9, 1, 7), 16, seed=3)
    subject = method("draft_model")
    sampling = EACH_WAY if not RULES[rule].greedy_only else Sampling.create(ROWS, temperature=0.0)
    result = scored(subject, rule, prompts, row_keys(4, ROWS), sampling)
    assert np.asarray(result.stats.accepted).sum() > 0
    assert_right(subject, prompts, result, sampling)
    assert normalised(subject.logits(np.asarray(result.tokens))).max() < -1e-3


def test_O3_speculation_leaves_raw_values_alone():
    """Sharpened, truncated and penalised rows: the raw values are those before all of it."""
    sampling = Sampling.create(ROWS, temperature=0.5, top_k=2, presence_penalty=1.0)
    prompts, keys = Prompts.random((5, 9, 1, 7), 16, seed=5), row_keys(6, ROWS)
    on = scored(method("ngram"), "coupled", prompts, keys, sampling)
    off = scored(method("none"), "coupled", prompts, keys, sampling)
    assert outputs(on) == outputs(off)
    assert np.asarray(on.stats.accepted).sum() > 0
    law = normalised(method("none").logits(np.asarray(on.tokens)))
    for row, size in enumerate(prompts.length):
        places = np.arange(size, BUFFER)
        for result in (on, off):
            raw = np.asarray(result.scores.raw)[row, places]
            chosen = law[row, places - 1, np.asarray(result.tokens)[row, places]]
            np.testing.assert_allclose(raw, chosen, atol=1e-5)
            assert np.isfinite(np.asarray(result.scores.processed)[row, places]).all()


def test_O3_penalties_do_change_the_processed_values():
    sampling = Sampling.create(ROWS, temperature=0.5, top_k=2, presence_penalty=1.0)
    prompts, keys = Prompts.random((5, 9, 1, 7), 16, seed=5), row_keys(6, ROWS)
    result = scored(method("ngram"), "coupled", prompts, keys, sampling)
    law = normalised(lagged_law(result))
    places = np.arange(9, BUFFER)
    unpenalised = oracle_log_probs(
        Sampling.create(len(places), temperature=0.5, top_k=2), law[1, places - 1]
    )
    chosen = np.arange(len(places)), np.asarray(result.tokens)[1, places]
    assert np.abs(np.asarray(result.scores.processed)[1, places] - unpenalised[chosen]).max() > 0.1


def lagged_law(result):
    from fixtures import table_oracle

    return table_oracle(lagged(), np.asarray(result.tokens))


@pytest.mark.parametrize("rounds", [1, 2])
def test_P3_a_stop_string_cuts_scores_with_the_ids(rounds):
    """The stop is completed by the third token of a block of five."""
    llm = alphabet_llm(rounds_per_chunk=rounds)
    params = SamplingParams(temperature=0.0, max_tokens=12, stop="ef", logprobs=1)
    (result,) = llm.generate(["abcdefghabc"], params, use_tqdm=False)
    (output,) = result.outputs
    assert output.text == "d" and output.token_ids == [3, 4, 5]
    assert [entry.token_id for entry in output.logprobs] == output.token_ids
    assert output.metrics.output_tokens == 3

"""The public tables: what each is said to be hard about, and that its law is its model's law."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.testing import reference
from specjax.testing.tables import DEPTH, TABLES, VOCABULARY

pytestmark = pytest.mark.fast


def laws(logits):
    weights = np.exp(np.asarray(logits, np.float64))
    return weights / weights.sum(-1, keepdims=True)


@pytest.mark.parametrize("name", TABLES)
def test_the_law_is_that_of_the_model_itself(name):
    """Multiplied up from what the target computes for whole sequences."""
    table = TABLES[name]
    sequences = np.array(list(itertools.product(range(VOCABULARY), repeat=DEPTH)))
    prompts = np.broadcast_to(table.prompt, (len(sequences), len(table.prompt)))
    tokens = jnp.asarray(np.concatenate([prompts, sequences], axis=1), jnp.int32)
    cache = table.target.init_cache(*tokens.shape)
    log_p = jax.nn.log_softmax(table.target(table.params, tokens, None, cache).logits)
    each = np.take_along_axis(np.asarray(log_p)[:, -1 - DEPTH : -1], sequences[..., None], axis=-1)
    expected = np.exp(each.astype(np.float64).sum((1, 2)))
    np.testing.assert_allclose(table.law().reshape(-1), expected, atol=1e-6)
    assert table.law().sum() == pytest.approx(1)


def test_each_table_is_hard_about_what_it_says():
    p = {name: laws(table.logits) for name, table in TABLES.items()}
    q = {name: laws(table.draft_logits) for name, table in TABLES.items()}
    assert np.all(p["markov"] == p["markov"][:1])
    assert np.any(p["trigram"] != p["trigram"][:1])
    assert set(np.unique(p["counting"])) == {0, 1}
    assert np.all(np.sort(p["ties"])[..., 0] == np.sort(p["ties"])[..., 1])
    assert np.any(p["ties"] == q["ties"]) and np.any(p["ties"] != q["ties"])
    assert np.all(p["equal"] == q["equal"])
    assert np.any((p["zeros"] == 0) & (q["zeros"] > 0))
    assert np.any((p["zeros"] > 0) & (q["zeros"] == 0))
    assert 0 < p["near_zeros"].min() < 0.01 and 0 < q["near_zeros"].min() < 1e-5
    assert set(np.unique(q["point_masses"])) == {0, 1}
    assert np.any(p["point_masses"].max(-1) == 1) and np.any(p["point_masses"].max(-1) < 1)
    assert np.all(np.minimum(p["disjoint"], q["disjoint"]) == 0)


def test_sequences_that_have_ended_repeat_their_end():
    law = TABLES["trigram"].law(3, stop_token_ids=(2,))
    assert law.sum() == pytest.approx(1)
    assert law[2, 2, 2] == pytest.approx(TABLES["trigram"].law(1)[2])
    assert np.all(law[2, :2] == 0) and np.all(law[0, 2, :2] == 0)
    later = TABLES["trigram"].law(3, stop_token_ids=(2,), min_tokens=2)
    assert np.all(later[2] == 0) and np.all(later[:, 2] == 0) and np.any(later[..., 2] > 0)


def test_a_law_of_few_sequences_asks_for_few_contexts():
    asked = []

    def next_logits(contexts):
        asked.append(len(contexts))
        return np.random.default_rng(0).normal(size=(len(contexts), 1000))

    law = reference.sequence_law(next_logits, (1, 2), 3, top_k=2)
    assert asked == [1, 2, 4] and len(law) == 8
    assert sum(law.values()) == pytest.approx(1)


LOGITS = np.array([1.0, 0.5, -0.5, 2.0])
SHAPED = {
    "allowed": ({"allowed_token_ids": [0, 2]}, [1.0, -np.inf, -0.5, -np.inf]),
    "banned": ({"banned_token_ids": [3]}, [1.0, 0.5, -0.5, -np.inf]),
    "a bad word of one": ({"bad_words": [[1]]}, [1.0, -np.inf, -0.5, 2.0]),
    "a bad word begun": ({"bad_words": [[2, 3, 0]]}, [-np.inf, 0.5, -0.5, 2.0]),
    "a bad word begun in the prompt": ({"bad_words": [[1, 2, 3, 0]]}, LOGITS),
    "a bad word not begun": ({"bad_words": [[2, 0]]}, LOGITS),
    "too early to end": ({"min_tokens": 3, "stop_token_ids": [3]}, [1.0, 0.5, -0.5, -np.inf]),
    "not too early": ({"min_tokens": 2, "stop_token_ids": [3]}, LOGITS),
    "bias": ({"logit_bias": {0: -3.0, 1: 2.0}}, [-2.0, 2.5, -0.5, 2.0]),
    "repetition": ({"repetition_penalty": 2.0}, [1.0, 0.25, -1.0, 1.0]),
    "frequency": ({"frequency_penalty": 0.5}, [1.0, 0.5, -1.0, 1.5]),
    "presence": ({"presence_penalty": 0.5}, [1.0, 0.5, -1.0, 1.5]),
    "bias before penalties": (
        {"logit_bias": {2: 1.5}, "repetition_penalty": 2.0},
        [1.0, 0.25, 0.5, 1.0],
    ),
    "bans that leave nothing": (
        {"allowed_token_ids": [0, 3], "bad_words": [[0], [3]]},
        [1.0, -np.inf, -np.inf, 2.0],
    ),
}


@pytest.mark.parametrize("parameters, expected", SHAPED.values(), ids=list(SHAPED))
def test_the_reference_by_hand(parameters, expected):
    """After the prompt [1] and the output [2, 3]."""
    shaped = reference.shaped_logits(LOGITS, [1], [2, 3], **parameters)
    np.testing.assert_allclose(shaped, expected)


def test_frequency_counts_every_occurrence():
    shaped = reference.shaped_logits(LOGITS, [0, 0], [3, 3], frequency_penalty=0.5)
    np.testing.assert_allclose(shaped, [1.0, 0.5, -0.5, 1.0])


def test_the_users_processor_comes_before_the_temperature():
    def double_if_seen(logits, history):
        return np.where(np.isin(np.arange(4), history), 2 * logits, logits)

    law = reference.log_probs(
        LOGITS, 0.5, prompt=[1], output=[3], logits_processor=double_if_seen, logit_bias={1: 1.0}
    )
    expected = np.array([1.0, 3.0, -0.5, 4.0]) / 0.5
    np.testing.assert_allclose(law, expected - np.log(np.exp(expected).sum()))


def uniform(contexts):
    return np.zeros((len(contexts), 4))


NO_LAW = {
    "top_p of 0": ({"top_p": 0.0}, r"top_p is 0.0: it must lie in \(0, 1\]"),
    "top_p below 0": ({"top_p": -2.0}, "top_p is -2.0: it must lie in"),
    "no temperature": ({"temperature": -1.0}, "temperature is -1.0: it must be 0"),
    "min_p": ({"min_p": 1.5}, "min_p is 1.5: it must lie in"),
    "top_k": ({"top_k": -2}, "top_k is -2: 0 or -1 is off"),
    "repetition": ({"repetition_penalty": 0.0}, "repetition_penalty is 0.0: it must be more"),
    "nothing allowed": ({"allowed_token_ids": []}, "allowed_token_ids is empty"),
    "allowed": ({"allowed_token_ids": [9]}, "allowed_token_ids has the token id 9: the voc"),
    "banned": ({"banned_token_ids": [4]}, "banned_token_ids has the token id 4: the vocabulary"),
    "bias": ({"logit_bias": {-1: 1.0}}, "logit_bias has the token id -1: the vocabulary has 4"),
    "all banned": (
        {"allowed_token_ids": [1], "banned_token_ids": [1]},
        r"after the output \[\] no token is left",
    ),
    "processor": (
        {"logits_processor": lambda logits, history: logits + np.nan},
        r"after the output \[\] a logit is NaN or \+inf: mend the model or logits_processor",
    ),
}


@pytest.mark.parametrize("parameters, sentence", NO_LAW.values(), ids=list(NO_LAW))
def test_parameters_that_leave_no_law_are_refused(parameters, sentence):
    with pytest.raises(ValueError, match=sentence):
        reference.sequence_law(uniform, (0, 1), 2, **parameters)


WRONG_LOGITS = {
    "NaN": ([0.0, np.nan, 0.0], "a logit is NaN"),
    "+inf": ([0.0, np.inf, 0.0], "a logit is NaN or"),
    "-inf": ([-np.inf] * 3, "no token is left"),
}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("wrong, sentence", WRONG_LOGITS.values(), ids=list(WRONG_LOGITS))
def test_logits_that_are_no_law_are_refused(wrong, sentence, temperature):
    """Where they can come: after a first token 1, which greedy decoding takes as well."""

    def next_logits(contexts):
        return np.where(contexts[:, -1:] == 1, wrong, [0.0, 1.0, 0.0])

    with pytest.raises(ValueError, match=rf"after the output \[1\] {sentence}"):
        reference.sequence_law(next_logits, (0,), 2, temperature=temperature)
    assert len(reference.sequence_law(next_logits, (0,), 2, banned_token_ids=[1])) == 4


def test_logits_of_another_shape_are_refused():
    with pytest.raises(ValueError, match=r"shape \(4,\) for 1 contexts: return \[N, V\]"):
        reference.sequence_law(lambda contexts: np.zeros(4), (0,), 2)

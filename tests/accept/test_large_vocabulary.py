"""Sums over tens of thousands of tokens, in float32."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from accept.registry import LAWS_OF_DRAWN

from specjax.types import Draft

VOCABULARY, TRIED = 32_000, 2000


@pytest.mark.parametrize("name", LAWS_OF_DRAWN)
def test_LAW9e_bfloat16_logits_over_a_large_vocabulary_lose_no_mass(name):
    """One drafted token stands with probability min(p, q) / q, to what float32 sums can hold."""
    logits = np.random.default_rng(1).normal(size=(2, 2, VOCABULARY)) * 2
    logits = jnp.asarray(logits, jnp.bfloat16).astype(jnp.float32)
    log_p, log_q = jax.nn.log_softmax(logits, axis=-1)
    tokens = jnp.argsort(-log_q[0])[:TRIED]

    def stands(token):
        draft = Draft(jnp.stack([0, token]), jnp.array([-1, 0]), log_q)
        return jnp.exp(LAWS_OF_DRAWN[name].stop_law(draft, log_p)[0][1])

    accepted = jax.lax.map(stands, tokens, batch_size=250)
    p, q = (np.exp(np.asarray(law[0, tokens], np.float64)) for law in (log_p, log_q))
    assert q.sum() > 0.6
    assert np.sum(q * np.asarray(accepted)) == pytest.approx(np.minimum(p, q).sum(), abs=2e-5)

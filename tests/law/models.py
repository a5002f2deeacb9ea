"""A table and a transformer whose laws are known, each with a draft model at a known distance."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from specjax.draft import DRAFTERS, Host
from specjax.draft.host import Loaded
from specjax.models.decoder import DecoderConfig, DecoderTarget
from specjax.recompute import Recompute
from specjax.testing.joint import after_prompt, next_token_laws, sequence_law, total_variation
from specjax.testing.tables import laws_apart, second_order

VOCABULARY, DEPTH = 4, 4
PROMPT = jnp.array([0, 1, 2, 3, 1, 0, 2, 1], jnp.int32)
CHUNK = 8
MAX_CONTEXT = 256


class Model:
    """A target with its parameters, and a draft model that lies 0.2 to 0.5 from it everywhere."""

    def __init__(self, target, params, draft, draft_params):
        self.target, self.params = target, params
        self.draft, self.draft_params = draft, draft_params

    def build(self, name, options):
        def load(_):
            return Loaded(self.draft, self.draft_params, MAX_CONTEXT)

        return DRAFTERS[name](
            Host(self.target, self.params, VOCABULARY, MAX_CONTEXT, CHUNK, load), **options
        )

    @functools.cached_property
    def sequences(self):
        return after_prompt(PROMPT, VOCABULARY, DEPTH)

    def log_probs(self, target, params):
        rows, length = self.sequences.shape
        out = target(params, self.sequences, None, target.init_cache(rows, length))
        return jax.nn.log_softmax(out.logits, axis=-1)

    @functools.cached_property
    def log_p(self):
        return self.log_probs(self.target, self.params)

    @functools.cached_property
    def law(self):
        law = np.asarray(sequence_law(self.log_p, self.sequences, DEPTH), np.float64)
        return law / law.sum()

    def distances(self, draft, draft_params):
        """Total variation between target and draft in each context of the first tokens."""
        log_q = self.log_probs(draft, draft_params)
        return np.asarray(
            total_variation(next_token_laws(self.log_p, DEPTH), next_token_laws(log_q, DEPTH))
        )


def table_model():
    shape = (VOCABULARY, VOCABULARY, VOCABULARY)
    target, draft = laws_apart(11, shape)
    return Model(Recompute(second_order), target, Recompute(second_order), draft)


def decoder(layers, width):
    return DecoderTarget(
        DecoderConfig(
            vocab_size=VOCABULARY,
            hidden_size=width,
            intermediate_size=2 * width,
            num_layers=layers,
            num_heads=2,
            num_kv_heads=1,
            head_dim=8,
            max_position=MAX_CONTEXT,
        )
    )


def sharpened(target, seed):
    """Random parameters, enlarged until context matters; seeds were sought for the distances."""
    params = target.init_params(jax.random.key(seed))
    layers = {
        name: weight if name.endswith("norm") else 16 * weight
        for name, weight in params["layers"].items()
    }
    vocabulary, width = params["head"].shape
    return params | {
        "embed": 50 * params["embed"],
        "layers": layers,
        "head": 12 * params["head"].reshape(width, vocabulary).T,
    }


def transformer_model():
    target, draft = decoder(2, 16), decoder(1, 8)
    return Model(target, sharpened(target, 195), draft, sharpened(draft, 73))

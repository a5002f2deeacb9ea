"""Block-drafting checkpoints of every writer against the definition in NumPy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from convert.drafters.numpy_layers import (
    attended,
    frequencies,
    keys_values,
    mlp,
    queries,
    rms,
    sigmoid,
)
from convert.drafters.tiny_drafters import (
    BLOCK,
    HEAD_DIM,
    LAYER_CONFIG,
    MASK,
    RANK,
    VOCAB,
    WIDTH,
    dflash_config,
    dflash_tensors,
    dspark_config,
    eagle3_tensors,
    reduced_vocabulary,
    write,
)

from ckpt_convert import ConversionError
from ckpt_convert.drafters import UNSAID, Choices, convert_drafter, load_drafter
from specjax.models.candidates import candidate_scores
from specjax.models.dflash import (
    block_hidden,
    block_logits,
    block_tokens,
    context_features,
    context_keys_values,
    drafted,
)
from specjax.models.markov import confidence, markov_shift

ROWS, CONTEXT = 2, 6
_RNG = np.random.default_rng(5)
ANCHOR = np.array([3, 17], np.int32)
TAPPED = _RNG.standard_normal((ROWS, CONTEXT, 2, WIDTH)).astype(np.float32)
# The second row's context is two tokens shorter; its rows lie elsewhere.
PLACES = np.array([np.arange(300, 306), [410, 411, 412, 413, -1, -1]], np.int32)
BLOCK_PLACES = np.array([np.arange(306, 306 + BLOCK), np.arange(414, 414 + BLOCK)], np.int32)
EMBEDDING = _RNG.standard_normal((VOCAB, WIDTH)).astype(np.float32)
HEAD = _RNG.standard_normal((VOCAB, WIDTH)).astype(np.float32)


@functools.partial(jax.jit, static_argnums=0)
def forward(config, params, embed, matrix):
    """Slots' states and logits."""
    context = context_features(config, params, jnp.asarray(TAPPED))
    pairs = context_keys_values(config, params, context, jnp.asarray(PLACES))
    tokens = block_tokens(config, jnp.asarray(ANCHOR))
    hidden = block_hidden(
        config,
        params,
        tokens,
        jnp.asarray(BLOCK_PLACES),
        pairs,
        jnp.asarray(PLACES),
        embed=embed,
    )
    return hidden, block_logits(config, params, hidden, matrix=matrix)


def convolved(x, base, added):
    """x [T, E]; base [taps, E]; added [T, taps, groups]."""
    out = np.zeros_like(x)
    width = x.shape[1] // added.shape[2]
    for t in range(len(x)):
        for tap in range(min(len(base), t + 1)):
            for channel in range(x.shape[1]):
                kernel = base[tap, channel] + added[t, tap, channel // width]
                out[t, channel] += kernel * x[t - tap, channel]
    return out


def expected(
    tensors,
    *,
    layers=2,
    theta=1e6,
    causal=(False, False),
    windows=(None, None),
    scale=1.0,
    second=False,
    tapped=TAPPED,
    mask=MASK,
):
    embedding = tensors.get("embed_tokens.weight", EMBEDDING)
    head = tensors.get("lm_head.weight", HEAD)
    freqs, states = frequencies(HEAD_DIM, theta), []
    for row in range(ROWS):
        kept = PLACES[row] >= 0
        flat = tapped[row][kept].reshape(kept.sum(), -1).astype(np.float64)
        context = rms(flat @ tensors["fc.weight"].T, tensors["hidden_norm.weight"])
        ids = [ANCHOR[row]] + [mask] * (BLOCK - 1)
        x = embedding[ids].astype(np.float64) * scale
        places = np.concatenate([PLACES[row][kept], BLOCK_PLACES[row]])
        behind = BLOCK_PLACES[row][:, None] - places
        for index in range(layers):
            seen = np.ones(behind.shape, bool)
            if causal[index]:
                seen &= behind >= 0
            if windows[index] is not None:
                seen &= np.abs(behind) < windows[index]
            at = f"layers.{index}."

            def around(name, inner, x, at=at):
                if not second:
                    return inner(x)
                base = tensors[f"{at}{name}.base_kernel"]
                added = x @ tensors[f"{at}{name}.kernel_projection.weight"].T
                added = added.reshape(len(x), 2, 2, -1)
                x = inner(convolved(x, base[0], added[:, 0]))
                return convolved(x, base[1], added[:, 1])

            def attention(x, at=at + "self_attn.", context=context, seen=seen, row=row, kept=kept):
                block = tensors, at, x, BLOCK_PLACES[row], freqs, HEAD_DIM
                behind_it = tensors, at, context, PLACES[row][kept], freqs, HEAD_DIM
                pairs = zip(keys_values(*behind_it), keys_values(*block), strict=True)
                k, v = (np.concatenate(both) for both in pairs)
                mixed = attended(queries(*block), k, v, seen)
                return mixed.reshape(len(x), -1) @ tensors[f"{at}o_proj.weight"].T

            normed = rms(x, tensors[f"{at}input_layernorm.weight"])
            x = x + around("attention_conv", attention, normed)
            normed = rms(x, tensors[f"{at}post_attention_layernorm.weight"])
            x = x + around("mlp_conv", functools.partial(mlp, tensors, f"{at}mlp."), normed)
        states.append(rms(x, tensors["norm.weight"]))
    return np.stack(states), np.stack(states) @ head.T


def converted(tmp_path, config, tensors, choices=UNSAID):
    write(tmp_path / "source", config, tensors)
    convert_drafter(tmp_path / "source", tmp_path / "converted", choices)
    return load_drafter(tmp_path / "converted")


def run(drafter):
    config = drafter.config
    return forward(
        config,
        drafter.params,
        None if config.own_embedding else EMBEDDING,
        None if config.own_head else HEAD,
    )


SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 3}
SECOND = {"conv_kernel_size": 2, "conv_group_size": 8, "selector_rank": RANK, "selector_top_k": 5}

CASES = {
    "DFlash": ({}, dflash_config(), {}),
    "JetSpec, causal": (
        {},
        dflash_config(nested={"causal_head": True}),
        {"causal": (True, True)},
    ),
    "sliding layers, causal; scaled embeddings": (
        {},
        dflash_config(nested={"input_embedding_scale": 3.0}, **SLIDING),
        {"causal": (True, False), "windows": (3, None), "scale": 3.0},
    ),
    "DSpark, own embedding and head, windows see both ways": (
        {"embedding": True, "head": True},
        dspark_config(**SLIDING),
        {"windows": (3, None)},
    ),
    "DFlash 2": ({"second": True}, dflash_config(nested=SECOND), {"second": True}),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_states_and_logits_are_the_definitions(tmp_path, case):
    made, config, how = case
    tensors = dflash_tensors(**made)
    drafter = converted(tmp_path, config, tensors)
    assert drafter.method == "dflash"
    hidden, logits = run(drafter)
    right = expected(tensors, **how)
    np.testing.assert_allclose(hidden, right[0], atol=1e-4)
    np.testing.assert_allclose(logits, right[1], atol=1e-4)


def test_each_trap_would_be_seen():
    """The definition read wrongly: taps swapped or one off, another base, mask or visibility."""
    tensors = dflash_tensors()
    right = expected(tensors)[1]
    wrong = [
        expected(tensors, tapped=TAPPED[:, :, ::-1]),
        expected(tensors, tapped=np.roll(TAPPED, 1, axis=1)),
        expected(tensors, theta=10_000.0),
        expected(tensors, mask=MASK - 1),
        expected(tensors, causal=(True, True)),
        expected(tensors, windows=(3, None)),
        expected(tensors, scale=np.sqrt(WIDTH)),
    ]
    assert min(np.abs(right - one[1]).max() for one in wrong) > 1e-2


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
def test_the_head_that_looks_at_the_token_before(tmp_path, kind):
    tensors = dflash_tensors(markov=kind, confidence=WIDTH + RANK, embedding=True, head=True)
    config = dspark_config(
        markov_rank=RANK,
        markov_head_type=kind,
        enable_confidence_head=True,
        confidence_head_with_markov=True,
    )
    drafter = converted(tmp_path, config, tensors)
    hidden = np.asarray(run(drafter)[0])

    @jax.jit
    def step(previous, hidden, state):
        shift = markov_shift(drafter.config.markov, drafter.params, previous, hidden, state)
        return (*shift, confidence(drafter.params, hidden, previous, with_markov=True))

    previous, state = ANCHOR, np.zeros((ROWS, RANK), np.float32)
    reference = [np.zeros(RANK) for _ in range(ROWS)]
    for slot in range(3):
        shift, state, sure = step(previous, hidden[:, slot], state)
        for row in range(ROWS):
            token = tensors["markov_head.markov_w1.weight"][previous[row]].astype(np.float64)
            h = hidden[row, slot].astype(np.float64)
            wanted, reference[row] = _markov(tensors, kind, token, h, reference[row])
            np.testing.assert_allclose(shift[row], wanted, atol=1e-4)
            proj = tensors["confidence_head.proj.weight"][0]
            bias = tensors["confidence_head.proj.bias"][0]
            certainty = sigmoid(np.concatenate([h, token]) @ proj + bias)
            np.testing.assert_allclose(sure[row], certainty, atol=1e-5)
        previous = (previous * 5 + 1) % VOCAB


def _markov(tensors, kind, token, h, state):
    latent = token
    if kind == "gated":
        at = "markov_head.gate_proj."
        gate = np.concatenate([h, token]) @ tensors[f"{at}weight"].T + tensors[f"{at}bias"]
        latent = sigmoid(gate) * token
    if kind == "rnn":
        at = "markov_head.joint_proj."
        both = np.concatenate([state, token, h]) @ tensors[f"{at}weight"].T + tensors[f"{at}bias"]
        gate, candidate, out = np.split(both, 3)
        state = sigmoid(gate) * state + (1 - sigmoid(gate)) * np.tanh(candidate)
        latent = np.tanh(out)
    return tensors["markov_head.markov_w2.weight"] @ latent, state


def test_candidates_are_scored_by_the_token_before(tmp_path):
    tensors = dflash_tensors(second=True)
    drafter = converted(tmp_path, dflash_config(nested=SECOND), tensors)
    assert (drafter.config.selector_rank, drafter.config.selector_top_k) == (RANK, 5)
    hidden = _RNG.standard_normal((ROWS, WIDTH)).astype(np.float32)
    logits = _RNG.standard_normal((ROWS, 5)).astype(np.float32)
    candidates = _RNG.integers(0, VOCAB, (ROWS, 5)).astype(np.int32)
    found = jax.jit(candidate_scores)(drafter.params, hidden, logits, candidates, ANCHOR)
    at = "candidate_selector."
    for row in range(ROWS):
        query = tensors[f"{at}hidden_projection.weight"] @ hidden[row]
        query = query * tensors[f"{at}predecessor_codebook"][ANCHOR[row]]
        wanted = logits[row] + tensors[f"{at}successor_codebook"][candidates[row]] @ query
        np.testing.assert_allclose(found[row], wanted, atol=1e-4)


def test_logits_are_scaled_and_capped_where_the_file_says_so(tmp_path):
    nested = {"output_multiplier": 0.5, "final_logit_softcapping": 2.0}
    drafter = converted(tmp_path, dflash_config(nested=nested), dflash_tensors())
    hidden = _RNG.standard_normal((ROWS, BLOCK, WIDTH)).astype(np.float32)
    head = jax.jit(block_logits, static_argnums=0)
    found = head(drafter.config, drafter.params, hidden, matrix=HEAD)
    np.testing.assert_allclose(found, 2 * np.tanh(hidden @ HEAD.T / 4), atol=1e-4)


SPECULATORS = {
    "architectures": ["DFlashDraftModel"],
    "speculators_model_type": "dflash",
    "block_size": BLOCK,
    "draft_vocab_size": 16,
    "aux_hidden_state_layer_ids": [2, 6],
    "mask_token_id": MASK,
    "transformer_layer_config": LAYER_CONFIG
    | {"model_type": "qwen3", "num_hidden_layers": 2, "rope_theta": 1e6},
    "speculators_config": {"algorithm": "dflash", "verifier": {"name_or_path": "some/target"}},
}


WHOLE = SPECULATORS | {"draft_vocab_size": VOCAB}


def test_speculators_count_layers_otherwise_and_reduce_the_vocabulary(tmp_path):
    tensors = dflash_tensors()
    tensors["lm_head.weight"] = eagle3_tensors()["lm_head.weight"]
    ids, tensors["d2t"], tensors["t2d"] = reduced_vocabulary()
    tensors["verifier_norm.weight"] = np.ones(WIDTH, np.float32)
    drafter = converted(tmp_path, SPECULATORS, tensors)
    assert drafter.config.taps == (1, 5)
    np.testing.assert_array_equal(drafter.params["draft_to_target"], ids)
    np.testing.assert_allclose(run(drafter)[1], expected(tensors)[1], atol=1e-4)


@pytest.mark.fast
@pytest.mark.parametrize(
    ("config", "choices", "layout"),
    [
        (dflash_config(), UNSAID, "fill-in"),
        (dspark_config(), UNSAID, "anchor-first"),
        (dspark_config(architectures=["Qwen3DFlashModel"]), UNSAID, "anchor-first"),
        (dspark_config(), Choices(layout="fill-in"), "fill-in"),
        (dflash_config(sample_from_anchor=True), UNSAID, "anchor-first"),
        (dspark_config(query_zero_predicts_next=False), UNSAID, "fill-in"),
        (dflash_config(nested={"shift_label": True}), UNSAID, "anchor-first"),
        (WHOLE, UNSAID, "fill-in"),
        (WHOLE | {"speculators_model_type": "dspark"}, UNSAID, "anchor-first"),
        (WHOLE | {"sample_from_anchor": True}, UNSAID, "anchor-first"),
    ],
)
def test_the_blocks_layout_is_flagged_known_or_chosen(tmp_path, config, choices, layout):
    drafter = converted(tmp_path, config, dflash_tensors(), choices)
    assert drafter.config.layout == layout
    drafts = BLOCK - 1 if layout == "fill-in" else BLOCK
    assert drafter.config.num_drafts == drafts
    assert f"{layout}, {BLOCK} slots, {drafts} drafts" in drafter.describe()
    slots = jnp.arange(BLOCK, dtype=jnp.float32)[None, :, None]
    np.testing.assert_array_equal(drafted(drafter.config, slots), slots[:, BLOCK - drafts :])


@pytest.mark.fast
@pytest.mark.parametrize(
    ("config", "choices", "message"),
    [
        (dflash_config(nested={"projector_type": "domino"}), UNSAID, "projector_type='domino'"),
        (dflash_config(nested={"mask_token_id": VOCAB}), UNSAID, "61 is outside the 61 rows"),
        (dflash_config(nested={"mask_token_id": None}), UNSAID, "no 'mask_token_id'"),
        (dflash_config(nested={"target_layer_ids": [-1, 3]}), UNSAID, "the embeddings before"),
        (dflash_config(nested={"target_layer_ids": [1, 7]}), UNSAID, "the last of the target's 8"),
        (dflash_config(nested={"target_layer_ids": [1, 3, 5]}), UNSAID, "misshapen fc.weight"),
        (dflash_config(), Choices(layout="sideways"), "layout 'sideways' is not known"),
        (dflash_config(), Choices(taps="sideways"), "taps 'sideways' is not known"),
        (dflash_config(), Choices(taps="1,7"), "the last of the target's 8"),
        (
            dflash_config(sample_from_anchor=True, query_zero_predicts_next=False),
            UNSAID,
            "contradicts itself about the block's layout.*--layout",
        ),
        (dspark_config(markov_rank=6), UNSAID, "no 'markov_head_type'"),
        (dspark_config(markov_rank=6, markov_head_type="odd"), UNSAID, "'odd' is not supported"),
        (
            dspark_config(enable_confidence_head=True, confidence_head_with_markov=True),
            UNSAID,
            "there is no Markov head",
        ),
        (dspark_config(layer_types=["mamba"] * 2), UNSAID, "layers of type 'mamba'"),
        (SPECULATORS | {"speculators_model_type": "xpress"}, UNSAID, "'xpress' is not supported"),
        (SPECULATORS, UNSAID, "d2t, which says which ones, is missing|missing lm_head.weight"),
    ],
)
def test_what_it_cannot_do_is_refused(tmp_path, config, choices, message):
    write(tmp_path / "source", config, dflash_tensors())
    with pytest.raises(ConversionError, match=message):
        convert_drafter(tmp_path / "source", tmp_path / "converted", choices)
    assert not (tmp_path / "converted").exists()


@pytest.mark.fast
@pytest.mark.parametrize("ids", [[2, 6], None])
def test_the_tapped_layers_may_be_chosen_by_number(tmp_path, ids):
    config = dflash_config(nested={"target_layer_ids": ids})
    assert converted(tmp_path, config, dflash_tensors(), Choices(taps="1,5")).config.taps == (1, 5)


@pytest.mark.fast
def test_the_masks_row_behind_the_tokenizers_ids_is_kept(tmp_path):
    """61 rows of which a tokenizer would know fewer: the last one is the mask's."""
    tensors = dflash_tensors(embedding=True, head=True)
    drafter = converted(tmp_path, dspark_config(), tensors)
    assert drafter.config.mask_token_id == MASK
    np.testing.assert_array_equal(drafter.params["embed"], tensors["embed_tokens.weight"])
    short = tensors | {"embed_tokens.weight": tensors["embed_tokens.weight"][:MASK]}
    write(tmp_path / "short", dspark_config(), short)
    with pytest.raises(ConversionError, match="misshapen embed_tokens.weight"):
        convert_drafter(tmp_path / "short", tmp_path / "none")

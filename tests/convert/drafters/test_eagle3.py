"""EAGLE-3 checkpoints of every writer against the definition in NumPy."""

import functools

import jax
import numpy as np
import pytest
from convert.drafters.numpy_layers import attention, frequencies, layer, mlp, rms, triangle
from convert.drafters.tiny_drafters import (
    DRAFT_VOCAB,
    HEAD_DIM,
    LAYER_CONFIG,
    TARGET_WIDTH,
    VOCAB,
    WIDTH,
    eagle3_config,
    eagle3_tensors,
    reduced_vocabulary,
    write,
)
from fixtures import _angles

from ckpt_convert import ConversionError
from ckpt_convert.drafters import UNSAID, Choices, convert_drafter, load_drafter
from specjax.models import Rope
from specjax.models.eagle3 import (
    eagle3_features,
    eagle3_logits,
    fed_back,
    fuse_taps,
    masked_feature,
)

ROWS, LENGTH = 2, 7
_RNG = np.random.default_rng(5)
TOKENS = _RNG.integers(0, VOCAB, (ROWS, LENGTH)).astype(np.int32)
POSITIONS = np.arange(ROWS * LENGTH, dtype=np.int32).reshape(ROWS, LENGTH) + 400


EMBEDDING = _RNG.standard_normal((VOCAB, WIDTH)).astype(np.float32)


def tapped(count=3, width=TARGET_WIDTH):
    rng = np.random.default_rng(6)
    return rng.standard_normal((ROWS, LENGTH, count, width)).astype(np.float32)


@functools.partial(jax.jit, static_argnums=0)
def forward(config, params, tokens, streams, positions, embed=None):
    """One step on the target's streams and one on the network's own: features and logits."""
    fused = fuse_taps(config, params, streams)
    first, _ = eagle3_features(config, params, tokens, fused, positions, embed=embed)
    again = fed_back(config, params, first)
    second, _ = eagle3_features(config, params, tokens, again, positions, embed=embed)
    return fused, first, second, eagle3_logits(config, params, second)


def expected(
    tensors,
    streams,
    *,
    at="midlayer.",
    layers=1,
    freqs=None,
    residual_normed=False,
    norms=(),
    input_norm=False,
    output_normed=False,
):
    freqs = frequencies(HEAD_DIM) if freqs is None else freqs
    out = []
    for row in range(ROWS):
        parts = streams[row].astype(np.float64)
        if norms:
            parts = np.stack(
                [rms(parts[:, i], tensors[f"{n}.weight"]) for i, n in enumerate(norms)], 1
            )
        flat = parts.reshape(LENGTH, -1)
        if input_norm:
            flat = rms(flat, tensors["input_norm.weight"])
        fused = flat @ tensors["fc.weight"].T

        def step(g, row=row):
            normed = rms(g, tensors[f"{at}hidden_norm.weight"])
            embedded = tensors.get("embed_tokens.weight", EMBEDDING)[TOKENS[row]]
            embedded = rms(embedded.astype(np.float64), tensors[f"{at}input_layernorm.weight"])
            inputs = np.concatenate([embedded, normed], axis=-1)
            place = POSITIONS[row], freqs, triangle(LENGTH), HEAD_DIM
            x = (normed if residual_normed else g) + attention(
                tensors, f"{at}self_attn.", inputs, *place
            )
            x = x + mlp(
                tensors, f"{at}mlp.", rms(x, tensors[f"{at}post_attention_layernorm.weight"])
            )
            for index in range(1, layers):
                x = layer(tensors, f"layers.{index}.", x, *place)
            return x

        first = step(fused)
        second = step(rms(first, tensors["norm.weight"]) if output_normed else first)
        logits = rms(second, tensors["norm.weight"]) @ tensors["lm_head.weight"].T
        out.append((fused, first, second, logits))
    return [np.stack(parts) for parts in zip(*out, strict=True)]


def converted(tmp_path, config, tensors, choices=UNSAID):
    write(tmp_path / "source", config, tensors)
    convert_drafter(tmp_path / "source", tmp_path / "converted", choices)
    return load_drafter(tmp_path / "converted")


NESTED = {"architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3"}
SPECULATORS = NESTED | {
    "speculators_version": "0.3.0",
    "draft_vocab_size": DRAFT_VOCAB,
    "target_hidden_size": TARGET_WIDTH,
    "transformer_layer_config": LAYER_CONFIG | {"model_type": "llama", "num_hidden_layers": 1},
    "speculators_config": {
        "algorithm": "eagle3",
        "default_proposal_method": "greedy",
        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 5}],
        "verifier": {"name_or_path": "some/target", "architectures": ["LlamaForCausalLM"]},
    },
}
LOW_MID_HIGH = ("aux_norm_low", "aux_norm_mid", "aux_norm_high")

CASES = {
    "authors'": ({}, eagle3_config(), {}),
    "vLLM's names, normed residual": (
        {"layer": "layers.0."},
        eagle3_config(norm_before_residual=True),
        {"at": "layers.0.", "residual_normed": True},
    ),
    "speculators'": ({"layer": "layers.0."}, SPECULATORS, {"at": "layers.0."}),
    "a norm before fc, biased heads": (
        {"norm_before_fc": True, "qkv_bias": True},
        eagle3_config(eagle_config={"norm_before_fc": True, "use_aux_hidden_state": True}),
        {"input_norm": True},
    ),
    "a norm for each tap, the output normed": (
        {"fc_norm": ("fc_norm.0", "fc_norm.1", "fc_norm.2")},
        eagle3_config(fc_norm=True, norm_output=True),
        {"norms": ("fc_norm.0", "fc_norm.1", "fc_norm.2"), "output_normed": True},
    ),
    "the taps' norms by their old names": (
        {"fc_norm": LOW_MID_HIGH},
        eagle3_config(use_aux_norm=True),
        {"norms": LOW_MID_HIGH},
    ),
    "SpecForge's: the target's embedding, a part of each head turned": (
        {"embedding": False, "target_width": WIDTH},
        eagle3_config(target_hidden_size=WIDTH, partial_rotary_factor=0.5),
        {"freqs": frequencies(4)},
    ),
    "two layers": ({"layers": 2}, eagle3_config(num_hidden_layers=2), {"layers": 2}),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_features_and_logits_are_the_definitions(tmp_path, case):
    made, config, how = case
    tensors = eagle3_tensors(**made)
    drafter = converted(tmp_path, config, tensors)
    assert drafter.method == "eagle3"
    streams = tapped(width=drafter.config.target_hidden_size)
    embed = None if drafter.config.own_embedding else EMBEDDING
    found = forward(drafter.config, drafter.params, TOKENS, streams, POSITIONS, embed)
    for one, other in zip(found, expected(tensors, streams, **how), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-4)


def test_each_trap_would_be_seen():
    """The definition read wrongly: taps or fc's inputs in another order, flags not heeded."""
    tensors, streams = eagle3_tensors(), tapped()
    right = expected(tensors, streams)[3]
    wrong = [
        expected(tensors, streams[:, :, ::-1]),
        expected(tensors, streams, residual_normed=True),
        expected(tensors, streams, output_normed=True),
        expected(tensors, streams, freqs=frequencies(HEAD_DIM, 500_000.0)),
    ]
    assert min(np.abs(right - one[3]).max() for one in wrong) > 1e-2


ROPES = {
    "absent": ({}, Rope()),
    "1e6": ({"rope_theta": 1e6}, Rope(theta=1e6)),
    "newer spelling": (
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
        Rope(theta=1e6),
    ),
    "llama3": (
        {
            "rope_theta": 500_000.0,
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        },
        Rope(500_000.0, "llama3", 8.0, 1.0, 4.0, 64),
    ),
}


@pytest.mark.parametrize("config", ROPES.values(), ids=ROPES)
def test_A7_the_rope_is_the_drafts_own(tmp_path, config):
    """Positions from 400 on: at the first ones every base looks alike."""
    settings, rope = config
    tensors = eagle3_tensors()
    drafter = converted(tmp_path, eagle3_config(**settings), tensors)
    assert drafter.config.layer.rope == rope
    found = forward(drafter.config, drafter.params, TOKENS, tapped(), POSITIONS)
    right = expected(tensors, tapped(), freqs=_angles(rope, 2, HEAD_DIM)[1])
    np.testing.assert_allclose(found[3], right[3], atol=1e-4)


def test_V3_offsets_become_the_targets_ids(tmp_path):
    tensors = eagle3_tensors()
    tensors["lm_head.weight"] = tensors["lm_head.weight"][:4]
    tensors["d2t"] = np.array([0, 2, 2, 6], np.int64)
    tensors["t2d"] = np.isin(np.arange(VOCAB), [0, 3, 4, 9])
    drafter = converted(tmp_path, eagle3_config(draft_vocab_size=4), tensors)
    np.testing.assert_array_equal(drafter.params["draft_to_target"], [0, 3, 4, 9])
    assert drafter.params["draft_to_target"].dtype == np.int32
    assert "61, of which 4 are drafted" in drafter.describe()


@pytest.mark.fast
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"d2t": None}, "d2t, which says which ones, is missing"),
        ({"d2t": reduced_vocabulary()[0]}, "d2t"),
        ({"d2t": np.zeros(DRAFT_VOCAB, np.int64)}, "leads to other target ids than t2d marks"),
        ({"d2t": np.zeros(3, np.int64)}, r"d2t is of shape \[3\], expected \[16\]"),
        ({"t2d": np.ones(5, bool)}, r"t2d is of shape \[5\], expected \[61\]"),
        ({"d2t": -np.arange(DRAFT_VOCAB)}, "the same target id twice"),
        ({"d2t": np.full(DRAFT_VOCAB, VOCAB - 1)}, "leads to the id 61 of a vocabulary of 61"),
        ({"lm_head.weight": None}, "missing lm_head.weight"),
        ({"fc.weight": np.zeros((WIDTH, 2 * TARGET_WIDTH), np.float32)}, "misshapen fc.weight"),
        ({"midlayer.hidden_norm.weight": None}, "no drafter of a format that is known"),
        ({"embed_tokens.weight": None}, "embeddings are 20 wide instead of 24"),
        ({"layers.0.hidden_norm.weight": np.ones(WIDTH, np.float32)}, "under two names"),
    ],
)
def test_V3_what_contradicts_itself_is_refused(tmp_path, change, message):
    tensors = eagle3_tensors() | change
    tensors = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    write(tmp_path / "source", eagle3_config(), tensors)
    with pytest.raises(ConversionError, match=message):
        convert_drafter(tmp_path / "source", tmp_path / "converted")
    assert not (tmp_path / "converted").exists()


@pytest.mark.fast
@pytest.mark.parametrize("offsets", [None, np.zeros(VOCAB, np.int64)])
def test_V3_a_whole_vocabulary_has_no_map(tmp_path, offsets):
    """Its head is the target's where there is none; the map may be left out or all zeros."""
    tensors = {
        n: t for n, t in eagle3_tensors().items() if n not in ("d2t", "t2d", "lm_head.weight")
    }
    if offsets is not None:
        tensors["d2t"] = offsets
    drafter = converted(tmp_path, eagle3_config(draft_vocab_size=VOCAB), tensors)
    assert "draft_to_target" not in drafter.params and not drafter.config.own_head
    assert "borrows     the target's head" in drafter.describe()


def test_a_tied_head_is_the_embedding(tmp_path):
    left_out = ("d2t", "t2d", "lm_head.weight")
    tensors = {name: tensor for name, tensor in eagle3_tensors().items() if name not in left_out}
    config = eagle3_config(draft_vocab_size=VOCAB, tie_word_embeddings=True)
    drafter = converted(tmp_path, config, tensors)
    assert "borrows" not in drafter.describe()
    found = forward(drafter.config, drafter.params, TOKENS, tapped(), POSITIONS)
    right = expected(tensors | {"lm_head.weight": tensors["embed_tokens.weight"]}, tapped())
    np.testing.assert_allclose(found[3], right[3], atol=1e-4)


@pytest.mark.fast
@pytest.mark.parametrize(
    ("settings", "choices", "taps"),
    [
        ({}, Choices(), ()),
        (
            {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 16, 29]}},
            Choices(),
            (1, 15, 28),
        ),
        ({"target_layer_ids": [1, 15, 28]}, Choices(), (1, 15, 28)),
        # The name of inputs over the numbers of outputs, as some trainers write it.
        ({"eagle_aux_hidden_state_layer_ids": [1, 15, 28]}, Choices(), (1, 15, 28)),
        ({"target_layer_ids": [2, 16, 29]}, Choices(taps="hidden-states"), (1, 15, 28)),
        ({"target_layer_ids": [2, 16, 29]}, Choices(taps="1,15,28"), (1, 15, 28)),
        ({}, Choices(taps="1,15,28"), (1, 15, 28)),
    ],
)
def test_A3_taps_are_counted_one_way(tmp_path, caplog, settings, choices, taps):
    drafter = converted(tmp_path, eagle3_config(**settings), eagle3_tensors(), choices)
    assert drafter.config.taps == taps
    assert drafter.config.taps_in(32) == (1, 15, 28)
    assert ("names no tapped layers" in caplog.text) == (taps == ())


@pytest.mark.fast
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"eagle_aux_hidden_state_layer_ids": [0, 3, 5]}, "before the first layer.*--taps"),
        (
            {"eagle_aux_hidden_state_layer_ids": [2, 3, 5], "target_layer_ids": [2, 3, 5]},
            "not the same layers",
        ),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state=False"),
        ({"norm_before_fc": True}, "missing input_norm.weight"),
        ({"fc_norm": True}, "missing fc_norm.0.weight; missing fc_norm.1.weight"),
    ],
)
def test_flags_that_cannot_be_followed_are_refused(tmp_path, settings, message):
    write(tmp_path / "source", eagle3_config(**settings), eagle3_tensors())
    with pytest.raises(ConversionError, match=message):
        convert_drafter(tmp_path / "source", tmp_path / "converted")


@pytest.mark.fast
@pytest.mark.parametrize(
    ("taps", "message"),
    [
        ("hidden-states", "names no tapped layers, so nothing is counted.*--taps 1,15,28"),
        ("1,2", "misshapen fc.weight"),
        ("1,15,", "taps '1,15,' is not known"),
    ],
)
def test_a_choice_of_taps_that_makes_no_sense_is_refused(tmp_path, taps, message):
    settings = {"target_layer_ids": [1, 15, 28]} if taps == "1,15," else {}
    write(tmp_path / "source", eagle3_config(**settings), eagle3_tensors())
    with pytest.raises(ConversionError, match=message):
        convert_drafter(tmp_path / "source", tmp_path / "converted", Choices(taps=taps))


@pytest.mark.fast
def test_a_parallel_drafter_brings_what_stands_for_the_unknown(tmp_path):
    tensors = eagle3_tensors(layer="layers.0.", layers=4)
    tensors.add("mask_hidden", 1, 1, 3 * TARGET_WIDTH)
    nested = LAYER_CONFIG | {"model_type": "llama", "num_hidden_layers": 4}
    config = SPECULATORS | {
        "speculators_model_type": "peagle",
        "mask_token_id": 3,
        "transformer_layer_config": nested,
    }
    drafter = converted(tmp_path, config, tensors)
    assert (drafter.config.num_layers, drafter.config.mask_token_id) == (4, 3)
    np.testing.assert_array_equal(drafter.params["mask_hidden"], tensors["mask_hidden"].ravel())
    feature = jax.jit(masked_feature, static_argnums=0)(drafter.config, drafter.params)
    wanted = tensors["fc.weight"] @ tensors["mask_hidden"].ravel()
    np.testing.assert_allclose(feature[0, 0], wanted, atol=1e-4)
    assert drafter.target == "some/target"
    write(tmp_path / "beyond", config | {"mask_token_id": VOCAB}, tensors)
    with pytest.raises(ConversionError, match=f"mask_token_id {VOCAB} is outside the {VOCAB} rows"):
        convert_drafter(tmp_path / "beyond", tmp_path / "unwritten")

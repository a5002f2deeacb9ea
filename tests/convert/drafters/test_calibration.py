"""A reading that no flag settles is told by what the target accepts."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from convert.drafters.tiny_drafters import (
    BLOCK,
    VOCAB,
    WIDTH,
    dflash_tensors,
    dspark_config,
    eagle3_config,
    eagle3_tensors,
    eagle_config,
    eagle_tensors,
    write,
)

from ckpt_convert import ConversionError
from ckpt_convert.drafters import Choices, convert_drafter, load_drafter
from ckpt_convert.drafters.calibration import (
    Calibration,
    block_reading,
    block_readings,
    calibrate,
    next_reading,
    next_readings,
    tapped_reading,
    tapped_readings,
)
from ckpt_convert.drafters.pairing import refuse_mismatch
from specjax.models import DecoderConfig
from specjax.models.dflash import (
    block_hidden,
    block_tokens,
    context_features,
    context_keys_values,
)
from specjax.models.eagle import eagle_features
from specjax.models.eagle3 import Eagle3Config, eagle3_features, eagle3_logits, fuse_taps
from specjax.models.medusa import MedusaConfig

# The target repeats five tokens for ever; its streams tell them apart, layer by layer.
CYCLE = np.array([7, 23, 3, 41, 11], np.int32)
TEXT = np.tile(CYCLE, 8)
LAYERS = 8
PLACES = range(10, 30)
WINDOWED = {"layer_types": ["sliding_attention"] * 2, "sliding_window": 5}


def tapped(layers, text=TEXT):
    """[L, F, E] of the target."""
    if max(layers) >= LAYERS:
        raise ValueError("no such layer")
    shape = VOCAB, WIDTH
    streams = [np.random.default_rng(50 + layer).standard_normal(shape)[text] for layer in layers]
    return jnp.asarray(np.stack(streams, axis=1), jnp.float32)


@functools.partial(jax.jit, static_argnums=0)
def states(config, params, features, place):
    """The states of the slots of a block that begins at ``place``."""
    positions = jnp.arange(len(TEXT))[None]
    context = context_features(config, params, features[None])
    pairs = context_keys_values(config, params, context, positions)
    block = block_tokens(config, jnp.asarray(TEXT)[place][None])
    slots = place + jnp.arange(BLOCK)[None]
    known = jnp.where(positions < place, positions, -1)
    return block_hidden(config, params, block, slots, pairs, known)[0]


def fitted(tmp_path, layout, **kind):
    """A checkpoint whose head is solved for, so that it drafts perfectly in this layout."""
    tensors = dflash_tensors(embedding=True, head=True, **kind)
    config = dspark_config(**WINDOWED)
    if kind:
        config |= {"markov_rank": 6, "markov_head_type": kind["markov"]}
        tensors["markov_head.markov_w2.weight"] *= 1e-3
    write(tmp_path / "unfitted", config, tensors)
    convert_drafter(tmp_path / "unfitted", tmp_path / "first", Choices(layout=layout))
    drafter = load_drafter(tmp_path / "first")
    drafts, hidden, wanted = drafter.config.num_drafts, [], []
    for place in PLACES[: len(CYCLE)]:
        slots = states(drafter.config, drafter.params, tapped((1, 5)), place)
        hidden.append(np.asarray(slots[BLOCK - drafts :], np.float64))
        wanted.append(TEXT[place + 1 : place + 1 + drafts])
    targets = np.eye(VOCAB)[np.concatenate(wanted)]
    head = np.linalg.lstsq(np.concatenate(hidden), targets, rcond=None)[0]
    tensors["lm_head.weight"] = head.T.astype(np.float32)
    return write(tmp_path / "source", config, tensors)


def judged(source, converted, choices):
    convert_drafter(source, converted, choices)
    drafter = load_drafter(converted)
    readings = block_readings(drafter.config, drafter.params, TEXT, tapped)
    return calibrate(readings, TEXT, PLACES, block_reading(drafter.config))


@pytest.mark.parametrize(
    ("layout", "wrong", "kind"),
    [
        ("fill-in", "anchor-first", {}),
        ("anchor-first", "fill-in", {}),
        ("anchor-first", "fill-in", {"markov": "vanilla"}),
    ],
)
def test_a_wrong_layout_drafts_nothing_and_is_refused(tmp_path, layout, wrong, kind):
    source = fitted(tmp_path, layout, **kind)
    right = judged(source, tmp_path / "right", Choices(layout=layout))
    drafts = BLOCK - (layout == "fill-in")
    assert right.accepted[right.best].mean() == drafts and right.best == right.chosen
    right.check()
    found = judged(source, tmp_path / "wrong", Choices(layout=wrong))
    # Chance, among five tokens.
    assert found.accepted[found.chosen].mean() < 0.5 < 3 <= found.accepted[found.best].mean()
    assert found.best == f"{layout} after layers 1, 5"
    with pytest.raises(ConversionError, match=f"read as {layout} after layers 1, 5; convert"):
        found.check()
    table = str(found).splitlines()
    assert len(table) == 7 and "best" in next(line for line in table if line.startswith(layout))


def test_taps_one_layer_off_are_seen(tmp_path):
    source = fitted(tmp_path, "anchor-first")
    found = judged(source, tmp_path / "converted", Choices(taps="hidden-states"))
    assert found.chosen == "anchor-first after layers 0, 4"
    assert found.best == "anchor-first after layers 1, 5"
    with pytest.raises(ConversionError, match="after layers 1, 5; convert"):
        found.check()


def solved(hidden, follows, rows):
    """The head that leads these states to these tokens."""
    targets = np.eye(rows)[follows]
    return np.linalg.lstsq(np.asarray(hidden, np.float64), targets, rcond=None)[0].T


@pytest.mark.parametrize("embedding", ["raw", "scaled"])
def test_scaled_embeddings_are_told_from_raw_ones(tmp_path, embedding):
    write(tmp_path / "source", eagle_config(), eagle_tensors())
    convert_drafter(tmp_path / "source", tmp_path / "converted", Choices(embedding=embedding))
    drafter = load_drafter(tmp_path / "converted")
    # More tokens in turn than five: states lie closer together.
    text = np.tile(np.random.default_rng(31).permutation(VOCAB)[:18], 4).astype(np.int32)
    places = jnp.arange(len(text) - 1)[None]
    known = tapped((0,), text)[:, 0]
    run = jax.jit(eagle_features, static_argnums=0)
    state, _ = run(drafter.config, drafter.params, text[None, 1:], known[None, :-1], places)
    matrix = jnp.asarray(solved(state[0, :-1], text[2:], VOCAB), jnp.float32)
    other = "raw" if embedding == "scaled" else "scaled"
    found = {}
    for chosen in (embedding, other):
        scale = np.sqrt(WIDTH) if chosen == "scaled" else 1.0
        config = replace(drafter.config, embedding_scale=float(scale))
        readings = next_readings(config, drafter.params, text, known, matrix=matrix)
        found[chosen] = calibrate(readings, text, range(10, 70), next_reading(config))
    found[embedding].check()
    assert found[embedding].best == f"{embedding} embeddings" == found[other].best
    assert found[other].chosen_is_worse


# Where the streams are tapped, what config.json says of it, and what was chosen by mistake.
TAPPED = {
    "as in the paper": ((1, 3, 4), {}, None),
    "the paper's numbers as layers' outputs": ((2, 4, 5), {}, None),
    "evenly": ((1, 3, 5), {}, None),
    "counted otherwise than the name says": (
        (2, 4, 5),
        {"eagle_aux_hidden_state_layer_ids": [2, 4, 5]},
        None,
    ),
    "as the name says": (
        (1, 3, 4),
        {"eagle_aux_hidden_state_layer_ids": [2, 4, 5]},
        "after-layer",
    ),
}


@pytest.mark.parametrize(("taps", "settings", "mistake"), TAPPED.values(), ids=TAPPED)
def test_the_tapped_layers_are_told_by_what_is_accepted(tmp_path, taps, settings, mistake):
    """The drafter is solved for: after these layers, and the residual not normed, it is right."""
    tensors = eagle3_tensors(target_width=WIDTH)
    for name in ("d2t", "t2d", "lm_head.weight"):
        del tensors[name]
    config = eagle3_config(draft_vocab_size=VOCAB, target_hidden_size=WIDTH, **settings)
    write(tmp_path / "source", config, tensors)
    text = np.tile(np.random.default_rng(31).permutation(VOCAB)[:18], 4).astype(np.int32)

    def judged(choice):
        convert_drafter(tmp_path / "source", tmp_path / str(choice), Choices(taps=choice))
        drafter = load_drafter(tmp_path / str(choice))
        readings = tapped_readings(
            drafter.config,
            drafter.params,
            text,
            functools.partial(tapped, text=text),
            LAYERS,
            matrix=solved_head(drafter, taps, text),
        )
        return calibrate(readings, text, range(10, 70), tapped_reading(drafter.config, LAYERS))

    right = f"after layers {', '.join(map(str, taps))}, the residual before its norm"
    found = judged(mistake)
    assert found.best == right
    assert (found.chosen != right) == found.chosen_is_worse
    # Of the even taps two are the paper's, and half of the drafts are right.
    if found.chosen_is_worse and taps != (1, 3, 5):
        with pytest.raises(ConversionError, match=f"read as {right}; convert"):
            found.check()
    mended = judged(",".join(map(str, taps)))
    assert mended.best == mended.chosen == right and mended.accepted[right].mean() == 1
    mended.check()
    after = right.partition(", the residual")[0]
    others = [ok.mean() for name, ok in mended.accepted.items() if not name.startswith(after)]
    assert len(others) == 4 and max(others) < 0.6


def solved_head(drafter, taps, text):
    """The head with which the drafter is right where it is told the streams after ``taps``."""
    plain = replace(drafter.config, taps=(), norm_before_residual=False)
    streams, places = tapped(taps, text)[None, :-1], jnp.arange(len(text) - 1)[None]
    normed = normed_states(plain, drafter.params, streams, text[None, 1:], places)
    return jnp.asarray(solved(normed[0, :-1], text[2:], VOCAB), jnp.float32)


@functools.partial(jax.jit, static_argnums=0)
def normed_states(config, params, streams, follows, places):
    fused = fuse_taps(config, params, streams)
    state, _ = eagle3_features(config, params, follows, fused, places)
    return eagle3_logits(config, params, state, matrix=jnp.eye(WIDTH))


def test_a_normed_residual_is_told_from_one_that_is_not(tmp_path):
    tensors = eagle3_tensors(target_width=WIDTH)
    write(tmp_path / "source", eagle3_config(target_hidden_size=WIDTH), tensors)
    convert_drafter(tmp_path / "source", tmp_path / "converted")
    drafter = load_drafter(tmp_path / "converted")
    readings = tapped_readings(drafter.config, drafter.params, TEXT, tapped, LAYERS)
    places = jnp.arange(len(TEXT) - 1)[None]
    run = jax.jit(both_eagle3, static_argnums=0)
    for normed in (False, True):
        config = replace(drafter.config, norm_before_residual=normed)
        logits = run(config, drafter.params, tapped((1, 3, 4))[None, :-1], TEXT[None, 1:], places)
        ids = np.asarray(drafter.params["draft_to_target"])[np.argmax(logits[0], -1)]
        propose = readings[tapped_reading(config, LAYERS)]
        assert [propose(place)[0] for place in PLACES] == list(ids[9:29])


def both_eagle3(config, params, tapped, follows, places):
    fused = fuse_taps(config, params, tapped)
    state, _ = eagle3_features(config, params, follows, fused, places)
    return eagle3_logits(config, params, state)


@pytest.mark.fast
def test_what_may_be_chance_is_not_refused(caplog):
    even = np.array([1, 0, 1, 0, 1, 0, 1, 0] * 4)
    Calibration("a", {"a": even, "b": 1 - even}).check()
    assert Calibration("a", {"a": even, "b": even.copy()}).best == "a"
    better = Calibration("a", {"a": even + 1, "b": even + 2})
    better.check()
    assert "1.50 drafts are accepted a round, and 2.50 read as b" in caplog.text
    with pytest.raises(ConversionError, match="0.50 drafts are accepted a round, and 1.50"):
        Calibration("a", {"a": even, "b": even + 1}).check()
    with pytest.raises(ConversionError, match="'c' is none of the readings"):
        calibrate({"a": lambda place: [1]}, TEXT, PLACES, "c")
    for places in ([], [0, 5], [5, len(TEXT) - 1], [-1]):
        with pytest.raises(ConversionError, match="places from 1 to 38 of a text of 40 tokens"):
            calibrate({"a": lambda place: [1]}, TEXT, places, "a")


TARGET = DecoderConfig(
    vocab_size=VOCAB,
    hidden_size=WIDTH,
    intermediate_size=48,
    num_layers=8,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    max_position=64,
)


@pytest.mark.fast
def test_a_drafter_for_another_target_is_refused(tmp_path):
    write(tmp_path / "source", dspark_config(), dflash_tensors())
    convert_drafter(tmp_path / "source", tmp_path / "converted")
    config = load_drafter(tmp_path / "converted").config
    refuse_mismatch(config, TARGET)
    refuse_mismatch(MedusaConfig(VOCAB, VOCAB, WIDTH, 4), TARGET)
    with pytest.raises(ConversionError, match="trained on a target 24 wide, this one is 32 wide"):
        refuse_mismatch(config, replace(TARGET, hidden_size=32))
    with pytest.raises(ConversionError, match="taps the layers 1, 5 and the target has 5"):
        refuse_mismatch(config, replace(TARGET, num_layers=5))
    eagle3 = Eagle3Config(VOCAB, VOCAB, config.layer, WIDTH)
    with pytest.raises(ConversionError, match="taps the layers 1, 0, -1 and the target has 3"):
        refuse_mismatch(eagle3, replace(TARGET, num_layers=3))
    with pytest.raises(ConversionError, match="mask token 60 has no row among the 60"):
        refuse_mismatch(config, replace(TARGET, vocab_size=60))

"""The decoder against a transformer in NumPy that sees the whole sequence at once."""

import functools
from dataclasses import make_dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fixtures import TINY_CONFIG, decoder_oracle, decoder_residuals, random_params

from specjax.models import DecoderConfig, DecoderTarget, Rope
from specjax.models.decoder import unstack
from specjax.models.settings import check_numbers
from specjax.prefill import prefill
from specjax.sharding import make_mesh, parameter_shardings, row_shardings
from specjax.tree import chain
from specjax.types import Context

ROWS, LENGTH, SLOTS = 3, 24, 40
CLOSE = {"atol": 1e-4, "rtol": 1e-5}

FAMILIES = {
    "full attention": replace(TINY_CONFIG, windows=()),
    "mixed windows": TINY_CONFIG,
    "tied head, all heads alike": replace(TINY_CONFIG, tie_embeddings=True, num_kv_heads=4),
    "llama3 RoPE": replace(TINY_CONFIG, rope=Rope(500.0, "llama3", 8.0, 1.0, 4.0, 32)),
    "linear RoPE": replace(TINY_CONFIG, rope=Rope(500.0, "linear", 4.0)),
    "biases": replace(TINY_CONFIG, qkv_bias=True, num_kv_heads=1),
    "normed heads, wide": replace(TINY_CONFIG, qk_norm=True, head_dim=16),
}
TOKENS = np.random.default_rng(3).integers(0, TINY_CONFIG.vocab_size, (ROWS, LENGTH))
TOKENS = TOKENS.astype(np.int32)


@functools.cache
def _params(config: DecoderConfig):
    return random_params(DecoderTarget(config), seed=1)


@functools.cache
def _expected(config: DecoderConfig):
    return decoder_residuals(config, _params(config), TOKENS)


@functools.cache
def _call(target: DecoderTarget, taps=()):
    """The target as a compiled function of (params, tokens, parents, cache, logits_at)."""

    def call(params, tokens, parents, cache, logits_at=None):
        return target(params, tokens, parents, cache, logits_at=logits_at, taps=taps)

    return jax.jit(call)


def _unstacked(params):
    return unstack(jax.tree.map(lambda leaf: leaf, params))


def _tokens(start, stop):
    return jnp.asarray(TOKENS[:, start:stop])


@pytest.mark.parametrize("config", FAMILIES.values(), ids=FAMILIES)
def test_stacked_and_unrolled_equal_the_oracle(config):
    expected = _expected(config)[1]
    for stacked in (True, False):
        target = DecoderTarget(config, stacked=stacked)
        params = _params(config) if stacked else _unstacked(_params(config))
        out = _call(target)(params, _tokens(0, LENGTH), None, target.init_cache(ROWS, SLOTS))
        np.testing.assert_allclose(out.logits, expected, **CLOSE)
        np.testing.assert_array_equal(out.cache.length, 0)


@pytest.mark.parametrize("config", [TINY_CONFIG, FAMILIES["normed heads, wide"]])
def test_blocks_with_a_rollback_in_the_middle(config):
    """Blocks of 5, of which 1 to 5 tokens stay, at each row's own pace."""
    target, params = DecoderTarget(config), _params(config)
    expected, rng = _expected(config)[1], np.random.default_rng(4)
    cache = target.init_cache(ROWS, SLOTS)
    while (left := LENGTH - np.asarray(cache.length)).min() >= 5:
        start = np.asarray(cache.length)
        block = np.stack([TOKENS[row, at : at + 5] for row, at in enumerate(start)])
        kept = rng.integers(1, 6, ROWS)
        wrong = np.arange(5) >= kept[:, None]
        block = np.where(wrong, (block + 1) % config.vocab_size, block)
        out = _call(target)(params, jnp.asarray(block), None, cache)
        for row in range(ROWS):
            np.testing.assert_allclose(
                out.logits[row, : kept[row]],
                expected[row, start[row] : start[row] + kept[row]],
                **CLOSE,
            )
        # What was kept too much is dropped again.
        cache = out.cache.commit(None, jnp.full((ROWS,), 5)).rollback(jnp.asarray(5 - kept))
        np.testing.assert_array_equal(cache.length, start + kept)
    assert left.max() < LENGTH


def test_windows_at_every_length():
    """One token at a time, past the window of 8 and its multiples."""
    target, params = DecoderTarget(TINY_CONFIG), _params(TINY_CONFIG)
    expected, cache = _expected(TINY_CONFIG)[1], target.init_cache(ROWS, SLOTS)
    for place in range(LENGTH):
        out = _call(target)(params, _tokens(place, place + 1), None, cache)
        np.testing.assert_allclose(out.logits[:, 0], expected[:, place], **CLOSE)
        cache = out.cache.commit(None, jnp.ones((ROWS,), jnp.int32))


def test_the_oracle_feels_the_window():
    blind = decoder_oracle(replace(TINY_CONFIG, windows=()), _params(TINY_CONFIG), TOKENS)
    difference = np.abs(blind - _expected(TINY_CONFIG)[1]).max(axis=(0, 2))
    np.testing.assert_allclose(difference[:8], 0, atol=1e-12)
    assert difference[8:].min() > 1e-3


@pytest.mark.parametrize("chunk", [1, 5, 8, 24])
def test_prefill_in_any_chunk(chunk):
    """Ragged prompts, padded with other tokens; logits and features where each row ends."""
    target, params = DecoderTarget(TINY_CONFIG), _params(TINY_CONFIG)
    length = np.array([1, 13, 24], np.int32)
    prompt = Context(jnp.asarray(TOKENS), jnp.asarray(length))
    cache = target.init_cache(ROWS, LENGTH + 24)
    done = prefill(target, params, prompt, cache, chunk=chunk, taps=(1,))
    residuals, logits = _expected(TINY_CONFIG)
    np.testing.assert_array_equal(done.cache.length, length)
    for row, end in enumerate(length):
        np.testing.assert_allclose(done.logits[row], logits[row, end - 1], **CLOSE)
        np.testing.assert_allclose(done.features[row, :end, 0], residuals[1][row, :end], **CLOSE)


@pytest.mark.parametrize("stacked", [True, False])
@pytest.mark.parametrize("taps", [(0,), (2, 0), (1, 1)])
def test_taps_hand_out_the_residual_stream_in_the_order_asked_for(taps, stacked):
    target, params = DecoderTarget(TINY_CONFIG, stacked=stacked), _params(TINY_CONFIG)
    params = params if stacked else _unstacked(params)
    cache = target.init_cache(ROWS, SLOTS)
    out = _call(target, taps)(params, _tokens(0, LENGTH), None, cache)
    expected = np.stack([_expected(TINY_CONFIG)[0][tap] for tap in taps], axis=2)
    np.testing.assert_allclose(out.features, expected, **CLOSE)


def test_logits_at_one_token_of_each_row():
    target, params = DecoderTarget(TINY_CONFIG), _params(TINY_CONFIG)
    at = jnp.array([0, 11, 23])
    cache = target.init_cache(ROWS, SLOTS)
    out = _call(target)(params, _tokens(0, LENGTH), None, cache, at)
    assert out.logits.shape == (ROWS, 1, TINY_CONFIG.vocab_size)
    expected = _expected(TINY_CONFIG)[1][np.arange(ROWS), np.asarray(at)]
    np.testing.assert_allclose(out.logits[:, 0], expected, **CLOSE)


@pytest.mark.parametrize("stacked", [True, False])
@pytest.mark.parametrize("layers", [1, 2])
def test_first_layers_over_the_whole_models_parameters(layers, stacked):
    target, params = DecoderTarget(TINY_CONFIG, stacked=stacked), _params(TINY_CONFIG)
    early = target.first_layers(layers)
    mixed = replace(TINY_CONFIG, ropes=(Rope(), None, Rope(500.0)))
    assert DecoderTarget(mixed).first_layers(layers).config.ropes == mixed.ropes[:layers]
    given = params if stacked else _unstacked(params)
    cache = early.init_cache(ROWS, SLOTS)
    assert cache.k.shape[0] == layers
    out = _call(early)(given, _tokens(0, LENGTH), None, cache)
    expected = decoder_oracle(early.config, params, TOKENS)
    np.testing.assert_allclose(out.logits, expected, **CLOSE)


@pytest.mark.parametrize("layers", [0, 3, -1])
def test_first_layers_are_some_but_not_all(layers):
    with pytest.raises(ValueError, match=f"early exit after {layers} layers.*choose 1 to 2"):
        DecoderTarget(TINY_CONFIG).first_layers(layers)


def test_slots_beyond_the_committed_ones_are_never_seen():
    """Whatever lies there, every bit of the logits is the same."""
    target, params = DecoderTarget(TINY_CONFIG), _params(TINY_CONFIG)
    clean = target.init_cache(ROWS, SLOTS)
    dirty = replace(clean, k=jnp.full_like(clean.k, 1e3), v=jnp.full_like(clean.v, -1e3))
    blocks = (None, jnp.tile(jnp.array([-1, 0, 0, 2, -1]), (ROWS, 1)))
    for parents in blocks:
        outs = [
            _call(target)(params, _tokens(0, 5), parents, cache).logits for cache in (clean, dirty)
        ]
        np.testing.assert_array_equal(outs[0], outs[1])


def test_a_chain_is_a_tree():
    target, params = DecoderTarget(TINY_CONFIG), _params(TINY_CONFIG)
    cache = _after(target, params, [3, 10, 18])
    block = _tokens(18, 23)
    as_tree = _call(target)(params, block, chain(ROWS, 5), cache)
    as_chain = _call(target)(params, block, None, cache)
    np.testing.assert_allclose(as_tree.logits, as_chain.logits, atol=1e-6)
    path = jnp.tile(jnp.arange(5), (ROWS, 1))
    count = jnp.array([1, 3, 5])
    moved, stayed = as_tree.cache.commit(path, count), as_chain.cache.commit(None, count)
    np.testing.assert_array_equal(moved.length, stayed.length)
    np.testing.assert_allclose(moved.k, stayed.k, atol=1e-6)


def _after(target, params, length):
    prompt = Context(jnp.asarray(TOKENS), jnp.asarray(length, jnp.int32))
    return prefill(target, params, prompt, target.init_cache(ROWS, SLOTS), chunk=8).cache


# A root with children 1 and 2; 2 has the child 3; 4 is padding. A different tree in each row.
PARENTS = np.array([[-1, 0, 0, 2, -1], [-1, 0, 1, 0, 3], [-1, 0, 0, 0, 2]], np.int32)
PATHS = np.array([[0, 2, 3], [0, 3, 4], [0, 2, 4]], np.int32)
START = np.array([3, 10, 18], np.int32)


@pytest.mark.parametrize("devices", [1, 2])
def test_TR1_a_branch_committed_equals_a_fresh_prefill(devices):
    """Scattered nodes are accepted: keys, values and the next round are those of the path alone."""
    target, params = DecoderTarget(TINY_CONFIG), _params(TINY_CONFIG)
    cache = _after(target, params, START)
    if devices > 1:
        mesh = make_mesh(data=1, model=devices)
        placement = parameter_shardings(mesh, target.parameter_axes(), params)
        params = jax.device_put(params, placement)
        cache = jax.device_put(cache, row_shardings(mesh, cache))
    nodes = np.random.default_rng(5).integers(0, TINY_CONFIG.vocab_size, PARENTS.shape)
    nodes = nodes.astype(np.int32)
    out = _call(target, (0, 2))(params, jnp.asarray(nodes), jnp.asarray(PARENTS), cache)

    committed = np.zeros((ROWS, LENGTH), np.int32)
    for row, start in enumerate(START):
        committed[row, :start] = TOKENS[row, :start]
        committed[row, start : start + 3] = nodes[row, PATHS[row]]
    residuals, logits = decoder_residuals(TINY_CONFIG, _params(TINY_CONFIG), committed)
    for row, start in enumerate(START):
        on_path = slice(start, start + 3)
        np.testing.assert_allclose(
            out.logits[row, PATHS[row]], logits[row, on_path], atol=1e-5, rtol=1e-5
        )
        for tap, layer in enumerate((0, 2)):
            np.testing.assert_allclose(
                out.features[row, PATHS[row], tap], residuals[layer][row, on_path], **CLOSE
            )

    kept = out.cache.commit(jnp.asarray(PATHS), jnp.full((ROWS,), 3))
    np.testing.assert_array_equal(kept.length, START + 3)
    fresh = prefill(
        DecoderTarget(TINY_CONFIG),
        _params(TINY_CONFIG),
        Context(jnp.asarray(committed), jnp.asarray(START + 3)),
        target.init_cache(ROWS, SLOTS),
        chunk=8,
    ).cache
    for row, end in enumerate(START + 3):
        for part in ("k", "v"):
            now, then = getattr(kept, part), getattr(fresh, part)
            np.testing.assert_allclose(
                np.asarray(now)[:, row, :, :end], np.asarray(then)[:, row, :, :end], atol=1e-5
            )

    committed[np.arange(ROWS), START + 3] = 7
    follows = _call(target)(params, jnp.full((ROWS, 1), 7, jnp.int32), None, kept)
    expected = decoder_oracle(TINY_CONFIG, _params(TINY_CONFIG), committed)
    for row, end in enumerate(START + 3):
        np.testing.assert_allclose(follows.logits[row, 0], expected[row, end], **CLOSE)


def test_TR1_nodes_left_where_they_were_written_would_be_seen():
    """The paths above do need the move: without it the next logits are off."""
    target, params = DecoderTarget(TINY_CONFIG), _params(TINY_CONFIG)
    cache = _after(target, params, START)
    nodes = np.random.default_rng(5).integers(0, TINY_CONFIG.vocab_size, PARENTS.shape)
    out = _call(target, (0, 2))(params, jnp.asarray(nodes, jnp.int32), jnp.asarray(PARENTS), cache)
    count, seven = jnp.full((ROWS,), 3), jnp.full((ROWS, 1), 7, jnp.int32)
    moved, left = (
        _call(target)(params, seven, None, out.cache.commit(path, count)).logits
        for path in (jnp.asarray(PATHS), None)
    )
    assert (np.abs(np.asarray(moved) - np.asarray(left)).max(axis=(1, 2)) > 1e-2).all()


@pytest.mark.parametrize("stacked", [True, False])
def test_bfloat16_is_near_float32(stacked):
    target = DecoderTarget(TINY_CONFIG, dtype="bfloat16", stacked=stacked)
    rounded = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), _params(TINY_CONFIG))
    params = rounded if stacked else _unstacked(rounded)
    cache = target.init_cache(ROWS, SLOTS)
    out = _call(target)(params, _tokens(0, LENGTH), None, cache)
    assert out.logits.dtype == out.cache.k.dtype == jnp.bfloat16
    logits = np.asarray(out.logits, np.float64)
    expected = decoder_oracle(
        TINY_CONFIG, jax.tree.map(lambda leaf: leaf.astype(jnp.float32), rounded), TOKENS
    )
    off = np.sqrt(np.mean((logits - expected) ** 2)) / expected.std()
    assert 1e-4 < off < 0.03


def test_impossible_configurations_are_refused():
    with pytest.raises(ValueError, match="4 query heads cannot share 3 KV heads evenly"):
        replace(TINY_CONFIG, num_kv_heads=3)
    with pytest.raises(ValueError, match="2 windows given for 3 layers"):
        replace(TINY_CONFIG, windows=(None, 8))
    with pytest.raises(ValueError, match="RoPE type 'dynamic' is not supported"):
        Rope(kind="dynamic")
    with pytest.raises(ValueError, match="1 ropes given for 3 layers"):
        replace(TINY_CONFIG, ropes=(None,))
    with pytest.raises(ValueError, match="rotate different parts of a head"):
        replace(TINY_CONFIG, ropes=(Rope(), None, Rope(partial=0.5)))
    with pytest.raises(ValueError, match="norm 'batch' is not known; known: rms, "):
        replace(TINY_CONFIG, norm="batch")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_layers": 0}, "num_layers: 0 is no whole number above 0"),
        ({"head_dim": True}, "head_dim: True is no whole number"),
        ({"windows": (None, 8, -1)}, "windows: -1 is no whole number"),
        ({"rms_norm_eps": -1e-5}, "rms_norm_eps: -1e-05 is no number above 0"),
        ({"logit_softcap": float("nan")}, "logit_softcap: nan is no number"),
    ],
)
def test_numbers_of_no_use_are_refused(changes, said):
    with pytest.raises(ValueError, match=said):
        replace(TINY_CONFIG, **changes)


@pytest.mark.parametrize(
    "changes", [{"theta": float("inf")}, {"factor": 0.0}, {"long_factors": (1.0, -2.0)}]
)
def test_a_rotation_by_no_number_is_refused(changes):
    with pytest.raises(ValueError, match=": (inf|0.0|-2.0) is no number above 0"):
        Rope(**changes)


@pytest.mark.parametrize("kind", [int, float, int | None])
@pytest.mark.parametrize("value", ["64", [64], (64,)])
def test_what_should_be_a_number_is_refused(kind, value):
    """In a class whose types nobody checks, as tests do those of specjax."""
    check_numbers(make_dataclass("Settings", [("width", kind)])(64))
    with pytest.raises(ValueError, match="width: .*64.* is no "):
        check_numbers(make_dataclass("Settings", [("width", kind)])(value))


@pytest.mark.parametrize("stacked", [True, False])
def test_parameters_have_the_shapes_and_axes_declared(stacked):
    target = DecoderTarget(FAMILIES["biases"], stacked=stacked)
    axes, sizes = target.parameter_axes(), target.config.axis_sizes

    def shape(names):
        return tuple(sizes[name] for name in names)

    declared = jax.tree.map(shape, axes, is_leaf=lambda node: isinstance(node, tuple))
    abstract = target.abstract_params()
    assert jax.tree.map(lambda leaf: tuple(leaf.shape), abstract) == declared


def test_models_rebuilt_from_equal_configurations_are_equal():
    again = replace(TINY_CONFIG, windows=tuple(list(TINY_CONFIG.windows)))
    assert DecoderTarget(again) == DecoderTarget(TINY_CONFIG)
    assert hash(DecoderTarget(again)) == hash(DecoderTarget(TINY_CONFIG))

"""Every family in both formats: the same configuration and the same parameters, to the bit."""

import dataclasses
import json

import jax
import numpy as np
import pytest
from convert.family_checkpoints import write_family_gguf
from models.hugging_face import MODELS, read_golden

from ckpt_convert.errors import ConversionError
from ckpt_convert.families import IGNORED, hf_family
from ckpt_convert.gguf_source import GGUFSource
from ckpt_convert.store import rebuilt
from ckpt_convert.tensors import TensorInfo, bind, leaf, parameter_shapes, place, plan
from specjax.models.decoder import DecoderConfig

pytestmark = pytest.mark.fast

FLOAT32 = np.dtype(np.float32)


def model(name, **changes):
    """A Hugging Face config and random tensors under its names; norms in steps of 1/256."""
    config = read_golden(name)[0] | changes
    family = hf_family(config)
    decoder, rng = family.from_hf(config), np.random.default_rng(7)
    tensors = {}
    for tensor, (first, *_) in bind(family.hf_rules, decoder).items():
        value = rng.standard_normal(first.rule.shape(decoder))
        is_norm = "norm" in tensor
        tensors[tensor] = (np.round(64 * value) / 256 if is_norm else value).astype(np.float32)
    return config, tensors


def from_hf(config, tensors):
    family = hf_family(config)
    decoder = family.from_hf(config)
    placements, ignored = plan(_infos(tensors), family.hf_rules, IGNORED, decoder)
    return decoder, place(tensors.__getitem__, placements, decoder, FLOAT32), ignored


def _infos(tensors):
    return {name: TensorInfo(tensor.shape, "F32") for name, tensor in tensors.items()}


def from_gguf(file):
    source = GGUFSource(file)
    placements, _ = plan(source.tensors, source.rules, source.ignored, source.config)
    return source.config, place(source.read, placements, source.config, FLOAT32)


def assert_same_tree(found, expected):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    jax.tree.map(np.testing.assert_array_equal, found, expected)


YARN = read_golden("gpt_oss")[0]["rope_parameters"] | {"beta_fast": 32.0}
# What the format cannot say is set to what llama.cpp takes for granted.
GGUF = {
    "gemma2": ("gemma2", {"query_pre_attn_scalar": 16}),
    "gemma3": ("gemma3", {"query_pre_attn_scalar": 16}),
    "phi3": ("phi3", {}),
    "phi4": ("phi3", {}),
    "smollm3": (
        "smollm3",
        {
            "num_hidden_layers": 5,
            "no_rope_layers": None,
            "no_rope_layer_interval": 4,
            "layer_types": None,
        },
    ),
    "olmo2": ("olmo2", {}),
    "gpt2": ("gpt2", {}),
    "gpt_oss": ("gpt-oss", {"swiglu_limit": 7.0, "rope_parameters": YARN}),
    "mixtral": ("llama", {"sliding_window": None}),
    "qwen3_moe": ("qwen3moe", {}),
}


@pytest.mark.parametrize("name", GGUF)
def test_gguf_says_what_hugging_face_says(name, tmp_path):
    architecture, changes = GGUF[name]
    config, tensors = model(name, **changes)
    expected, params, _ = from_hf(config, tensors)
    write_family_gguf(tmp_path / "model.gguf", architecture, config, tensors)
    found, read = from_gguf(tmp_path / "model.gguf")
    assert found == expected
    assert_same_tree(read, params)


def test_older_files_of_gemma3_leave_the_pattern_and_the_local_base_to_the_reader(tmp_path):
    types = (["sliding_attention"] * 5 + ["full_attention"]) * 2
    ropes = read_golden("gemma3")[0]["rope_parameters"]
    ropes = ropes | {"sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0}}
    changes = {"num_hidden_layers": 8, "layer_types": types[:8], "rope_parameters": ropes}
    config, tensors = model("gemma3", query_pre_attn_scalar=16, **changes)
    file = tmp_path / "model.gguf"
    write_family_gguf(file, "gemma3", config, tensors, drop=("_pattern", "_swa"))
    found = GGUFSource(file).config
    assert found == from_hf(config, tensors)[0]
    assert found.windows == (8,) * 5 + (None,) + (8,) * 2


def test_older_files_of_gemma2_leave_window_and_caps_to_the_reader(tmp_path):
    config, tensors = model("gemma2", query_pre_attn_scalar=16)
    file = tmp_path / "model.gguf"
    write_family_gguf(file, "gemma2", config, tensors, drop=("_window", "_softcapping"))
    found = GGUFSource(file).config
    assert (found.attention_softcap, found.logit_softcap) == (50.0, 30.0)
    assert found.windows == (4096, None, 4096)


def test_gpt_oss_without_its_yarn_is_refused(tmp_path):
    config, tensors = model("gpt_oss", rope_parameters=YARN)
    file = tmp_path / "model.gguf"
    write_family_gguf(file, "gpt-oss", config, tensors, drop=("scaling.type",))
    with pytest.raises(ConversionError, match="RoPE scaling None.*gpt-oss.*supported: yarn"):
        GGUFSource(file)


@pytest.mark.parametrize(("name", "layers"), [("gemma2", 46), ("gemma3", 62)])
def test_the_size_of_gemma_that_scales_queries_by_the_width_is_known(name, layers, tmp_path):
    """48 / 6 = 8, where heads are 16 wide."""
    changes = {"num_hidden_layers": layers, "layer_types": None, "sliding_window_pattern": 6}
    config, tensors = model(name, query_pre_attn_scalar=8, **changes)
    config = config | {"layer_types": ["sliding_attention"] * layers}
    write_family_gguf(tmp_path / "model.gguf", name, config, tensors)
    assert GGUFSource(tmp_path / "model.gguf").config.attention_scale == 8**-0.5


@pytest.mark.parametrize("name", ["gemma2", "gemma3"])
def test_y7_a_norm_of_one_is_zero_in_one_format_and_one_in_the_other(name, tmp_path):
    """There and back again: the factor is 1 in each, and no number has moved."""
    config, tensors = model(name, query_pre_attn_scalar=16)
    zeroed = {
        key: np.zeros_like(value) if "norm" in key else value for key, value in tensors.items()
    }
    write_family_gguf(tmp_path / "model.gguf", name, config, zeroed)
    source = GGUFSource(tmp_path / "model.gguf")
    assert (source.read("output_norm.weight") == 1.0).all()
    decoder, params = from_gguf(tmp_path / "model.gguf")
    norms = [
        leaf for path, leaf in jax.tree_util.tree_leaves_with_path(params) if "norm" in str(path)
    ]
    assert decoder.norm == "rms_plus_one"
    assert len(norms) > 4 and all((norm == 0.0).all() for norm in norms)
    assert_same_tree(params, from_hf(config, zeroed)[1])


@pytest.mark.parametrize("name", MODELS)
def test_rules_read_backwards_give_the_tensors_back(name):
    config, tensors = model(name)
    decoder, params, _ = from_hf(config, tensors)
    for tensor, placements in bind(hf_family(config).hf_rules, decoder).items():
        blocks = [
            rule.undo(leaf(params, rule.path)[index][rule.part(decoder)], decoder)
            for rule, index in ((one.rule, one.index) for one in placements)
        ]
        np.testing.assert_array_equal(np.concatenate(blocks), tensors[tensor])


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("format", ["hf_rules", "gguf_rules"])
def test_every_number_of_every_parameter_is_filled_once(name, format):
    config = read_golden(name)[0]
    family = hf_family(config)
    decoder, rules = family.from_hf(config), getattr(family, format)
    filled = jax.tree.map(np.zeros, parameter_shapes(decoder), is_leaf=lambda x: type(x) is tuple)
    for placements in bind(rules, decoder).values():
        for one in placements:
            leaf(filled, one.rule.path)[one.index][one.rule.part(decoder)] += 1
    assert not rules or all((part == 1).all() for part in jax.tree.leaves(filled))


@pytest.mark.parametrize("name", MODELS)
def test_a_configuration_comes_back_from_json(name):
    config = read_golden(name)[0]
    decoder = hf_family(config).from_hf(config)
    entries = json.loads(json.dumps(dataclasses.asdict(decoder)))
    assert rebuilt(DecoderConfig, entries) == decoder


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_gemma3_with_vision_is_read_as_its_text_model(prefix):
    """Text settings are nested, text weights lie deeper, and the vision tower is left out."""
    config, tensors = model("gemma3")
    nested = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "text_config": config,
        "vision_config": {"hidden_size": 16},
    }
    deeper = {prefix + name.removeprefix("model."): value for name, value in tensors.items()}
    deeper["vision_tower.vision_model.post_layernorm.weight"] = np.ones(16, np.float32)
    deeper["multi_modal_projector.mm_input_projection_weight"] = np.ones((16, 48), np.float32)
    expected, params, _ = from_hf(config, tensors)
    found, read, ignored = from_hf(nested, deeper)
    assert found == expected
    assert set(ignored.values()) == {"no part of the text model"}
    assert_same_tree(read, params)


def test_gpt2_without_its_prefix_and_with_its_masks():
    config, tensors = model("gpt2")
    bare = {name.removeprefix("transformer."): value for name, value in tensors.items()}
    bare["h.0.attn.bias"] = np.ones((1, 1, 64, 64), np.float32)
    bare["lm_head.weight"] = tensors["transformer.wte.weight"]
    found, params, ignored = from_hf(config, bare)
    assert set(ignored) == {"h.0.attn.bias", "lm_head.weight"}
    assert_same_tree(params, from_hf(config, tensors)[1])


def test_a_missing_part_of_a_fused_or_routed_parameter_is_named():
    for name, lost in (
        ("phi3", "model.layers.1.self_attn.qkv_proj.weight"),
        ("qwen3_moe", "model.layers.2.mlp.experts.7.up_proj.weight"),
        ("mixtral", "model.layers.0.block_sparse_moe.experts.3.w2.weight"),
        ("gpt_oss", "model.layers.1.mlp.experts.gate_up_proj_bias"),
    ):
        config, tensors = model(name)
        cut = {key: value for key, value in tensors.items() if key != lost}
        with pytest.raises(ConversionError, match=f"missing {lost}"):
            from_hf(config, cut)
        short = tensors | {lost: tensors[lost][:-1]}
        with pytest.raises(ConversionError, match=f"misshapen {lost}"):
            from_hf(config, short)


def test_a_fused_tensor_is_read_once():
    config, tensors = model("phi3")
    family = hf_family(config)
    decoder = family.from_hf(config)
    read = []

    def reading(name):
        read.append(name)
        return tensors[name]

    placements, _ = plan(_infos(tensors), family.hf_rules, IGNORED, decoder)
    place(reading, placements, decoder, FLOAT32)
    assert sorted(read) == sorted(tensors)

"""`config.json` of every family, in the spellings before and after Transformers 5."""

import copy
import dataclasses

import numpy as np
import pytest
import transformers
from convert.tiny_checkpoints import HEAD_DIM, SIZES, hf_config

from ckpt_convert.errors import ConversionError
from ckpt_convert.families import hf_family
from specjax.models.decoder import DecoderConfig
from specjax.models.experts import Routing
from specjax.models.rope import Rope

pytestmark = pytest.mark.fast

SHAPE = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_layers": 3,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 8,
    "max_position": 128,
}
LLAMA3 = {
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}

LONGROPE = {"type": "longrope", "short_factor": [1.0, 2.0, 3.0, 4.0], "long_factor": [2.0] * 4}
LONGROPE_READ = Rope(
    10_000.0,
    "longrope",
    original_max_position=32,
    short_factors=(1.0, 2.0, 3.0, 4.0),
    long_factors=(2.0,) * 4,
    attention_factor=(1 + np.log(4) / np.log(32)) ** 0.5,
)
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768}
SHORT = {"original_max_position_embeddings": 32}
GEMMA = {
    "norm": "rms_plus_one",
    "post_norm": True,
    "activation": "gelu_tanh",
    "embedding_scale": 32**0.5,
}


def read(config: dict) -> DecoderConfig:
    return hf_family(config).from_hf(config)


def both_spellings(config: dict) -> list[dict]:
    """`config` as Transformers 4 and as Transformers 5 would have written it."""
    new = dict(config)
    theta, scaling = new.pop("rope_theta"), new.pop("rope_scaling", None)
    new["rope_parameters"] = {"rope_theta": theta} | (scaling or {"rope_type": "default"})
    new["dtype"] = new.pop("torch_dtype", "float32")
    return [config, new]


@pytest.mark.parametrize(
    ("family", "changes", "expected"),
    [
        ("llama", {}, {}),
        ("llama", {"tie_word_embeddings": True}, {"tie_embeddings": True}),
        (
            "llama",
            {"rope_theta": 5e5, "rope_scaling": LLAMA3},
            {"rope": Rope(5e5, "llama3", 32.0, 1.0, 4.0, 8192)},
        ),
        (
            "llama",
            {"rope_scaling": {"type": "linear", "factor": 4.0}},
            {"rope": Rope(10_000.0, "linear", 4.0)},
        ),
        ("mistral", {"sliding_window": None}, {}),
        ("mistral", {"sliding_window": 16}, {"windows": (16, 16, 16)}),
        ("mistral", {}, {"windows": (4096, 4096, 4096)}),
        ("mistral", {"head_dim": 16, "sliding_window": None}, {"head_dim": 16}),
        ("mistral", {"head_dim": None, "sliding_window": None}, {}),
        (
            "mixtral",
            {"num_local_experts": 8, "num_experts_per_tok": 2},
            {"experts": Routing(8, 2)},
        ),
        ("qwen2", {"use_sliding_window": False, "sliding_window": 16}, {"qkv_bias": True}),
        (
            "qwen2",
            {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 2},
            {"qkv_bias": True, "windows": (None, None, 16)},
        ),
        ("qwen3", {"attention_bias": False}, {"qk_norm": True}),
        (
            "qwen3_moe",
            {
                "num_experts": 16,
                "num_experts_per_tok": 4,
                "moe_intermediate_size": 24,
                "norm_topk_prob": False,
                "mlp_only_layers": [],
                "max_window_layers": 2,
            },
            {"intermediate_size": 24, "qk_norm": True, "experts": Routing(16, 4, False)},
        ),
        (
            "gemma2",
            {"num_hidden_layers": 4, "query_pre_attn_scalar": 64, "sliding_window": 16},
            GEMMA
            | {
                "num_layers": 4,
                "attention_scale": 1 / 8,
                "attention_softcap": 50.0,
                "logit_softcap": 30.0,
                "windows": (16, None, 16, None),
            },
        ),
        (
            "phi3",
            {"rope_scaling": LONGROPE, "original_max_position_embeddings": 32},
            {"rope": LONGROPE_READ},
        ),
        (
            "phi3",
            {
                "rope_scaling": {
                    "type": "su",
                    "short_factor": [1.0, 2.0, 3.0],
                    "long_factor": [4.0, 5.0, 6.0],
                },
                "original_max_position_embeddings": 32,
                "partial_rotary_factor": 0.75,
                "sliding_window": 20,
            },
            {
                "rope": dataclasses.replace(
                    LONGROPE_READ,
                    partial=0.75,
                    short_factors=(1.0, 2.0, 3.0),
                    long_factors=(4.0, 5.0, 6.0),
                ),
                "windows": (20, 20, 20),
            },
        ),
        (
            "smollm3",
            {"num_hidden_layers": 5, "tie_word_embeddings": True},
            {
                "num_layers": 5,
                "tie_embeddings": True,
                "ropes": (*(Rope(10_000.0),) * 3, None, Rope(10_000.0)),
            },
        ),
        (
            "smollm3",
            {
                "no_rope_layers": [0, 1, 1],
                "use_sliding_window": True,
                "sliding_window": 16,
            },
            {"ropes": (None, Rope(10_000.0), Rope(10_000.0)), "windows": (16, None, None)},
        ),
        (
            "olmo2",
            {},
            {
                "norm": "rms_float32",
                "pre_norm": False,
                "post_norm": True,
                "whole_qk_norm": True,
            },
        ),
        (
            "qwen3",
            {
                "use_sliding_window": True,
                "sliding_window": 16,
                "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            },
            {"qk_norm": True, "windows": (None, 16, None)},
        ),
        (
            "gpt_oss",
            {
                "rope_scaling": {
                    "rope_type": "yarn",
                    "factor": 4.0,
                    "original_max_position_embeddings": 32,
                    "truncate": False,
                },
                "num_local_experts": 8,
                "sliding_window": 16,
            },
            {
                "rope": Rope(
                    10_000.0,
                    "yarn",
                    4.0,
                    original_max_position=32,
                    attention_factor=0.1 * np.log(4) + 1,
                    truncate=False,
                ),
                "experts": Routing(8, 4, biased=True, limit=7.0),
                "windows": (16, None, 16),
                "activation": "gelu_sigmoid",
                "qkv_bias": True,
                "output_bias": True,
                "sinks": True,
            },
        ),
    ],
)
def test_every_family_in_both_spellings(family, changes, expected):
    for config in both_spellings(hf_config(family, **changes)):
        assert read(config) == DecoderConfig(**SHAPE | expected)


GLOBAL = Rope(1_000_000.0, "linear", 8.0)
LOCAL = Rope(10_000.0)


@pytest.mark.parametrize(
    "ropes",
    [
        {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "rope_scaling": {"factor": 8.0}},
        {"rope_scaling": {"rope_type": "linear", "factor": 8.0}},
        {
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            }
        },
    ],
    ids=["old", "old with defaults", "a type each"],
)
def test_gemma3_has_a_rope_for_each_type_of_layer(ropes):
    if "rope_scaling" in ropes:
        ropes = ropes | {"rope_scaling": ropes["rope_scaling"] | {"rope_type": "linear"}}
    config = hf_config("gemma3", num_hidden_layers=7, **ropes)
    if "rope_theta" not in ropes:
        del config["rope_theta"]
    found = read(config)
    assert found.ropes == (LOCAL,) * 5 + (GLOBAL, LOCAL)
    assert found.windows == (4096,) * 5 + (None, 4096)
    assert found.qk_norm and found.attention_softcap is None and found.logit_softcap is None


def test_gemma3_with_vision_leaves_most_settings_to_its_class():
    """As google/gemma-3-4b-it writes it."""
    text = {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    config = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": text}
    found, expected = read(config), transformers.Gemma3TextConfig(**text)
    assert found.vocab_size == expected.vocab_size
    assert (found.num_heads, found.num_kv_heads, found.head_dim) == (8, 4, 256)
    assert found.tie_embeddings and found.max_position == expected.max_position_embeddings
    assert found.attention_scale == expected.query_pre_attn_scalar**-0.5
    assert [window is not None for window in found.windows] == [
        kind == "sliding_attention" for kind in expected.layer_types
    ]
    assert {found.ropes[0], found.ropes[5]} == {LOCAL, GLOBAL}


def test_gpt2_under_its_own_names():
    config = {"architectures": ["GPT2LMHeadModel"], "vocab_size": 64, "n_embd": 32, "n_head": 4}
    found = read(config | {"n_layer": 3, "n_positions": 128, "activation_function": "gelu_new"})
    assert (found.num_kv_heads, found.head_dim, found.intermediate_size) == (4, 8, 128)
    assert found.tie_embeddings and found.learned_positions and found.rope is None


@pytest.mark.parametrize(
    ("family", "made_by"),
    [
        ("llama", transformers.LlamaConfig),
        ("mistral", transformers.MistralConfig),
        ("qwen2", transformers.Qwen2Config),
        ("qwen3", transformers.Qwen3Config),
        ("smollm3", transformers.SmolLM3Config),
        ("olmo2", transformers.Olmo2Config),
        ("phi3", transformers.Phi3Config),
        ("gemma2", transformers.Gemma2Config),
        ("mixtral", transformers.MixtralConfig),
        ("qwen3_moe", transformers.Qwen3MoeConfig),
        ("gpt_oss", transformers.GptOssConfig),
    ],
)
def test_what_transformers_itself_writes(family, made_by):
    config = made_by(
        **SIZES,
        head_dim=HEAD_DIM,
        rope_parameters={"rope_type": "default", "rope_theta": 123_456.0},
    ).to_dict()
    assert not config.get("architectures")  # then the model type decides
    found = read(config)
    assert (found.num_layers, found.head_dim, found.rope.theta) == (3, 8, 123_456.0)
    assert found.qkv_bias == (family in ("qwen2", "gpt_oss"))
    assert found.qk_norm == family.startswith("qwen3")
    assert (found.experts is not None) == (family in ("mixtral", "qwen3_moe", "gpt_oss"))
    assert hf_family(config).name == family


def test_defaults_for_absent_keys():
    config = hf_config("llama")
    for key in ("head_dim", "num_key_value_heads", "rope_theta", "tie_word_embeddings"):
        del config[key]
    found = read(config)
    assert (found.head_dim, found.num_kv_heads, found.rope) == (8, 4, Rope(10_000.0))
    assert not found.tie_embeddings


WINDOWED = {"use_sliding_window": True, "sliding_window": 16}
GPT2 = {
    "architectures": ["GPT2LMHeadModel"],
    "model_type": "gpt2",
    "vocab_size": 64,
    "n_embd": 32,
    "n_head": 4,
    "n_layer": 3,
    "n_positions": 128,
    "n_inner": 40,
    "layer_norm_epsilon": 1e-3,
    "activation_function": "gelu_pytorch_tanh",
    "tie_word_embeddings": False,
}
# Every setting at another value than its class's own.
CUT = {
    "llama": (transformers.LlamaConfig, {}),
    "mistral": (transformers.MistralConfig, {"sliding_window": 16}),
    "mixtral": (
        transformers.MixtralConfig,
        {"sliding_window": 16, "num_local_experts": 4, "num_experts_per_tok": 1},
    ),
    "qwen2": (transformers.Qwen2Config, WINDOWED | {"max_window_layers": 1}),
    "qwen3": (transformers.Qwen3Config, WINDOWED | {"max_window_layers": 1}),
    "qwen3_moe": (
        transformers.Qwen3MoeConfig,
        WINDOWED
        | {
            "num_experts": 16,
            "num_experts_per_tok": 1,
            "moe_intermediate_size": 24,
            "norm_topk_prob": True,
        },
    ),
    "gemma2": (
        transformers.Gemma2Config,
        {
            "query_pre_attn_scalar": 16,
            "sliding_window": 16,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
            "tie_word_embeddings": False,
        },
    ),
    "gemma3": (
        transformers.Gemma3TextConfig,
        {
            "query_pre_attn_scalar": 16,
            "sliding_window": 16,
            "sliding_window_pattern": 2,
            "rope_local_base_freq": 500.0,
            "tie_word_embeddings": False,
        },
    ),
    "phi3": (
        transformers.Phi3Config,
        SHORT | {"sliding_window": 16, "rope_scaling": LONGROPE},
    ),
    "smollm3": (
        transformers.SmolLM3Config,
        WINDOWED | {"no_rope_layer_interval": 2, "tie_word_embeddings": False},
    ),
    "olmo2": (transformers.Olmo2Config, {}),
    "gpt2": (transformers.GPT2Config, GPT2),
    "gpt_oss": (
        transformers.GptOssConfig,
        {
            "rope_scaling": YARN | {"factor": 2.0},
            "sliding_window": 16,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "swiglu_limit": 3.0,
        },
    ),
}
# What no model can leave to its class: a config without these is not whole.
ASKED = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
ASKED += ("max_position_embeddings", "intermediate_size")
ASKED += ("n_embd", "n_head", "n_layer", "n_positions")


@pytest.mark.parametrize("family", CUT)
def test_what_a_config_lacks_is_what_its_class_says(family):
    made_by, changes = CUT[family]
    # So many heads that every class's number of KV heads divides them.
    other = {"hidden_size": 512, "num_attention_heads": 64}
    other |= {"rms_norm_eps": 1e-3, "rope_theta": 777.0, "tie_word_embeddings": True}
    whole = changes if family == "gpt2" else hf_config(family, **other | changes)
    felt = set()
    for key in whole:
        cut = {name: value for name, value in copy.deepcopy(whole).items() if name != key}
        try:
            found = read(cut)
        except ConversionError as fault:
            assert key in ASKED and f"no {key!r}" in str(fault)
            continue
        assert found == read(made_by(**copy.deepcopy(cut)).to_dict()), key
        felt |= {key} if found != read(whole) else set()
    expected = {"layer_norm_epsilon", "n_inner"} if family == "gpt2" else {"rms_norm_eps"}
    assert felt >= (expected | set(changes)) - set(GPT2)


def test_unknown_architecture_is_refused_by_name_with_the_known_ones():
    with pytest.raises(ConversionError, match="'GemmaForCausalLM'.*LlamaForCausalLM"):
        read(hf_config("llama", architectures=["GemmaForCausalLM"]))
    with pytest.raises(ConversionError, match="'Llama4ForCausalLM'.*GPT2LMHeadModel"):
        read(hf_config("llama", architectures=["Llama4ForCausalLM"]))
    with pytest.raises(ConversionError, match="'mamba'.*llama, mistral, mixtral, olmo2"):
        read(hf_config("llama", architectures=None, model_type="mamba"))


@pytest.mark.parametrize("key", ["hidden_size", "vocab_size", "max_position_embeddings"])
def test_a_missing_key_is_named(key):
    config = hf_config("llama")
    del config[key]
    with pytest.raises(ConversionError, match=key):
        read(config)


@pytest.mark.parametrize(
    ("family", "changes", "named"),
    [
        ("llama", {"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ("llama", {"attention_bias": True}, "attention_bias"),
        ("llama", {"mlp_bias": True}, "mlp_bias"),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ("qwen3", {"attention_bias": True}, "attention_bias"),
        ("qwen2", {"layer_types": ["linear_attention"] * 3}, "linear_attention"),
        ("qwen2", {"layer_types": ["full_attention"]}, "1 of its 3 layers"),
        ("llama", {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor"),
        ("llama", {"rope_scaling": {"rope_type": "default", "type": "yarn"}}, "default, yarn"),
        ("gemma2", {"attention_bias": True}, "attention_bias"),
        ("gemma2", {"hidden_activation": "gelu"}, "hidden_activation='gelu'"),
        ("gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("qwen3_moe", {"mlp_only_layers": [1]}, r"mlp_only_layers=\[1\]"),
        ("qwen3_moe", {"decoder_sparse_step": 2}, "decoder_sparse_step=2"),
        ("gpt2", {"activation_function": "relu"}, "activation_function='relu'"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
        ("smollm3", {"no_rope_layers": [1]}, "no_rope_layers tells 1 of 3"),
        ("llama", {"rope_scaling": {"type": "longrope"}}, "original_max_position_embeddings"),
        ("phi3", {"rope_scaling": LONGROPE | {"short_factor": None}} | SHORT, "'short_factor'"),
        ("phi3", {"rope_scaling": LONGROPE | {"long_factor": [1.0]}} | SHORT, "1 long.*4 are"),
        ("phi3", {"partial_rotary_factor": 0.4}, "partial_rotary_factor=0.4"),
        ("phi3", {"rope_scaling": {"type": "linear", "factor": 4.0}}, "'linear'"),
        ("llama", {"architectures": "NoSuchForCausalLM"}, "'NoSuchForCausalLM'"),
        ("llama", {"architectures": [["x"]]}, r"\['x'\]"),
        ("mixtral", {"num_local_experts": None}, "num_local_experts"),
        ("gpt_oss", {"attention_bias": False}, "attention_bias=False"),
        ("gpt_oss", {"swiglu_alpha": 1.0}, r"swiglu_alpha=1\.0"),
    ],
)
def test_what_the_decoder_cannot_compute_is_refused(family, changes, named):
    with pytest.raises(ConversionError, match=named):
        read(hf_config(family, **changes))


@pytest.mark.parametrize("kind", ["su", "yarn", "longrope"])
def test_y3_phi3_calls_longrope_by_several_names(kind):
    assert read(hf_config("phi3", rope_scaling=LONGROPE | {"type": kind}, **SHORT)).rope == (
        read(hf_config("phi3", rope_scaling=LONGROPE, **SHORT)).rope
    )


def test_y3_yarn_reaches_as_far_as_it_stretches():
    """Published settings leave the original context in the config."""
    stretched = hf_config("qwen2", rope_scaling=YARN, max_position_embeddings=32_768)
    assert read(stretched).max_position == 131_072


@pytest.mark.parametrize("spelling", ["type", "rope_type"])
@pytest.mark.parametrize("kind", ["dynamic", "longrope", "mrope", "no-such-type"])
def test_y3_other_rope_types_are_refused_by_name(kind, spelling):
    scaling = {spelling: kind, "factor": 4.0, "original_max_position_embeddings": 64}
    for config in both_spellings(hf_config("llama", rope_scaling=scaling)):
        with pytest.raises(ConversionError, match=f"'{kind}'"):
            read(config)


@pytest.mark.parametrize("spelling", ["type", "rope_type"])
@pytest.mark.parametrize("kind", [None, "default", "linear", "llama3", "yarn"])
def test_y3_angles_equal_an_independent_formula(kind, spelling):
    width, theta = 64, 500_000.0
    scaling = None if kind is None else LLAMA3 | {spelling: kind}
    if scaling and spelling == "type":
        del scaling["rope_type"]
    plain = [theta ** (-2 * pair / width) for pair in range(width // 2)]
    for config in both_spellings(hf_config("llama", rope_theta=theta, rope_scaling=scaling)):
        found = read(config).rope.inverse_frequencies(width)
        expected = [_scaled(frequency, kind) for frequency in plain]
        for position in (7, 300, 5000):
            for function in (np.cos, np.sin):
                np.testing.assert_allclose(
                    function(position * found),
                    function(position * np.array(expected)),
                    atol=1e-6,
                )


@pytest.mark.torch
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"beta_fast": 16, "beta_slow": 2},
        {"attention_factor": 1.5},
        {"mscale": 1.0, "mscale_all_dim": 0.8},
        {"original_max_position_embeddings": 16},
        {"truncate": False},
        {"truncate": None},
    ],
)
def test_y3_yarn_equals_transformers(changes):
    from transformers import Qwen2Config
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = {"rope_theta": 1_000_000.0} | YARN | changes
    theirs = Qwen2Config(head_dim=64, rope_parameters=parameters, max_position_embeddings=131_072)
    expected, attention = ROPE_INIT_FUNCTIONS["yarn"](theirs, "cpu")
    ours = read(hf_config("qwen2", head_dim=64, rope_parameters=parameters)).rope
    np.testing.assert_allclose(ours.inverse_frequencies(64), expected, rtol=1e-6)
    assert ours.attention_factor == pytest.approx(attention)


def _scaled(frequency: float, kind: str | None) -> float:
    """One frequency scaled, from the wave length as in the Llama 3.1 release, or as YaRN does."""
    if kind == "linear":
        return frequency / 32.0
    if kind == "yarn":
        pair = -32 * np.log(frequency) / np.log(500_000.0)
        first, last = (
            32 * np.log(8192 / (2 * np.pi * turns)) / np.log(500_000.0) for turns in (32, 1)
        )
        mix = np.clip((pair - np.floor(first)) / (np.ceil(last) - np.floor(first)), 0, 1)
        return (1 - mix) * frequency + mix * frequency / 32.0
    if kind != "llama3":
        return frequency
    wave_length = 2 * np.pi / frequency
    if wave_length < 8192 / 4.0:
        return frequency
    if wave_length > 8192 / 1.0:
        return frequency / 32.0
    smooth = (8192 / wave_length - 1.0) / (4.0 - 1.0)
    return (1 - smooth) * frequency / 32.0 + smooth * frequency

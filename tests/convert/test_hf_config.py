"""`config.json` of every family, in the spellings before and after Transformers 5."""

import numpy as np
import pytest
import transformers
from convert.tiny_checkpoints import HEAD_DIM, SIZES, hf_config

from ckpt_convert.errors import ConversionError
from ckpt_convert.families import hf_family
from specjax.models.decoder import DecoderConfig
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
        ("qwen2", {"use_sliding_window": False, "sliding_window": 16}, {"qkv_bias": True}),
        (
            "qwen2",
            {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 2},
            {"qkv_bias": True, "windows": (None, None, 16)},
        ),
        ("qwen3", {"attention_bias": False}, {"qk_norm": True}),
        (
            "qwen3",
            {
                "use_sliding_window": True,
                "sliding_window": 16,
                "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            },
            {"qk_norm": True, "windows": (None, 16, None)},
        ),
    ],
)
def test_every_family_in_both_spellings(family, changes, expected):
    for config in both_spellings(hf_config(family, **changes)):
        assert read(config) == DecoderConfig(**SHAPE | expected)


@pytest.mark.parametrize(
    ("family", "made_by"),
    [
        ("llama", transformers.LlamaConfig),
        ("mistral", transformers.MistralConfig),
        ("qwen2", transformers.Qwen2Config),
        ("qwen3", transformers.Qwen3Config),
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
    assert found.qkv_bias == (family == "qwen2")
    assert found.qk_norm == (family == "qwen3")
    assert hf_family(config).name == family


def test_defaults_for_absent_keys():
    config = hf_config("llama")
    for key in ("head_dim", "num_key_value_heads", "rope_theta", "tie_word_embeddings"):
        del config[key]
    found = read(config)
    assert (found.head_dim, found.num_kv_heads, found.rope) == (8, 4, Rope(10_000.0))
    assert not found.tie_embeddings


def test_unknown_architecture_is_refused_by_name_with_the_known_ones():
    with pytest.raises(ConversionError, match="'GemmaForCausalLM'.*LlamaForCausalLM"):
        read(hf_config("llama", architectures=["GemmaForCausalLM"]))
    with pytest.raises(ConversionError, match="'mamba'.*llama, mistral, qwen2, qwen3"):
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
    ],
)
def test_what_the_decoder_cannot_compute_is_refused(family, changes, named):
    with pytest.raises(ConversionError, match=named):
        read(hf_config(family, **changes))


@pytest.mark.parametrize("spelling", ["type", "rope_type"])
@pytest.mark.parametrize("kind", ["dynamic", "yarn", "longrope", "mrope", "no-such-type"])
def test_y3_other_rope_types_are_refused_by_name(kind, spelling):
    scaling = {spelling: kind, "factor": 4.0, "original_max_position_embeddings": 64}
    for config in both_spellings(hf_config("llama", rope_scaling=scaling)):
        with pytest.raises(ConversionError, match=f"'{kind}'"):
            read(config)


@pytest.mark.parametrize("spelling", ["type", "rope_type"])
@pytest.mark.parametrize("kind", [None, "default", "linear", "llama3"])
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


def _scaled(frequency: float, kind: str | None) -> float:
    """One frequency scaled, from the wave length as in the Llama 3.1 release."""
    if kind == "linear":
        return frequency / 32.0
    if kind != "llama3":
        return frequency
    wave_length = 2 * np.pi / frequency
    if wave_length < 8192 / 4.0:
        return frequency
    if wave_length > 8192 / 1.0:
        return frequency / 32.0
    smooth = (8192 / wave_length - 1.0) / (4.0 - 1.0)
    return (1 - smooth) * frequency / 32.0 + smooth * frequency

"""Modules inside targets' checkpoints against their definitions in NumPy."""

import functools

import jax
import ml_dtypes
import numpy as np
import pytest
from convert.drafters.numpy_layers import (
    attended,
    frequencies,
    keys_values,
    mlp,
    projected,
    queries,
    rms,
    sigmoid,
    triangle,
)
from convert.drafters.tiny_drafters import (
    HEAD_DIM,
    HEADS,
    INNER,
    LAYER_CONFIG,
    VOCAB,
    WIDTH,
    Tensors,
    write,
)

from ckpt_convert import ConversionError
from ckpt_convert.drafters import convert_drafter, is_drafter, load_drafter
from specjax.models.mtp import mtp_logits, mtp_states

ROWS, LENGTH, EXPERTS, EXPERT = 2, 6, 5, 12
_RNG = np.random.default_rng(8)
TOKENS = _RNG.integers(0, VOCAB, (ROWS, LENGTH)).astype(np.int32)
HIDDEN = _RNG.standard_normal((ROWS, LENGTH, WIDTH)).astype(np.float32)
POSITIONS = np.tile(np.arange(90, 90 + LENGTH, dtype=np.int32), (ROWS, 1))
EMBEDDING = _RNG.standard_normal((VOCAB, WIDTH)).astype(np.float32)
HEAD = _RNG.standard_normal((VOCAB, WIDTH)).astype(np.float32)

states = jax.jit(mtp_states, static_argnums=(0, 2))


def offset_rms(x, weight, eps=1e-5):
    return rms(x, 1.0 + weight, eps)


def experts_tensors(tensors, at, shared):
    tensors.add(f"{at}mlp.gate.weight", EXPERTS, WIDTH, scale=1.0)
    for expert in [*(f"experts.{index}" for index in range(EXPERTS)), shared]:
        tensors.add(f"{at}mlp.{expert}.gate_proj.weight", EXPERT, WIDTH)
        tensors.add(f"{at}mlp.{expert}.up_proj.weight", EXPERT, WIDTH)
        tensors.add(f"{at}mlp.{expert}.down_proj.weight", WIDTH, EXPERT)
    for side in ("gate", "up", "down"):
        del tensors[f"{at}mlp.{side}_proj.weight"]


def the_targets_own(tensors):
    """A few tensors of the model around the module, which are none of its business."""
    tensors.add("model.layers.0.mlp.down_proj.weight", WIDTH, INNER)
    tensors.add("model.embed_tokens.weight", VOCAB, WIDTH)
    tensors.add("lm_head.weight", VOCAB, WIDTH)


def around(tensors, names, norm_around=1.0):
    embedding, hidden, fuse, final = names
    tensors.norm(embedding, around=norm_around)
    tensors.norm(hidden, around=norm_around)
    tensors.add(f"{fuse}.weight", WIDTH, 2 * WIDTH)
    tensors.norm(final, around=norm_around)


MIMO = {
    "at": "model.mtp_layers.0.",
    "names": [
        f"model.mtp_layers.0.{part}"
        for part in ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm")
    ],
    "hidden_first": True,
}
QWEN = {
    "at": "mtp.layers.0.",
    "names": ["mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc", "mtp.norm"],
    "norm": offset_rms,
    "rotary": 4,
    "gated": True,
}
GLM = {
    "at": "model.layers.3.",
    "names": [
        f"model.layers.3.{part}" for part in ("enorm", "hnorm", "eh_proj", "shared_head.norm")
    ],
    "rotary": 4,
    "fed_plain": True,
}
BARE = {
    "at": "mtp_layers.0.",
    "names": [name.replace("model.", "") for name in MIMO["names"]],
}


def mimo_tensors():
    tensors = Tensors(11)
    around(tensors, MIMO["names"])
    tensors.layer(MIMO["at"], bias=True)
    the_targets_own(tensors)
    return tensors


def qwen_tensors(experts=False):
    tensors, at = Tensors(12), QWEN["at"]
    around(tensors, QWEN["names"], norm_around=0.0)
    tensors.layer(at, qk_norm=True)
    tensors.norm(f"{at}input_layernorm", around=0.0)
    tensors.norm(f"{at}post_attention_layernorm", around=0.0)
    tensors.add(f"{at}self_attn.q_proj.weight", 2 * HEADS * HEAD_DIM, WIDTH)
    if experts:
        experts_tensors(tensors, at, "shared_expert")
        tensors.add(f"{at}mlp.shared_expert_gate.weight", 1, WIDTH)
    the_targets_own(tensors)
    return tensors


def glm_tensors():
    tensors = Tensors(13)
    around(tensors, GLM["names"])
    tensors.layer(GLM["at"], bias=True, qk_norm=True)
    experts_tensors(tensors, GLM["at"], "shared_experts")
    tensors.add(f"{GLM['at']}mlp.gate.e_score_correction_bias", EXPERTS)
    tensors.add(f"{GLM['at']}embed_tokens.weight", VOCAB, WIDTH)
    tensors.add(f"{GLM['at']}shared_head.head.weight", VOCAB, WIDTH)
    the_targets_own(tensors)
    return tensors


def expected(tensors, how, feed_forward=None, embedding=EMBEDDING):
    """The state that the head reads and the one that a next step reads."""
    at, norm = how["at"], how.get("norm", rms)
    token, hidden, fuse, final = (tensors[f"{name}.weight"] for name in how["names"])
    freqs = frequencies(how.get("rotary", HEAD_DIM), 1e6)
    read, handed_on = [], []
    for row in range(ROWS):
        halves = [norm(embedding[TOKENS[row]].astype(np.float64), token)]
        halves.append(norm(HIDDEN[row].astype(np.float64), hidden))
        if how.get("hidden_first"):
            halves.reverse()
        x = np.concatenate(halves, axis=-1) @ fuse.T
        normed = norm(x, tensors[f"{at}input_layernorm.weight"])
        x = x + gated_attention(tensors, f"{at}self_attn.", normed, row, freqs, norm, how)
        normed = norm(x, tensors[f"{at}post_attention_layernorm.weight"])
        x = x + (feed_forward or mlp)(tensors, f"{at}mlp.", normed)
        read.append(norm(x, final))
        handed_on.append(x if how.get("fed_plain") else read[-1])
    return np.stack(read), np.stack(handed_on)


def gated_attention(tensors, at, x, row, freqs, norm, how):
    place = POSITIONS[row], freqs, HEAD_DIM, norm
    gates = 1.0
    if how.get("gated"):
        both = projected(tensors, f"{at}q_proj", x, 2 * HEAD_DIM)
        gates = sigmoid(both[..., HEAD_DIM:])
        rows = tensors[f"{at}q_proj.weight"].reshape(HEADS, 2, HEAD_DIM, WIDTH)[:, 0]
        tensors = tensors | {f"{at}q_proj.weight": rows.reshape(-1, WIDTH)}
    k, v = keys_values(tensors, at, x, *place)
    mixed = attended(queries(tensors, at, x, *place), k, v, triangle(LENGTH)) * gates
    return mixed.reshape(len(x), -1) @ tensors[f"{at}o_proj.weight"].T


def routed(tensors, at, x, *, sigmoid_scores, chosen=2, scale=1.0):
    """Token by token, expert by expert."""
    out = np.zeros_like(x)
    for t, token in enumerate(x):
        logits = tensors[f"{at}gate.weight"] @ token
        scores = sigmoid(logits) if sigmoid_scores else np.exp(logits) / np.exp(logits).sum()
        ranked = scores + tensors.get(f"{at}gate.e_score_correction_bias", 0.0)
        taken = np.argsort(-ranked)[:chosen]
        for index in taken:
            share = scores[index] / scores[taken].sum() * scale
            out[t] += share * mlp(tensors, f"{at}experts.{index}.", token[None])[0]
    if f"{at}shared_expert_gate.weight" in tensors:
        gate = sigmoid(x @ tensors[f"{at}shared_expert_gate.weight"].T)
        return out + gate * mlp(tensors, f"{at}shared_expert.", x)
    return out + mlp(tensors, f"{at}shared_experts.", x)


MIMO_CONFIG = LAYER_CONFIG | {
    "architectures": ["MiMoForCausalLM"],
    "model_type": "mimo",
    "num_hidden_layers": 3,
    "num_nextn_predict_layers": 1,
    "rope_theta": 1e6,
}
QWEN_CONFIG = LAYER_CONFIG | {
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "num_hidden_layers": 3,
    "rope_theta": 1e6,
    "partial_rotary_factor": 0.5,
}
MIXTURE = {
    "num_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": EXPERT,
    "shared_expert_intermediate_size": EXPERT,
    "norm_topk_prob": True,
}
NEWER = {"rope_theta": 1e6, "rope_type": "default", "partial_rotary_factor": 0.5}
GLM_CONFIG = LAYER_CONFIG | {
    "architectures": ["Glm4MoeForCausalLM"],
    "model_type": "glm4_moe",
    "num_hidden_layers": 3,
    "num_nextn_predict_layers": 1,
    "rope_theta": 1e6,
    "partial_rotary_factor": 0.5,
    "num_experts_per_tok": 2,
    "n_routed_experts": EXPERTS,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": EXPERT,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
}


def converted(tmp_path, config, tensors):
    write(tmp_path / "source", config, tensors)
    convert_drafter(tmp_path / "source", tmp_path / "converted")
    return load_drafter(tmp_path / "converted")


def without(config, *names):
    return {name: value for name, value in config.items() if name not in names}


CASES = {
    "MiMo": (mimo_tensors, MIMO_CONFIG, MIMO, None),
    "Qwen3.5": (
        qwen_tensors,
        {
            "model_type": "qwen3_5",
            "text_config": without(QWEN_CONFIG, "rope_theta", "partial_rotary_factor")
            | {"rope_parameters": NEWER},
        },
        QWEN,
        None,
    ),
    "Qwen3-Next": (
        functools.partial(qwen_tensors, experts=True),
        QWEN_CONFIG | MIXTURE,
        QWEN,
        functools.partial(routed, sigmoid_scores=False),
    ),
    "GLM": (
        glm_tensors,
        GLM_CONFIG,
        GLM,
        functools.partial(routed, sigmoid_scores=True, scale=2.5),
    ),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_module_in_its_target_is_the_definition(tmp_path, case):
    make, config, how, feed_forward = case
    tensors = make()
    drafter = converted(tmp_path, config, tensors)
    assert drafter.method == "mtp" and drafter.config.num_modules == 1
    own = tensors.get(f"{how['at']}embed_tokens.weight")
    assert drafter.config.own_embedding == (own is not None)
    embedding = EMBEDDING if own is None else own
    run = functools.partial(states, drafter.config, drafter.params, 0, embed=EMBEDDING)
    read, handed_on, _ = run(TOKENS, HIDDEN, POSITIONS)
    right = expected(tensors, how, feed_forward, embedding)
    np.testing.assert_allclose(read, right[0], atol=1e-4)
    np.testing.assert_allclose(handed_on, right[1], atol=1e-4)
    if drafter.config.own_head:
        logits = mtp_logits(drafter.config, drafter.params, 0, read)
        head = tensors[f"{how['at']}shared_head.head.weight"]
        np.testing.assert_allclose(logits, right[0] @ head.T, atol=1e-3)


def test_cut_out_by_speculators_the_halves_are_the_other_way_round(tmp_path):
    tensors = Tensors(14)
    around(tensors, BARE["names"])
    tensors.layer(BARE["at"], qk_norm=True)
    config = {
        "architectures": ["MTPDraftModel"],
        "speculators_model_type": "mtp",
        "transformer_layer_config": LAYER_CONFIG
        | {"model_type": "qwen3", "rope_theta": 1e6, "num_hidden_layers": 1},
    }
    drafter = converted(tmp_path, config, tensors)
    assert is_drafter(tmp_path / "source")
    out, _, _ = states(
        drafter.config, drafter.params, 0, TOKENS, HIDDEN, POSITIONS, embed=EMBEDDING
    )
    np.testing.assert_allclose(out, expected(tensors, BARE)[0], atol=1e-4)
    assert np.abs(expected(tensors, BARE | {"hidden_first": True})[0] - out).max() > 1e-2


@pytest.mark.fast
def test_speculators_keep_all_experts_in_one_tensor(tmp_path):
    """The same parameters as from the file with one tensor an expert."""
    single = qwen_tensors(experts=True)
    at = QWEN["at"] + "mlp.experts."
    sides = {
        side: np.stack([single[f"{at}{index}.{side}_proj.weight"] for index in range(EXPERTS)])
        for side in ("gate", "up", "down")
    }
    fused = {
        n.replace("mtp.layers.0.", "mtp_layers.0."): t for n, t in single.items() if at not in n
    }
    fused = {n: t for n, t in fused.items() if not n.startswith(("model.", "lm_head"))}
    for old, new in zip(QWEN["names"], BARE["names"], strict=True):
        fused[f"{new}.weight"] = fused.pop(f"{old}.weight")
    fused["mtp_layers.0.mlp.experts.gate_up_proj"] = np.concatenate([sides["gate"], sides["up"]], 1)
    fused["mtp_layers.0.mlp.experts.down_proj"] = sides["down"]
    config = {"speculators_model_type": "mtp", "transformer_layer_config": QWEN_CONFIG | MIXTURE}
    from_fused = converted(tmp_path / "fused", config, fused)
    from_single = converted(tmp_path / "single", QWEN_CONFIG | MIXTURE, single)
    assert from_fused.config == from_single.config
    jax.tree.map(np.testing.assert_array_equal, from_fused.params, from_single.params)


@pytest.mark.fast
def test_the_routers_bias_stays_wide(tmp_path):
    name = f"{GLM['at']}mlp.gate.e_score_correction_bias"
    tensors = {
        key: tensor if key == name else tensor.astype(ml_dtypes.bfloat16)
        for key, tensor in glm_tensors().items()
    }
    for dtype in (None, "bfloat16"):
        folder = tmp_path / str(dtype)
        write(folder / "source", GLM_CONFIG, tensors)
        convert_drafter(folder / "source", folder / "converted")
        modules = load_drafter(folder / "converted", dtype=dtype).params["modules"]
        np.testing.assert_array_equal(modules["router_bias"][0], tensors[name])
        assert modules["router"].dtype == "bfloat16"


@pytest.mark.fast
def test_a_target_is_not_taken_for_the_module_inside_it(tmp_path):
    assert not is_drafter(write(tmp_path / "source", MIMO_CONFIG, mimo_tensors()))


@pytest.mark.fast
@pytest.mark.parametrize(
    ("config", "message"),
    [
        (GLM_CONFIG | {"n_group": 8}, "5 experts cannot be 8 groups"),
        (GLM_CONFIG | {"moe_intermediate_size": 7}, "misshapen module.0.mlp.experts.0"),
        (without(GLM_CONFIG, "n_shared_experts"), "unmapped module.0.mlp.shared_experts"),
        (GLM_CONFIG | {"num_hidden_layers": 4}, "no drafter of a format that is known"),
        (GLM_CONFIG | {"n_shared_experts": "one"}, "n_shared_experts='one'; it must be a positive"),
        (
            GLM_CONFIG | {"shared_expert_intermediate_size": [12]},
            r"shared_expert_intermediate_size=\[12\]; it must be a positive",
        ),
    ],
)
def test_what_it_cannot_do_is_refused(tmp_path, config, message):
    write(tmp_path / "source", config, glm_tensors())
    with pytest.raises(ConversionError, match=message):
        convert_drafter(tmp_path / "source", tmp_path / "converted")


@pytest.mark.fast
def test_sigmoid_scores_without_a_bias_are_not_taken_for_softmax(tmp_path):
    tensors = glm_tensors()
    del tensors[f"{GLM['at']}mlp.gate.e_score_correction_bias"]
    write(tmp_path / "source", GLM_CONFIG | {"scoring_func": "sigmoid"}, tensors)
    with pytest.raises(ConversionError, match="scoring_func='sigmoid', which is not supported"):
        convert_drafter(tmp_path / "source", tmp_path / "converted")

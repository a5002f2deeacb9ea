"""DeepSeek-V3's own module, with latent attention and grouped experts, against its definition."""

import functools
import math

import jax
import ml_dtypes
import numpy as np
import pytest
from convert.drafters.numpy_layers import frequencies, mlp, rms, sigmoid, triangle
from convert.drafters.test_mtp import (
    EMBEDDING,
    EXPERT,
    HIDDEN,
    LENGTH,
    POSITIONS,
    ROWS,
    TOKENS,
    around,
    converted,
    the_targets_own,
    without,
)
from convert.drafters.tiny_drafters import (
    HEADS,
    INNER,
    LAYER_CONFIG,
    VOCAB,
    WIDTH,
    Tensors,
    write,
)

from ckpt_convert import ConversionError
from ckpt_convert.drafters import convert_drafter
from specjax.models.mtp import mtp_states

AT = "model.layers.3."
NAMES = [f"{AT}{part}" for part in ("enorm", "hnorm", "eh_proj", "shared_head.norm")]
QUERY_RANK, RANK, PLAIN, ROTARY, VALUE = 14, 10, 6, 8, 5
EXPERTS, GROUPS, CHOSEN_GROUPS, CHOSEN = 8, 4, 2, 3
YARN = {
    "type": "yarn",
    "factor": 40,
    "original_max_position_embeddings": 64,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 0.7,
}
DEEPSEEK = without(LAYER_CONFIG, "head_dim") | {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "num_key_value_heads": HEADS,
    "num_hidden_layers": 3,
    "num_nextn_predict_layers": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": QUERY_RANK,
    "kv_lora_rank": RANK,
    "qk_nope_head_dim": PLAIN,
    "qk_rope_head_dim": ROTARY,
    "v_head_dim": VALUE,
    "rope_theta": 1e4,
    "rope_scaling": YARN,
    "n_routed_experts": EXPERTS,
    "n_shared_experts": 2,
    "n_group": GROUPS,
    "topk_group": CHOSEN_GROUPS,
    "num_experts_per_tok": CHOSEN,
    "moe_intermediate_size": EXPERT,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
}
LITE = without(DEEPSEEK, "rope_scaling", "q_lora_rank") | {"q_lora_rank": None, "rope_theta": 1e6}


def deepseek_tensors(*, experts=True, query_rank=True):
    tensors, at = Tensors(17), f"{AT}self_attn."
    around(tensors, NAMES)
    tensors.norm(f"{AT}input_layernorm")
    tensors.norm(f"{AT}post_attention_layernorm")
    if query_rank:
        tensors.add(f"{at}q_a_proj.weight", QUERY_RANK, WIDTH)
        tensors.norm(f"{at}q_a_layernorm", QUERY_RANK)
    queries, inputs = ("q_b_proj", QUERY_RANK) if query_rank else ("q_proj", WIDTH)
    tensors.add(f"{at}{queries}.weight", HEADS * (PLAIN + ROTARY), inputs)
    tensors.add(f"{at}kv_a_proj_with_mqa.weight", RANK + ROTARY, WIDTH)
    tensors.norm(f"{at}kv_a_layernorm", RANK)
    tensors.add(f"{at}kv_b_proj.weight", HEADS * (PLAIN + VALUE), RANK)
    tensors.add(f"{at}o_proj.weight", WIDTH, HEADS * VALUE)
    if experts:
        tensors.add(f"{AT}mlp.gate.weight", EXPERTS, WIDTH)
        tensors.add(f"{AT}mlp.gate.e_score_correction_bias", EXPERTS, scale=0.1)
        for expert in range(EXPERTS):
            gated(tensors, f"{AT}mlp.experts.{expert}.", EXPERT)
        gated(tensors, f"{AT}mlp.shared_experts.", 2 * EXPERT)
    else:
        gated(tensors, f"{AT}mlp.", INNER)
    tensors.add(f"{AT}embed_tokens.weight", VOCAB, WIDTH)
    tensors.add(f"{AT}shared_head.head.weight", VOCAB, WIDTH)
    the_targets_own(tensors)
    return tensors


def gated(tensors, at, inner):
    tensors.add(f"{at}gate_proj.weight", inner, WIDTH)
    tensors.add(f"{at}up_proj.weight", inner, WIDTH)
    tensors.add(f"{at}down_proj.weight", WIDTH, inner)


def yarn_frequencies(theta=1e4, factor=40, original=64, fast=32, slow=1):
    """Slow pairs turn ``factor`` times slower, fast ones as ever; pairs between are blended."""

    def pair_that_turns(times):
        return ROTARY * math.log(original / (2 * math.pi * times)) / (2 * math.log(theta))

    first, last = max(math.floor(pair_that_turns(fast)), 0), math.ceil(pair_that_turns(slow))
    blend = np.clip((np.arange(ROTARY // 2) - first) / (last - first), 0, 1)
    plain = frequencies(ROTARY, theta)
    return plain * (1 - blend) + plain / factor * blend


def growth(strength, factor=40):
    return 0.1 * strength * math.log(factor) + 1


V3 = {
    "freqs": yarn_frequencies(),
    "stretch": growth(1.0) / growth(0.7),
    "scale": growth(0.7) ** 2 / math.sqrt(PLAIN + ROTARY),
}
PLAIN_ROPE = {"freqs": frequencies(ROTARY, 1e6), "scale": 1 / math.sqrt(PLAIN + ROTARY)}


def turned(x, positions, how):
    """[T, W], neighbours (2i, 2i + 1) turned as complex numbers."""
    numbers = x[:, 0::2] + 1j * x[:, 1::2]
    numbers = numbers * np.exp(1j * positions[:, None] * how["freqs"]) * how.get("stretch", 1.0)
    return np.stack([numbers.real, numbers.imag], axis=-1).reshape(x.shape)


def turned_by_halves(x, positions, how):
    pairs = x.reshape(len(x), 2, -1).swapaxes(1, 2).reshape(x.shape)
    return turned(pairs, positions, how)


def latent_attention(tensors, at, x, positions, how):
    """Head by head, every head's keys and values made in full."""
    turn = how.get("turn", turned)

    def projected(name, x):
        return x @ tensors[f"{at}{name}.weight"].T

    if f"{at}q_a_proj.weight" in tensors:
        narrow = rms(projected("q_a_proj", x), tensors[f"{at}q_a_layernorm.weight"], 1e-6)
        queries = projected("q_b_proj", narrow)
    else:
        queries = projected("q_proj", x)
    compressed = projected("kv_a_proj_with_mqa", x)
    latent = rms(compressed[:, :RANK], tensors[f"{at}kv_a_layernorm.weight"], 1e-6)
    shared_key = turn(compressed[:, RANK:], positions, how)
    made, mixed = projected("kv_b_proj", latent), []
    for head in range(HEADS):
        q = queries[:, head * (PLAIN + ROTARY) :][:, : PLAIN + ROTARY]
        q = np.concatenate([q[:, :PLAIN], turn(q[:, PLAIN:], positions, how)], axis=1)
        kv = made[:, head * (PLAIN + VALUE) :][:, : PLAIN + VALUE]
        k = np.concatenate([kv[:, :PLAIN], shared_key], axis=1)
        weights = np.where(triangle(len(x)), np.exp(q @ k.T * how["scale"]), 0)
        mixed.append(weights / weights.sum(1, keepdims=True) @ kv[:, PLAIN:])
    return projected("o_proj", np.concatenate(mixed, axis=1))


def routed(tensors, at, x, groups=GROUPS, ranked_by_bias=True):
    """Token by token: the best groups by their two best experts, then the best experts inside."""
    out = mlp(tensors, f"{at}shared_experts.", x)
    for t, token in enumerate(x):
        scores = sigmoid(tensors[f"{at}gate.weight"] @ token)
        bias = tensors[f"{at}gate.e_score_correction_bias"]
        ranked = (scores + bias if ranked_by_bias else scores).reshape(groups, -1)
        best = sorted(range(groups), key=lambda group: -sum(np.sort(ranked[group])[-2:]))
        allowed = best[: max(groups // 2, 1)]
        width = EXPERTS // groups
        inside = [group * width + expert for group in allowed for expert in range(width)]
        taken = sorted(inside, key=lambda expert: -ranked.ravel()[expert])[:CHOSEN]
        for expert in taken:
            share = 2.5 * scores[expert] / scores[taken].sum()
            out[t] += share * mlp(tensors, f"{at}experts.{expert}.", token[None])[0]
    return out


def expected(tensors, how, feed_forward=routed):
    """The state that the head reads and the one that a next step reads."""
    token, hidden, fuse, final = (tensors[f"{name}.weight"] for name in NAMES)
    embedding, read, handed_on = tensors[f"{AT}embed_tokens.weight"], [], []
    for row in range(ROWS):
        halves = [rms(embedding[TOKENS[row]].astype(np.float64), token)]
        halves.append(rms(HIDDEN[row].astype(np.float64), hidden))
        x = np.concatenate(halves, axis=-1) @ fuse.T
        normed = rms(x, tensors[f"{AT}input_layernorm.weight"])
        x = x + latent_attention(tensors, f"{AT}self_attn.", normed, POSITIONS[row], how)
        normed = rms(x, tensors[f"{AT}post_attention_layernorm.weight"])
        x = x + feed_forward(tensors, f"{AT}mlp.", normed)
        read.append(rms(x, final))
        handed_on.append(x)
    return np.stack(read), np.stack(handed_on)


states = jax.jit(mtp_states, static_argnums=(0, 2))
CASES = {
    "V3": (deepseek_tensors, DEEPSEEK, V3, routed),
    "without query rank, dense": (
        functools.partial(deepseek_tensors, experts=False, query_rank=False),
        LITE,
        PLAIN_ROPE,
        mlp,
    ),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_module_is_the_definition(tmp_path, case):
    make, config, how, feed_forward = case
    tensors = make()
    drafter = converted(tmp_path, config, tensors)
    assert drafter.method == "mtp" and drafter.config.num_modules == 1
    run = functools.partial(states, drafter.config, drafter.params, 0, embed=EMBEDDING)
    read, handed_on, _ = run(TOKENS, HIDDEN, POSITIONS)
    right = expected(tensors, how, feed_forward)
    np.testing.assert_allclose(read, right[0], atol=1e-4)
    np.testing.assert_allclose(handed_on, right[1], atol=1e-4)


def test_a_cache_of_latents_serves_as_well(tmp_path):
    tensors = deepseek_tensors()
    drafter = converted(tmp_path, DEEPSEEK, tensors)
    run = functools.partial(states, drafter.config, drafter.params, 0)
    cut = LENGTH // 2
    *_, past = run(TOKENS[:, :cut], HIDDEN[:, :cut], POSITIONS[:, :cut])
    assert [part.shape for part in past] == [(ROWS, 1, cut, RANK), (ROWS, 1, cut, ROTARY)]
    read, *_ = run(TOKENS[:, cut:], HIDDEN[:, cut:], POSITIONS[:, cut:], past=past)
    np.testing.assert_allclose(read, expected(tensors, V3)[0][:, cut:], atol=1e-4)


@pytest.mark.fast
def test_each_trap_would_be_seen():
    tensors = deepseek_tensors()
    right = expected(tensors, V3)[0]
    wrong = {
        "halves": expected(tensors, V3 | {"turn": turned_by_halves}),
        "no YaRN": expected(tensors, V3 | {"freqs": frequencies(ROTARY)}),
        "cosines not scaled": expected(tensors, V3 | {"stretch": 1.0}),
        "scores not scaled": expected(tensors, V3 | {"scale": PLAIN_ROPE["scale"]}),
        "no groups": expected(tensors, V3, functools.partial(routed, groups=1)),
        "no bias": expected(tensors, V3, functools.partial(routed, ranked_by_bias=False)),
    }
    unseen = [name for name, one in wrong.items() if np.abs(right - one[0]).max() < 1e-3]
    assert unseen == []


@pytest.mark.fast
def test_fp8_weights_are_multiplied_by_the_scales_of_their_blocks(tmp_path):
    block, rng = 4, np.random.default_rng(19)
    stored, plain = deepseek_tensors(), {}
    for name, tensor in list(stored.items()):
        if tensor.ndim != 2 or not name.split(".")[-2].endswith("_proj") or "eh_proj" in name:
            plain[name] = tensor
            continue
        stored[name] = tensor.astype(ml_dtypes.float8_e4m3fn)
        blocks = [-(-size // block) for size in tensor.shape]
        scales = rng.uniform(0.5, 2, blocks).astype(np.float32)
        stored[f"{name}_scale_inv"] = scales
        wide = np.kron(scales, np.ones((block, block), np.float32))
        plain[name] = stored[name].astype(np.float32) * wide[: tensor.shape[0], : tensor.shape[1]]
    fp8 = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [block, block]}}
    from_fp8 = converted(tmp_path / "fp8", DEEPSEEK | fp8, stored)
    from_plain = converted(tmp_path / "plain", DEEPSEEK, plain)
    jax.tree.map(np.testing.assert_array_equal, from_fp8.params, from_plain.params)


@pytest.mark.fast
@pytest.mark.parametrize(
    ("config", "message"),
    [
        (DEEPSEEK | {"kv_lora_rank": 11}, "misshapen module.0.self_attn.kv_a_proj_with_mqa"),
        (DEEPSEEK | {"qk_rope_head_dim": 7}, "leaves no even number of components to rotate"),
        (DEEPSEEK | {"q_lora_rank": None}, "missing module.0.self_attn.q_proj.weight"),
        (without(DEEPSEEK, "kv_lora_rank"), "has no module.0.self_attn.q_proj.weight"),
        (without(DEEPSEEK, "v_head_dim"), "has no 'v_head_dim'"),
        (DEEPSEEK | {"rope_interleave": False}, "rope_interleave=False"),
        (DEEPSEEK | {"index_topk": 2048}, "index_topk=2048"),
        (DEEPSEEK | {"n_group": 3}, "8 experts cannot be 3 groups"),
        (DEEPSEEK | {"topk_group": 1}, "3 experts cannot be taken out of 1 groups of 2"),
        (DEEPSEEK | {"topk_method": "group_limited_greedy"}, "topk_method='group_limited_greedy'"),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path, config, message):
    write(tmp_path / "source", config, deepseek_tensors())
    with pytest.raises(ConversionError, match=message):
        convert_drafter(tmp_path / "source", tmp_path / "converted")

"""Random tiny checkpoints in foreign formats, and the decoder's layout written out by hand.

The layout here is head by head, in loops; it shares nothing with the rules of the converter.
"""

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import safetensors.numpy

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
HEAD_DIM = 8

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "gpt2": "GPT2LMHeadModel",
    "gpt_oss": "GptOssForCausalLM",
}


def hf_config(family: str, **changes) -> dict:
    return (
        {"architectures": [ARCHITECTURES[family]], "model_type": family}
        | SIZES
        | {"head_dim": HEAD_DIM, "rms_norm_eps": 1e-5, "rope_theta": 10_000.0}
        | {"tie_word_embeddings": False, "hidden_act": "silu", "eos_token_id": 2}
        | changes
    )


def hf_tensors(family: str, *, tied=False, seed=0, dtype=np.float32) -> dict[str, np.ndarray]:
    """Random weights under Hugging Face's names, (out, in) as PyTorch keeps them."""
    rng = np.random.default_rng(seed)
    width, inner = SIZES["hidden_size"], SIZES["intermediate_size"]
    queries = SIZES["num_attention_heads"] * HEAD_DIM
    keys = SIZES["num_key_value_heads"] * HEAD_DIM
    shapes = {"model.embed_tokens.weight": (SIZES["vocab_size"], width)}
    shapes["model.norm.weight"] = (width,)
    if not tied:
        shapes["lm_head.weight"] = (SIZES["vocab_size"], width)
    for layer in range(SIZES["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        shapes |= {
            at + "input_layernorm.weight": (width,),
            at + "post_attention_layernorm.weight": (width,),
            at + "self_attn.q_proj.weight": (queries, width),
            at + "self_attn.k_proj.weight": (keys, width),
            at + "self_attn.v_proj.weight": (keys, width),
            at + "self_attn.o_proj.weight": (width, queries),
            at + "mlp.gate_proj.weight": (inner, width),
            at + "mlp.up_proj.weight": (inner, width),
            at + "mlp.down_proj.weight": (width, inner),
        }
        if family == "qwen2":
            shapes |= {
                at + "self_attn.q_proj.bias": (queries,),
                at + "self_attn.k_proj.bias": (keys,),
                at + "self_attn.v_proj.bias": (keys,),
            }
        if family == "qwen3":
            shapes |= {
                at + "self_attn.q_norm.weight": (HEAD_DIM,),
                at + "self_attn.k_norm.weight": (HEAD_DIM,),
            }
    return {name: rng.standard_normal(shape).astype(dtype) for name, shape in shapes.items()}


def expected_params(tensors: dict[str, np.ndarray]) -> dict:
    """The decoder's parameter tree of these weights."""
    layers = [_expected_layer(tensors, index) for index in range(SIZES["num_hidden_layers"])]
    params = {
        "embed": tensors["model.embed_tokens.weight"],
        "norm": tensors["model.norm.weight"],
        "layers": {name: np.stack([layer[name] for layer in layers]) for name in layers[0]},
    }
    if "lm_head.weight" in tensors:
        params["head"] = tensors["lm_head.weight"]
    return params


def _expected_layer(tensors: dict[str, np.ndarray], index: int) -> dict[str, np.ndarray]:
    at = f"model.layers.{index}."
    kv_heads = SIZES["num_key_value_heads"]
    group = SIZES["num_attention_heads"] // kv_heads
    attention = {
        name: tensors[f"{at}self_attn.{name}_proj.weight"] for name in ("q", "k", "v", "o")
    }
    width = SIZES["hidden_size"]
    qkv = np.empty((width, kv_heads, group + 2, HEAD_DIM), attention["q"].dtype)
    out = np.empty((kv_heads, group, HEAD_DIM, width), attention["q"].dtype)
    bias = np.empty((kv_heads, group + 2, HEAD_DIM), attention["q"].dtype)

    def rows(head):
        return slice(head * HEAD_DIM, (head + 1) * HEAD_DIM)

    biased = f"{at}self_attn.q_proj.bias" in tensors
    for kv_head in range(kv_heads):
        for member in range(group):
            head = kv_head * group + member
            qkv[:, kv_head, member] = attention["q"][rows(head)].T
            out[kv_head, member] = attention["o"][:, rows(head)].T
            if biased:
                bias[kv_head, member] = tensors[f"{at}self_attn.q_proj.bias"][rows(head)]
        for offset, name in enumerate(("k", "v")):
            qkv[:, kv_head, group + offset] = attention[name][rows(kv_head)].T
            if biased:
                full = tensors[f"{at}self_attn.{name}_proj.bias"]
                bias[kv_head, group + offset] = full[rows(kv_head)]
    layer = {
        "attention_norm": tensors[at + "input_layernorm.weight"],
        "qkv": qkv,
        "out": out,
        "mlp_norm": tensors[at + "post_attention_layernorm.weight"],
        "gate_up": np.stack(
            [tensors[at + "mlp.gate_proj.weight"].T, tensors[at + "mlp.up_proj.weight"].T], axis=1
        ),
        "down": tensors[at + "mlp.down_proj.weight"].T,
    }
    if biased:
        layer["qkv_bias"] = bias
    if f"{at}self_attn.q_norm.weight" in tensors:
        layer["q_norm"] = tensors[at + "self_attn.q_norm.weight"]
        layer["k_norm"] = tensors[at + "self_attn.k_norm.weight"]
    return layer


def write_safetensors(file: Path, tensors: dict[str, np.ndarray]) -> None:
    whole = {name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}
    safetensors.numpy.save_file(whole, file)


def write_hf(folder: Path, config: dict, tensors: dict[str, np.ndarray], shards=1) -> Path:
    """A Hugging Face folder; with several shards, the index that goes with them."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    if shards == 1:
        write_safetensors(folder / "model.safetensors", tensors)
        return folder
    weight_map = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: tensors[name] for name in list(tensors)[shard::shards]}
        write_safetensors(folder / file, part)
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    stem, kind = name.rsplit(".", 1)
    if not stem.startswith("model.layers."):
        return f"{GGUF_NAMES[stem]}.{kind}"
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{GGUF_NAMES[part]}.{kind}"


def interleave_halves(tensor: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's order of a query or key projection: row i of a head beside row i + W/2."""
    rows = []
    for head in np.split(tensor, heads):
        half = len(head) // 2
        for pair in range(half):
            rows += [head[pair], head[pair + half]]
    return np.stack(rows)


def write_gguf(
    file: Path,
    architecture: str,
    tensors: dict[str, np.ndarray],
    *,
    quantisation: str | None = None,
    tokenizer: dict | None = None,
    metadata: dict | None = None,
    extra: dict[str, np.ndarray] | None = None,
) -> dict[str, np.ndarray]:
    """Write a GGUF file; returns what its matrices hold after quantisation, in HF's row order."""
    import gguf

    writer = gguf.GGUFWriter(file, architecture)
    writer.add_block_count(SIZES["num_hidden_layers"])
    writer.add_context_length(SIZES["max_position_embeddings"])
    writer.add_embedding_length(SIZES["hidden_size"])
    writer.add_feed_forward_length(SIZES["intermediate_size"])
    writer.add_head_count(SIZES["num_attention_heads"])
    writer.add_head_count_kv(SIZES["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(SIZES["vocab_size"])
    for key, value in ({"rope.freq_base": 10_000.0} | (metadata or {})).items():
        adders = {str: writer.add_string, int: writer.add_uint32, float: writer.add_float32}
        adders[type(value)](f"{architecture}.{key}", value)
    _add_tokenizer(writer, tokenizer or {})
    held = {}
    for name, tensor in tensors.items():
        stored, held[name] = _stored(name, tensor, architecture, quantisation)
        data, raw_dtype = stored
        writer.add_tensor(gguf_name(name), data, raw_dtype=raw_dtype)
    for name, tensor in (extra or {}).items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return held


def _stored(name, tensor, architecture, quantisation):
    import gguf

    heads = {"q_proj": SIZES["num_attention_heads"], "k_proj": SIZES["num_key_value_heads"]}
    paired = heads.get(name.split(".")[-2]) if architecture == "llama" else None
    rows = interleave_halves(tensor, paired) if paired else tensor
    if quantisation is None or tensor.ndim < 2:
        if tensor.dtype == ml_dtypes.bfloat16:
            return (rows.view(np.uint8), gguf.GGMLQuantizationType.BF16), tensor
        return (rows, None), tensor
    kind = gguf.GGMLQuantizationType[quantisation]
    packed = gguf.quants.quantize(rows.astype(np.float32), kind)
    held = DEQUANTISE[quantisation](packed, rows.shape)
    if paired:
        held = separate_halves(held, paired)
    return (packed, kind), held


def separate_halves(tensor: np.ndarray, heads: int) -> np.ndarray:
    return np.concatenate([np.concatenate([h[0::2], h[1::2]]) for h in np.split(tensor, heads)])


def dequantise_q8_0(packed: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Blocks of 32: a float16 scale, 32 signed bytes."""
    blocks = packed.reshape(-1, 34)
    scale = blocks[:, :2].copy().view(np.float16).astype(np.float32)
    return (scale * blocks[:, 2:].view(np.int8)).astype(np.float32).reshape(shape)


def dequantise_q4_0(packed: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Blocks of 32: a float16 scale, 16 bytes of two nibbles, offset by 8, low halves first."""
    blocks = packed.reshape(-1, 18)
    scale = blocks[:, :2].copy().view(np.float16).astype(np.float32)
    nibbles = np.concatenate([blocks[:, 2:] & 15, blocks[:, 2:] >> 4], axis=1).astype(np.float32)
    return (scale * (nibbles - 8)).reshape(shape)


def dequantise_q4_1(packed: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Blocks of 32: a float16 scale and minimum, 16 bytes of two nibbles, low halves first."""
    blocks = packed.reshape(-1, 20)
    scale, least = blocks[:, :4].copy().view(np.float16).astype(np.float32).T[..., None]
    nibbles = np.concatenate([blocks[:, 4:] & 15, blocks[:, 4:] >> 4], axis=1).astype(np.float32)
    return (scale * nibbles + least).reshape(shape)


DEQUANTISE = {"Q8_0": dequantise_q8_0, "Q4_0": dequantise_q4_0, "Q4_1": dequantise_q4_1}


def _add_tokenizer(writer, fields: dict) -> None:
    for key, value in fields.items():
        if isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        else:
            writer.add_string(key, value)

"""Random tiny drafters in the very formats that are published: key names, shapes, config.json."""

import json
from pathlib import Path

import numpy as np
from convert.tiny_checkpoints import write_safetensors

VOCAB, DRAFT_VOCAB, WIDTH, INNER = 61, 16, 24, 40
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 8
TARGET_WIDTH = 20

LAYER_CONFIG = {
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "intermediate_size": INNER,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 2048,
}


class Tensors(dict):
    """Shapes by name, turned into random weights; norms lie around 1."""

    def __init__(self, seed: int):
        super().__init__()
        self.rng = np.random.default_rng(seed)

    def add(self, name: str, *shape: int, around: float = 0.0, scale: float = 0.25) -> None:
        self[name] = (around + scale * self.rng.standard_normal(shape)).astype(np.float32)

    def norm(self, name: str, width: int = WIDTH, around: float = 1.0) -> None:
        self.add(f"{name}.weight", width, around=around)

    def layer(self, at: str, *, inputs: int = WIDTH, input_norm=True, bias=False, qk_norm=False):
        """One transformer layer under Hugging Face's names, the prefix ``at`` before them."""
        sides = {"q": HEADS, "k": KV_HEADS, "v": KV_HEADS}
        for side, heads in sides.items():
            self.add(f"{at}self_attn.{side}_proj.weight", heads * HEAD_DIM, inputs)
            if bias:
                self.add(f"{at}self_attn.{side}_proj.bias", heads * HEAD_DIM)
        self.add(f"{at}self_attn.o_proj.weight", WIDTH, HEADS * HEAD_DIM)
        if qk_norm:
            self.norm(f"{at}self_attn.q_norm", HEAD_DIM)
            self.norm(f"{at}self_attn.k_norm", HEAD_DIM)
        if input_norm:
            self.norm(f"{at}input_layernorm")
        self.norm(f"{at}post_attention_layernorm")
        self.add(f"{at}mlp.gate_proj.weight", INNER, WIDTH)
        self.add(f"{at}mlp.up_proj.weight", INNER, WIDTH)
        self.add(f"{at}mlp.down_proj.weight", WIDTH, INNER)


def write(folder: Path, config: dict, tensors: dict, name: str = "model.safetensors") -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    write_safetensors(folder / name, tensors)
    return folder


def medusa_tensors(heads: int = 5, blocks: int = 1, seed: int = 0) -> Tensors:
    tensors = Tensors(seed)
    for head in range(heads):
        for block in range(blocks):
            tensors.add(f"{head}.{block}.linear.weight", WIDTH, WIDTH)
            tensors.add(f"{head}.{block}.linear.bias", WIDTH)
        tensors.add(f"{head}.{blocks}.weight", VOCAB, WIDTH)
    return tensors


def eagle_tensors(*, bias=True, qkv_bias=False, embedding=True, layers=1, seed=1) -> Tensors:
    tensors = Tensors(seed)
    if embedding:
        tensors.add("embed_tokens.weight", VOCAB, WIDTH)
    tensors.add("fc.weight", WIDTH, 2 * WIDTH)
    if bias:
        tensors.add("fc.bias", WIDTH, scale=1.0)
    for layer in range(layers):
        tensors.layer(f"layers.{layer}.", input_norm=layer > 0, bias=qkv_bias)
    return tensors


def eagle_config(**changes) -> dict:
    config = {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1, "model_type": "llama"}
    return LAYER_CONFIG | config | changes


def reduced_vocabulary(seed: int = 7) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The target's ids of the draft ids, and the two tensors that say so in the files."""
    ids = np.sort(np.random.default_rng(seed).choice(VOCAB, DRAFT_VOCAB, replace=False))
    mask = np.zeros(VOCAB, bool)
    mask[ids] = True
    return ids, (ids - np.arange(DRAFT_VOCAB)).astype(np.int64), mask


def eagle3_tensors(
    *,
    layer: str = "midlayer.",
    taps: int = 3,
    target_width: int = TARGET_WIDTH,
    embedding=True,
    norm_before_fc=False,
    fc_norm: tuple[str, ...] = (),
    layers: int = 1,
    qkv_bias=False,
    seed=2,
) -> Tensors:
    tensors = Tensors(seed)
    tensors.add("fc.weight", WIDTH, taps * target_width)
    tensors.norm(f"{layer}hidden_norm")
    tensors.layer(layer, inputs=2 * WIDTH, bias=qkv_bias)
    for later in range(1, layers):
        tensors.layer(f"layers.{later}.", bias=qkv_bias)
    tensors.norm("norm")
    tensors.add("lm_head.weight", DRAFT_VOCAB, WIDTH)
    if embedding:
        tensors.add("embed_tokens.weight", VOCAB, WIDTH)
    if norm_before_fc:
        tensors.norm("input_norm", taps * target_width)
    for name in fc_norm:
        tensors.norm(name, target_width)
    _, tensors["d2t"], tensors["t2d"] = reduced_vocabulary()
    return tensors


def eagle3_config(**changes) -> dict:
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "draft_vocab_size": DRAFT_VOCAB,
        "target_hidden_size": TARGET_WIDTH,
        "tie_word_embeddings": False,
    }
    return LAYER_CONFIG | config | changes


MASK = VOCAB - 1
BLOCK = 4


def dflash_tensors(
    *, layers=2, taps=2, embedding=False, head=False, markov="", confidence=0, second=False, seed=3
) -> Tensors:
    tensors = Tensors(seed)
    tensors.add("fc.weight", WIDTH, taps * WIDTH)
    tensors.norm("hidden_norm")
    for layer in range(layers):
        tensors.layer(f"layers.{layer}.", qk_norm=True)
        for name in ("attention_conv", "mlp_conv") if second else ():
            tensors.add(f"layers.{layer}.{name}.base_kernel", 2, 2, WIDTH, scale=0.7)
            tensors.add(f"layers.{layer}.{name}.kernel_projection.weight", 2 * 2 * 3, WIDTH)
    tensors.norm("norm")
    if embedding:
        tensors.add("embed_tokens.weight", VOCAB, WIDTH)
    if head:
        tensors.add("lm_head.weight", VOCAB, WIDTH)
    if markov:
        _markov(tensors, markov)
    if confidence:
        tensors.add("confidence_head.proj.weight", 1, confidence)
        tensors.add("confidence_head.proj.bias", 1)
    if second:
        tensors.add("candidate_selector.predecessor_codebook", VOCAB, RANK)
        tensors.add("candidate_selector.successor_codebook", VOCAB, RANK)
        tensors.add("candidate_selector.hidden_projection.weight", RANK, WIDTH)
    return tensors


RANK = 6


def _markov(tensors: Tensors, kind: str) -> None:
    tensors.add("markov_head.markov_w1.weight", VOCAB, RANK, scale=1.0)
    tensors.add("markov_head.markov_w2.weight", VOCAB, RANK, scale=1.0)
    if kind == "gated":
        tensors.add("markov_head.gate_proj.weight", RANK, WIDTH + RANK)
        tensors.add("markov_head.gate_proj.bias", RANK)
    if kind == "rnn":
        tensors.add("markov_head.joint_proj.weight", 3 * RANK, 2 * RANK + WIDTH)
        tensors.add("markov_head.joint_proj.bias", 3 * RANK)


def dflash_config(*, nested: dict | None = None, **changes) -> dict:
    """z-lab's form: the settings of the block are nested."""
    config = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "num_hidden_layers": 2,
        "num_target_layers": 8,
        "block_size": BLOCK,
        "rope_theta": 1e6,
        "dflash_config": {"mask_token_id": MASK, "target_layer_ids": [1, 5]} | (nested or {}),
    }
    return LAYER_CONFIG | config | changes


def dspark_config(**changes) -> dict:
    """DeepSpec's form: flat, and nothing in it about the block's layout."""
    config = {
        "architectures": ["Qwen3DSparkModel"],
        "model_type": "qwen3",
        "num_hidden_layers": 2,
        "num_target_layers": 8,
        "block_size": BLOCK,
        "rope_theta": 1e6,
        "mask_token_id": MASK,
        "target_layer_ids": [1, 5],
        "num_anchors": 16,
        "markov_rank": 0,
        "enable_confidence_head": False,
    }
    return LAYER_CONFIG | config | changes

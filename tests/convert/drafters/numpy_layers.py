"""Transformer parts in NumPy on tensors as the files hold them: one sequence, head by head.

Written from the formats' definitions; shares nothing with the networks or the converter's rules.
"""

import numpy as np


def rms(x, weight, eps=1e-5):
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * weight


def silu(x):
    return x / (1 + np.exp(-x))


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def turned(x, position, frequencies):
    """One head's vector, pairs (i, i + half) turned by the position's angles; the rest stays."""
    half = len(frequencies)
    low, high, rest = x[:half], x[half : 2 * half], x[2 * half :]
    cos, sin = np.cos(position * frequencies), np.sin(position * frequencies)
    return np.concatenate([low * cos - high * sin, high * cos + low * sin, rest])


def frequencies(width, theta=10_000.0):
    return theta ** (-np.arange(0, width, 2) / width)


def projected(tensors, at, x, width):
    """Heads of one projection, [T, heads, W]."""
    flat = x @ tensors[f"{at}.weight"].T + tensors.get(f"{at}.bias", 0.0)
    return flat.reshape(len(x), -1, width)


def queries(tensors, at, x, positions, freqs, width, norm=rms):
    return _ready(
        tensors, at, "q", projected(tensors, f"{at}q_proj", x, width), positions, freqs, norm
    )


def keys_values(tensors, at, x, positions, freqs, width, norm=rms):
    k = _ready(
        tensors, at, "k", projected(tensors, f"{at}k_proj", x, width), positions, freqs, norm
    )
    return k, projected(tensors, f"{at}v_proj", x, width)


def _ready(tensors, at, side, heads, positions, freqs, norm):
    if f"{at}{side}_norm.weight" in tensors:
        heads = norm(heads, tensors[f"{at}{side}_norm.weight"])
    placed = zip(heads, positions, strict=True)
    return np.array([[turned(head, place, freqs) for head in row] for row, place in placed])


def attended(q, k, v, seen):
    """[T, heads, W]; query head h reads KV head h // group."""
    group = q.shape[1] // k.shape[1]
    mixed = np.empty_like(q)
    for head in range(q.shape[1]):
        scores = q[:, head] @ k[:, head // group].T / np.sqrt(q.shape[-1])
        weights = np.exp(np.where(seen, scores, -np.inf))
        mixed[:, head] = weights / weights.sum(-1, keepdims=True) @ v[:, head // group]
    return mixed


def attention(tensors, at, x, positions, freqs, seen, width):
    """Self-attention after its output projection."""
    q = queries(tensors, at, x, positions, freqs, width)
    k, v = keys_values(tensors, at, x, positions, freqs, width)
    return attended(q, k, v, seen).reshape(len(x), -1) @ tensors[f"{at}o_proj.weight"].T


def mlp(tensors, at, x):
    gate = silu(x @ tensors[f"{at}gate_proj.weight"].T)
    return (gate * (x @ tensors[f"{at}up_proj.weight"].T)) @ tensors[f"{at}down_proj.weight"].T


def layer(tensors, at, x, positions, freqs, seen, width):
    normed = rms(x, tensors[f"{at}input_layernorm.weight"])
    x = x + attention(tensors, f"{at}self_attn.", normed, positions, freqs, seen, width)
    return x + mlp(tensors, f"{at}mlp.", rms(x, tensors[f"{at}post_attention_layernorm.weight"]))


def triangle(length):
    return np.tril(np.ones((length, length), bool))

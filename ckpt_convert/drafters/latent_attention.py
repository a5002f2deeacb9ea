"""Multi-head latent attention as DeepSeek's files hold it: its sizes, and where its tensors go."""

import math

from ckpt_convert.drafters.layers import size
from ckpt_convert.drafters.rules import Rule
from ckpt_convert.families.hf_config import UNBIASED, HFConfig, refuse, rope, rope_settings
from specjax.models.latent_attention import LatentConfig


def latent_config(config: HFConfig) -> LatentConfig | None:
    """None for a model whose attention is another."""
    if not config.get("kv_lora_rank"):
        return None
    turned = {"partial_rotary_factor": (1.0, None), "rope_interleave": (True, None)}
    # index_topk: later models attend to a few tokens only.
    refuse({**config, **rope_settings(config)}, UNBIASED | turned | {"index_topk": (None,)})
    plain, rotary = size(config, "qk_nope_head_dim"), size(config, "qk_rope_head_dim")
    return LatentConfig(
        kv_rank=size(config, "kv_lora_rank"),
        query_rank=size(config, "q_lora_rank") if config.get("q_lora_rank") else 0,
        plain_dim=plain,
        rotary_dim=rotary,
        value_dim=size(config, "v_head_dim"),
        scale=_sharpness(config) ** 2 / math.sqrt(plain + rotary),
    )


def _sharpness(config: HFConfig) -> float:
    """By how much YaRN scales queries and keys, those of the parts that are not turned too."""
    strength, found = rope_settings(config).get("mscale_all_dim"), rope(config)
    if not strength or found.kind == "default" or found.factor <= 1:
        return 1.0
    return 0.1 * strength * math.log(found.factor) + 1.0


def latent_rules(config: LatentConfig, source: str, path: tuple[str, ...]) -> tuple[Rule, ...]:
    """Rotary components, in the files pair by pair, are put as all others here: first halves first.

    Letters: H heads, N plain, R rotary pairs, U value, C and Q ranks of keys and queries.
    """
    at = f"{source}self_attn."
    name, inputs = ("q_b_proj", "Q") if config.query_rank else ("q_proj", "D")
    low_rank = (
        Rule(f"{at}q_a_proj.weight", (*path, "q_down"), "Q D -> D Q"),
        Rule(f"{at}q_a_layernorm.weight", (*path, "q_norm"), "Q -> Q"),
    )
    q, kv_down, kv_up = (f"{at}{of}.weight" for of in (name, "kv_a_proj_with_mqa", "kv_b_proj"))
    return (
        *(low_rank if config.query_rank else ()),
        Rule(q, (*path, "q_plain"), f"(H N+R.two) {inputs} -> {inputs} H N"),
        Rule(q, (*path, "q_rotary"), f"(H N+R.two) {inputs} -> {inputs} H (two R)"),
        Rule(kv_down, (*path, "kv_down"), "C+R.two D -> D C"),
        Rule(kv_down, (*path, "k_rotary"), "C+R.two D -> D (two R)"),
        Rule(f"{at}kv_a_layernorm.weight", (*path, "kv_norm"), "C -> C"),
        Rule(kv_up, (*path, "k_up"), "(H N+U) C -> C H N"),
        Rule(kv_up, (*path, "v_up"), "(H N+U) C -> C H U"),
        Rule(f"{at}o_proj.weight", (*path, "out"), "D (H U) -> H U D"),
    )


def latent_sizes(config: LatentConfig, heads: int) -> dict[str, int]:
    """The letters of `latent_rules`, but for D."""
    return {
        "H": heads,
        "N": config.plain_dim,
        "R": config.rotary_dim // 2,
        "two": 2,
        "U": config.value_dim,
        "C": config.kv_rank,
        "Q": config.query_rank,
    }

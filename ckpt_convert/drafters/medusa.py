"""Medusa heads, as published by their authors and as vLLM converts them."""

import re

import numpy as np

from ckpt_convert.drafters.drafter import Format
from ckpt_convert.drafters.rules import Rule
from ckpt_convert.drafters.source import Found
from ckpt_convert.errors import ConversionError
from ckpt_convert.tensors import Ignored
from specjax.models.medusa import MedusaConfig

# The authors' own names: head i is a list of residual blocks and, last, its output matrix. vLLM
# numbers both apart, which is what the rules below use.
_BLOCK = re.compile(r"blocks\.(\d+)\.layers\.(\d+)\.weight")
_HEAD = re.compile(r"lm_heads\.(\d+)\.weight")
_TOKEN_MAP = "token_map"


def recognises(found: Found) -> bool:
    return "blocks.0.layers.0.weight" in found.tensors and any(
        name.startswith("lm_heads.") for name in found.tensors
    )


def read_config(found: Found) -> MedusaConfig:
    """Heads and blocks are counted in the keys: published configs give other numbers."""
    if found.config.get("original_lm_head"):
        raise ConversionError(
            "config.json sets original_lm_head: heads that share the target's output matrix are "
            "not supported; take a checkpoint in which each head has its own"
        )
    blocks = [match for name in found.tensors if (match := _BLOCK.fullmatch(name))]
    heads = [match for name in found.tensors if (match := _HEAD.fullmatch(name))]
    draft_vocab_size, hidden = found.shape("lm_heads.0.weight")
    vocab_size = found.config.get("vocab_size") or draft_vocab_size
    if vocab_size < draft_vocab_size:
        raise ConversionError(
            f"the heads give {draft_vocab_size} logits and config.json a vocabulary of {vocab_size}"
        )
    return MedusaConfig(
        vocab_size=vocab_size,
        draft_vocab_size=draft_vocab_size,
        hidden_size=hidden,
        num_heads=1 + max(int(match[1]) for match in blocks + heads),
        num_layers=1 + max(int(match[2]) for match in blocks),
        bias="blocks.0.layers.0.bias" in found.tensors,
    )


def rules(config: MedusaConfig) -> tuple[Rule, ...]:
    block = "blocks.{head}.layers.{block}."
    bias = Rule(f"{block}bias", ("bias",), "D -> D")
    return (
        Rule(f"{block}weight", ("blocks",), "O D -> D O"),
        *((bias,) if config.bias else ()),
        Rule("lm_heads.{head}.weight", ("head",), "V D -> V D"),
    )


def sizes(config: MedusaConfig) -> dict[str, int]:
    return {
        "V": config.draft_vocab_size,
        "D": config.hidden_size,
        "O": config.hidden_size,
        "head": config.num_heads,
        "block": config.num_layers,
    }


def map_of(found: Found, config: MedusaConfig) -> np.ndarray | None:
    """Medusa's map holds the target's ids themselves."""
    ids = found.optional(_TOKEN_MAP)
    if ids is None:
        if config.reduced:
            raise ConversionError(
                f"the heads know {config.draft_vocab_size} of {config.vocab_size} ids and "
                f"{_TOKEN_MAP}, which says which ones, is missing; fetch the complete checkpoint"
            )
        return None
    if ids.shape != (config.draft_vocab_size,):
        raise ConversionError(
            f"{_TOKEN_MAP} is of shape {list(ids.shape)}, expected [{config.draft_vocab_size}]"
        )
    if ids.min() < 0 or ids.max() >= config.vocab_size or len(np.unique(ids)) < len(ids):
        raise ConversionError(
            f"{_TOKEN_MAP} must hold {len(ids)} different ids of a vocabulary of "
            f"{config.vocab_size}, and vocab_size must be in config.json"
        )
    if not config.reduced and not np.array_equal(ids, np.arange(len(ids))):
        raise ConversionError(
            f"{_TOKEN_MAP} permutes a vocabulary that is not reduced; not supported"
        )
    return ids.astype(np.int32) if config.reduced else None


_NAMES = (
    (r"^medusa_head\.", ""),
    (r"^(\d+)\.(\d+)\.linear\.(weight|bias)$", r"blocks.\1.layers.\2.\3"),
    (r"^(\d+)\.\d+\.weight$", r"lm_heads.\1.weight"),
)

MEDUSA = Format(
    name="medusa",
    config=MedusaConfig,
    named=lambda found: found.renamed(_NAMES),
    recognises=recognises,
    read_config=read_config,
    rules=rules,
    sizes=sizes,
    ignored=(
        Ignored(_TOKEN_MAP, "read into draft_to_target"),
        # Some publish the heads in one file with the target.
        Ignored(r"model\..*|lm_head\.weight", "the target's own"),
    ),
    map_of=map_of,
)

"""EAGLE-1 and EAGLE-2 checkpoints, which share one network; HASS trains it too."""

import math

from ckpt_convert.drafters.drafter import Format
from ckpt_convert.drafters.layers import (
    EMBEDDING,
    IGNORED,
    attention_rules,
    layer_config,
    layer_count,
    layer_sizes,
    mlp_rules,
    refuse_windows,
    size,
)
from ckpt_convert.drafters.rules import Rule
from ckpt_convert.drafters.source import Found
from ckpt_convert.errors import ConversionError
from specjax.models.eagle import EagleConfig

_LAYER = "layers.{layer}."


def recognises(found: Found) -> bool:
    names = found.tensors
    return (
        "fc.weight" in names
        and "layers.0.self_attn.q_proj.weight" in names
        and not {"hidden_norm.weight", "layers.0.hidden_norm.weight"} & set(names)
    )


def read_config(found: Found) -> EagleConfig:
    """Whether fc has a bias and the network an embedding is read off the keys.

    Published configs leave the bias out or say the opposite.
    """
    if "layers.0.input_layernorm.weight" in found.tensors:
        raise ConversionError(
            "layers.0.input_layernorm.weight: an EAGLE whose first layer norms its input is not "
            "supported"
        )
    refuse_windows(found.config)
    layer = layer_config(found, "layers.0.")
    return EagleConfig(
        vocab_size=size(found.config, "vocab_size"),
        layer=layer,
        num_layers=layer_count(found.config, found),
        fc_bias="fc.bias" in found.tensors,
        own_embedding=EMBEDDING in found.tensors,
        embedding_scale=_scale(found.choices.embedding, layer.hidden_size),
    )


def _scale(embedding: str | None, hidden_size: int) -> float:
    """Gemma scales its embeddings, and no flag tells whether the drafter was trained on that."""
    if embedding not in (None, "raw", "scaled"):
        raise ConversionError(f"embedding {embedding!r} is not known (known: raw, scaled)")
    return math.sqrt(hidden_size) if embedding == "scaled" else 1.0


def rules(config: EagleConfig) -> tuple[Rule, ...]:
    found = [
        Rule("fc.weight", ("fc",), "D fused -> fused D"),
        *attention_rules(config.layer, _LAYER, ("layers",)),
        *mlp_rules(_LAYER, ("layers",)),
    ]
    if config.fc_bias:
        found.append(Rule("fc.bias", ("fc_bias",), "D -> D"))
    if config.own_embedding:
        found.append(Rule(EMBEDDING, ("embed",), "V D -> V D"))
    if config.num_layers > 1:
        name = "layers.{later+1}.input_layernorm.weight"
        found.append(Rule(name, ("attention_norm",), "D -> D"))
    return tuple(found)


def sizes(config: EagleConfig) -> dict[str, int]:
    return layer_sizes(config.layer) | {
        "V": config.vocab_size,
        "fused": 2 * config.layer.hidden_size,
        "layer": config.num_layers,
        "later": config.num_layers - 1,
    }


_NAMES = ((r"^model\.", ""),)

EAGLE = Format(
    name="eagle",
    config=EagleConfig,
    named=lambda found: found.renamed(_NAMES),
    recognises=recognises,
    read_config=read_config,
    rules=rules,
    sizes=sizes,
    ignored=IGNORED,
    choices=("embedding",),
)

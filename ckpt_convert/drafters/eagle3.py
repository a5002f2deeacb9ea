"""EAGLE-3 checkpoints: the authors', SpecForge's, DeepSpec's and, flattened, speculators'."""

import logging

import numpy as np

from ckpt_convert.drafters import vocabulary
from ckpt_convert.drafters.drafter import Format
from ckpt_convert.drafters.layers import (
    EMBEDDING,
    HEAD,
    IGNORED,
    flag,
    layer_config,
    layer_count,
    layer_numbers,
    layer_rules,
    layer_sizes,
    mask_token,
    refuse_windows,
    size,
    spelled_out,
)
from ckpt_convert.drafters.rules import Rule
from ckpt_convert.drafters.source import Found
from ckpt_convert.errors import ConversionError
from ckpt_convert.families.hf_config import refuse
from ckpt_convert.tensors import Ignored
from specjax.models.eagle3 import Eagle3Config

log = logging.getLogger("specjax")

_ENTERING = "eagle_aux_hidden_state_layer_ids"
_AFTER = "target_layer_ids"


def recognises(found: Found) -> bool:
    return "layers.0.hidden_norm.weight" in found.tensors


def read_config(found: Found) -> Eagle3Config:
    settings = {**found.config, **(found.config.get("eagle_config") or {})}
    refuse(settings, {"use_aux_hidden_state": (True,), "logit_scale": (1.0, None)})
    refuse_windows(found.config)
    layer = layer_config(found, "layers.0.")
    vocab_size = size(found.config, "vocab_size")
    draft_vocab_size = size(found.config, "draft_vocab_size", vocab_size)
    target_hidden = size(found.config, "target_hidden_size", layer.hidden_size)
    own_embedding = EMBEDDING in found.tensors
    if not own_embedding and target_hidden != layer.hidden_size:
        raise ConversionError(
            f"{EMBEDDING} is missing, and the target's embeddings are {target_hidden} wide instead "
            f"of {layer.hidden_size}; fetch the complete checkpoint"
        )
    taps = _taps(found, settings)
    parallel = "mask_hidden" in found.tensors
    return Eagle3Config(
        vocab_size=vocab_size,
        draft_vocab_size=draft_vocab_size,
        layer=layer,
        target_hidden_size=target_hidden,
        taps=taps,
        num_taps=len(taps) or 3,
        num_layers=layer_count(found.config, found),
        norm_before_residual=flag(settings, "norm_before_residual"),
        norm_before_fc=flag(settings, "norm_before_fc"),
        fc_norm=flag(settings, "fc_norm", "use_aux_norm"),
        norm_output=flag(settings, "norm_output"),
        own_embedding=own_embedding,
        # Where ids are left out no other matrix fits: then its absence is reported.
        own_head=HEAD in found.tensors or draft_vocab_size < vocab_size,
        tied=flag(settings, "tie_word_embeddings"),
        mask_token_id=mask_token(found.config, vocab_size) if parallel else None,
    )


def _taps(found: Found, settings) -> tuple[int, ...]:
    """Where both spellings are there they must agree; where none is, the paper's default holds."""
    chosen = spelled_out(found.choices.taps)
    if chosen:
        return layer_numbers(chosen, "after-layer")
    counted = {_ENTERING: "hidden-states", _AFTER: "after-layer"}
    ids = settings.get(_ENTERING)
    if ids and ids[0] == 1 and not found.choices.taps:
        # Some trainers write outputs under the name that stands for inputs; no authors' file
        # begins with the input of the second layer.
        counted[_ENTERING] = "after-layer"
        log.warning(
            "%s begins with 1 and is read as layers' outputs; --taps says otherwise", _ENTERING
        )
    read = {
        name: layer_numbers(settings[name], found.choices.taps or meaning)
        for name, meaning in counted.items()
        if settings.get(name)
    }
    if len(set(read.values())) > 1:
        raise ConversionError(
            f"config.json taps {settings[_ENTERING]} by {_ENTERING} and {settings[_AFTER]} by "
            f"{_AFTER}, which are not the same layers; leave the wrong one out"
        )
    if not read and found.choices.taps:
        raise ConversionError(
            "config.json names no tapped layers, so nothing is counted; give the numbers of those "
            "after which the taps are, as in --taps 1,15,28"
        )
    if not read:
        log.warning(
            "config.json names no tapped layers: the paper's are taken, after the target's layers "
            "1, L // 2 - 1 and L - 4; --taps 1,15,28 names others"
        )
    return next(iter(read.values()), ())


def rules(config: Eagle3Config) -> tuple[Rule, ...]:
    first = layer_rules(config.layer, "layers.0.", ("first",), inputs="both")
    found = [
        Rule("fc.weight", ("fc",), "D (F T) -> (F T) D"),
        Rule("layers.0.hidden_norm.weight", ("first", "hidden_norm"), "D -> D"),
        *first,
        Rule("norm.weight", ("norm",), "D -> D"),
    ]
    if config.num_layers > 1:
        found += layer_rules(config.layer, "layers.{later+1}.", ("layers",))
    if config.norm_before_fc:
        found.append(Rule("input_norm.weight", ("input_norm",), "(F T) -> (F T)"))
    if config.fc_norm:
        found.append(Rule("fc_norm.{tap}.weight", ("fc_norm",), "T -> T"))
    if config.own_embedding:
        found.append(Rule(EMBEDDING, ("embed",), "V D -> V D"))
    if config.own_head:
        found.append(Rule(HEAD, ("head",), "Vd D -> Vd D"))
    if config.mask_token_id is not None:
        found.append(Rule("mask_hidden", ("mask_hidden",), "P Q (F T) -> (P Q F T)"))
    return tuple(found)


def sizes(config: Eagle3Config) -> dict[str, int]:
    return layer_sizes(config.layer) | {
        "V": config.vocab_size,
        "Vd": config.draft_vocab_size,
        "both": 2 * config.layer.hidden_size,
        "F": config.num_taps,
        "tap": config.num_taps,
        "T": config.target_hidden_size,
        "later": config.num_layers - 1,
        "P": 1,
        "Q": 1,
    }


def map_of(found: Found, config: Eagle3Config) -> np.ndarray | None:
    return vocabulary.draft_to_target(
        found.optional(vocabulary.OFFSETS),
        found.optional(vocabulary.MASK),
        config.draft_vocab_size,
        config.vocab_size,
    )


VOCABULARY_KEYS = (
    Ignored(vocabulary.OFFSETS, "read into draft_to_target"),
    Ignored(vocabulary.MASK, "follows from draft_to_target, with which it was compared"),
)

_NAMES = (
    (r"^model\.", ""),
    (r"^midlayer\.", "layers.0."),
    (r"^aux_norm_low\.", "fc_norm.0."),
    (r"^aux_norm_mid\.", "fc_norm.1."),
    (r"^aux_norm_high\.", "fc_norm.2."),
)

EAGLE3 = Format(
    name="eagle3",
    config=Eagle3Config,
    named=lambda found: found.renamed(_NAMES),
    recognises=recognises,
    read_config=read_config,
    rules=rules,
    sizes=sizes,
    ignored=(*IGNORED, *VOCABULARY_KEYS),
    choices=("taps",),
    map_of=map_of,
)

"""Block-drafting checkpoints: DFlash, DFlash 2, JetSpec and DSpark, z-lab's and DeepSpec's."""

from collections.abc import Mapping
from typing import Any

from ckpt_convert.drafters.drafter import Format
from ckpt_convert.drafters.eagle3 import VOCABULARY_KEYS, map_of
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
    size,
    spelled_out,
)
from ckpt_convert.drafters.rules import Rule
from ckpt_convert.drafters.source import Found
from ckpt_convert.errors import ConversionError
from ckpt_convert.families.hf_config import refuse, required
from specjax.models.candidates import ConvolutionConfig
from specjax.models.dflash import ANCHOR_FIRST, FILL_IN, LAYOUTS, DFlashConfig
from specjax.models.markov import GATED, RNN, VANILLA, MarkovConfig

_LAYER = "layers.{layer}."
# Each says, where it is there, that the anchor's slot drafts too.
_ANCHOR_FLAGS = ("sample_from_anchor", "query_zero_predicts_next", "shift_label")
_CONVOLUTION = "layers.0.attention_conv.base_kernel"
_SELECTOR = "candidate_selector.hidden_projection.weight"


def recognises(found: Found) -> bool:
    names = found.tensors
    return "hidden_norm.weight" in names and "layers.0.self_attn.q_proj.weight" in names


def read_config(found: Found) -> DFlashConfig:
    settings = {**found.config, **(found.config.get("dflash_config") or {})}
    refuse(settings, {"projector_type": ("dflash", "dflash2", "dspark", None)})
    layer = layer_config(found, "layers.0.")
    vocab_size = size(settings, "vocab_size")
    draft_vocab_size = size(settings, "draft_vocab_size", vocab_size)
    markov = _markov(found, settings)
    selects = _SELECTOR in found.tensors
    if (markov or selects) and draft_vocab_size != vocab_size:
        raise ConversionError(
            f"a reduced vocabulary ({draft_vocab_size} of {vocab_size} ids) with a head that looks "
            "at the token before is not supported"
        )
    layers = layer_count(settings, found)
    windows = _windows(settings, layers)
    return DFlashConfig(
        vocab_size=vocab_size,
        draft_vocab_size=draft_vocab_size,
        layer=layer,
        num_layers=layers,
        block_size=size(settings, "block_size"),
        layout=_layout(found, settings),
        mask_token_id=mask_token(settings, vocab_size),
        taps=_taps(found, settings),
        target_hidden_size=size(settings, "target_hidden_size", layer.hidden_size),
        windows=windows,
        causal=_causal(found, settings, windows),
        own_embedding=EMBEDDING in found.tensors,
        own_head=HEAD in found.tensors or draft_vocab_size < vocab_size,
        embedding_scale=float(settings.get("input_embedding_scale") or 1.0),
        logit_scale=float(settings.get("output_multiplier") or 1.0),
        logit_softcap=settings.get("final_logit_softcapping") or None,
        markov=markov,
        confidence=flag(settings, "enable_confidence_head"),
        confidence_with_markov=_confidence_with_markov(settings, markov),
        convolution=_convolution(found, settings, layer.hidden_size),
        selector_rank=size(settings, "selector_rank") if selects else 0,
        selector_top_k=size(settings, "selector_top_k") if selects else 0,
    )


def _is_dspark(config: Mapping[str, Any]) -> bool:
    return "DSpark" in _architecture(config) or config.get("markov_rank") is not None


def _architecture(config: Mapping[str, Any]) -> str:
    return (config.get("architectures") or [""])[0]


def _layout(found: Found, settings: Mapping[str, Any]) -> str:
    """As it was chosen, else by flags, else by who wrote the file: DeepSpec's say nothing."""
    chosen = found.choices.layout
    if chosen is not None:
        if chosen not in LAYOUTS:
            raise ConversionError(f"layout {chosen!r} is not known (known: {', '.join(LAYOUTS)})")
        return chosen
    said = {name: bool(settings[name]) for name in _ANCHOR_FLAGS if settings.get(name) is not None}
    if len(set(said.values())) > 1:
        raise ConversionError(
            f"config.json contradicts itself about the block's layout ({said}); choose one with "
            "--layout"
        )
    anchor_first = next(iter(said.values()), _is_dspark(settings))
    return ANCHOR_FIRST if anchor_first else FILL_IN


def _taps(found: Found, settings: Mapping[str, Any]) -> tuple[int, ...]:
    """speculators counts the streams that enter layers; everyone else layers' outputs."""
    depth, chosen = settings.get("num_target_layers"), spelled_out(found.choices.taps)
    if chosen:
        return layer_numbers(chosen, "after-layer", target_layers=depth)
    name = "aux_hidden_state_layer_ids" if found.speculators else "target_layer_ids"
    counted = found.choices.taps or ("hidden-states" if found.speculators else "after-layer")
    return layer_numbers(required(settings, name), counted, target_layers=depth)


def _windows(settings: Mapping[str, Any], layers: int) -> tuple[int | None, ...]:
    if settings.get("use_sliding_window") and not settings.get("layer_types"):
        raise ConversionError(
            "config.json has a sliding window and no layer_types that say where; not supported"
        )
    types = settings.get("layer_types") or ["full_attention"] * layers
    unknown = sorted(set(types) - {"full_attention", "sliding_attention"})
    if unknown or len(types) != layers:
        raise ConversionError(
            f"config.json has layers of type {unknown[0]!r}; not supported"
            if unknown
            else f"config.json types {len(types)} of its {layers} layers"
        )
    return tuple(
        size(settings, "sliding_window") if kind == "sliding_attention" else None for kind in types
    )


def _causal(found: Found, settings: Mapping[str, Any], windows) -> tuple[bool, ...]:
    """Which layers hide a block's later slots: JetSpec's all, most writers' sliding ones."""
    for name in ("causal_head", "is_causal"):
        if settings.get(name) is not None and not found.speculators:
            return (bool(settings[name]),) * len(windows)
    if _is_dspark(settings) and not found.speculators:
        return (False,) * len(windows)
    causal = not flag(settings, "sliding_window_non_causal")
    return tuple(causal and window is not None for window in windows)


def _markov(found: Found, settings: Mapping[str, Any]) -> MarkovConfig | None:
    if not settings.get("markov_rank"):
        return None
    rank = size(settings, "markov_rank")
    kind = str(required(settings, "markov_head_type")).lower()
    if kind not in (VANILLA, GATED, RNN):
        raise ConversionError(
            f"markov_head_type {kind!r} is not supported (supported: {VANILLA}, {GATED}, {RNN})"
        )
    return MarkovConfig(kind, rank)


def _confidence_with_markov(settings: Mapping[str, Any], markov: MarkovConfig | None) -> bool:
    asked = flag(settings, "confidence_head_with_markov")
    if asked and flag(settings, "enable_confidence_head") and markov is None:
        raise ConversionError(
            "config.json sets confidence_head_with_markov, and markov_rank says that there is no "
            "Markov head; fetch the checkpoint's own config.json"
        )
    return asked and markov is not None


def _convolution(found: Found, settings, hidden: int) -> ConvolutionConfig | None:
    if _CONVOLUTION not in found.tensors:
        return None
    config = ConvolutionConfig(
        size(settings, "conv_kernel_size"), size(settings, "conv_group_size")
    )
    if hidden % config.group_size:
        raise ConversionError(
            f"conv_group_size {config.group_size} does not divide the width {hidden}"
        )
    return config


def rules(config: DFlashConfig) -> tuple[Rule, ...]:
    found = [
        Rule("fc.weight", ("fc",), "D (F T) -> (F T) D"),
        Rule("hidden_norm.weight", ("hidden_norm",), "D -> D"),
        *layer_rules(config.layer, _LAYER, ("layers",)),
        Rule("norm.weight", ("norm",), "D -> D"),
    ]
    if config.own_embedding:
        found.append(Rule(EMBEDDING, ("embed",), "V D -> V D"))
    if config.own_head:
        found.append(Rule(HEAD, ("head",), "Vd D -> Vd D"))
    if config.markov:
        found += _markov_rules(config.markov)
    if config.confidence:
        found.append(Rule("confidence_head.proj.weight", ("confidence", "weight"), "P C -> C P"))
        found.append(Rule("confidence_head.proj.bias", ("confidence", "bias"), "P -> P"))
    if config.convolution:
        for name in ("attention_conv", "mlp_conv"):
            at, path = f"{_LAYER}{name}.", ("layers", name)
            projection = f"{at}kernel_projection.weight"
            found.append(Rule(f"{at}base_kernel", (*path, "base"), "two taps D -> two taps D"))
            found.append(Rule(projection, (*path, "projection"), "(two taps M) D -> D two taps M"))
    if config.selector_rank:
        at, path = "candidate_selector.", ("selector",)
        found += [
            Rule(f"{at}predecessor_codebook", (*path, "predecessor"), "V S -> V S"),
            Rule(f"{at}successor_codebook", (*path, "successor"), "V S -> V S"),
            Rule(f"{at}hidden_projection.weight", (*path, "hidden"), "S D -> D S"),
        ]
    return tuple(found)


def _markov_rules(config: MarkovConfig) -> list[Rule]:
    found = [
        Rule("markov_head.markov_w1.weight", ("markov", "token"), "V R -> V R"),
        Rule("markov_head.markov_w2.weight", ("markov", "head"), "V R -> V R"),
    ]
    joint = {GATED: ("gate_proj", "R RD"), RNN: ("joint_proj", "RRR RRD")}.get(config.kind)
    if joint:
        name, (outputs, inputs) = joint[0], joint[1].split()
        found += [
            Rule(
                f"markov_head.{name}.weight",
                ("markov", "joint"),
                f"{outputs} {inputs} -> {inputs} {outputs}",
            ),
            Rule(f"markov_head.{name}.bias", ("markov", "joint_bias"), f"{outputs} -> {outputs}"),
        ]
    return found


def sizes(config: DFlashConfig) -> dict[str, int]:
    width = config.layer.hidden_size
    rank = config.markov.rank if config.markov else 0
    convolution = config.convolution or ConvolutionConfig(0, width)
    return layer_sizes(config.layer) | {
        "V": config.vocab_size,
        "Vd": config.draft_vocab_size,
        "F": len(config.taps),
        "T": config.target_hidden_size,
        "layer": config.num_layers,
        "R": rank,
        "RD": rank + width,
        "RRR": 3 * rank,
        "RRD": 2 * rank + width,
        "P": 1,
        "C": width + rank * config.confidence_with_markov,
        "two": 2,
        "taps": convolution.kernel_size,
        "M": width // convolution.group_size,
        "S": config.selector_rank,
    }


_NAMES = (
    (r"^model\.", ""),
    (r"^(candidate_selector\.\w+_codebook)\.weight$", r"\1"),
)

DFLASH = Format(
    name="dflash",
    config=DFlashConfig,
    named=lambda found: found.renamed(_NAMES),
    recognises=recognises,
    read_config=read_config,
    rules=rules,
    sizes=sizes,
    ignored=(*IGNORED, *VOCABULARY_KEYS),
    choices=("layout", "taps"),
    map_of=map_of,
)

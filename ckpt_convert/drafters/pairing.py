"""Whether a drafter's network and a target fit together, as far as their configurations say."""

from typing import Any

from ckpt_convert.errors import ConversionError
from specjax.models.decoder import DecoderConfig


def refuse_mismatch(config: Any, target: DecoderConfig) -> None:
    """Raise ``ConversionError`` where a drafter's features, taps or mask are not the target's.

    ``config`` is a drafter's, as `ckpt_convert.load_drafter` gives it. Vocabularies may be padded
    to different sizes; which tokens they hold only tokenizers tell.
    """
    layer = getattr(config, "layer", config)
    width = getattr(config, "target_hidden_size", layer.hidden_size)
    if width != target.hidden_size:
        raise ConversionError(
            f"the drafter was trained on a target {width} wide, this one is {target.hidden_size} "
            "wide; take the drafter that was made for this model"
        )
    taps = config.taps_in(target.num_layers) if hasattr(config, "taps_in") else None
    taps = getattr(config, "taps", ()) if taps is None else taps
    if taps and not 0 <= min(taps) <= max(taps) < target.num_layers:
        raise ConversionError(
            f"the drafter taps the layers {', '.join(map(str, taps))} and the target has "
            f"{target.num_layers}; take the drafter that was made for this model"
        )
    mask = getattr(config, "mask_token_id", None)
    if mask is not None and not config.own_embedding and mask >= target.vocab_size:
        raise ConversionError(
            f"the drafter's mask token {mask} has no row among the {target.vocab_size} of the "
            "target's embedding; convert the target with its padded vocabulary"
        )

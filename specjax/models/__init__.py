"""Flax NNX networks, the only home of ``flax.nnx``."""

from specjax.models.decoder import DecoderConfig as DecoderConfig
from specjax.models.decoder import DecoderTarget as DecoderTarget
from specjax.models.rope import Rope as Rope

"""The families that can be converted; a new one is a file and a line here."""

from collections.abc import Mapping
from typing import Any

from ckpt_convert.errors import ConversionError
from ckpt_convert.families.family import IGNORED as IGNORED
from ckpt_convert.families.family import Family as Family
from ckpt_convert.families.llama import LLAMA
from ckpt_convert.families.mistral import MISTRAL
from ckpt_convert.families.qwen2 import QWEN2
from ckpt_convert.families.qwen3 import QWEN3

FAMILIES = (LLAMA, MISTRAL, QWEN2, QWEN3)


def hf_family(config: Mapping[str, Any]) -> Family:
    """Family of a Hugging Face config, by ``architectures[0]``, else by ``model_type``."""
    architecture = (config.get("architectures") or [None])[0]
    if architecture is None:
        by_type = {family.name: family for family in FAMILIES}
        return _known(by_type, config.get("model_type"), "model type")
    by_architecture = {name: family for family in FAMILIES for name in family.architectures}
    return _known(by_architecture, architecture, "architecture")


def gguf_family(architecture: str | None) -> Family:
    """Family of a GGUF file, by ``general.architecture``."""
    by_architecture = {name: family for family in FAMILIES for name in family.gguf_architectures}
    return _known(by_architecture, architecture, "GGUF architecture")


def _known(families: Mapping[str, Family], name: Any, what: str) -> Family:
    if name not in families:
        known = ", ".join(sorted(families))
        raise ConversionError(f"{what} {name!r} is not supported (supported: {known})")
    return families[name]

"""The families that can be converted; a new one is a file and a line here."""

from collections.abc import Mapping
from typing import Any

from ckpt_convert.errors import ConversionError
from ckpt_convert.families.family import IGNORED as IGNORED
from ckpt_convert.families.family import Family as Family
from ckpt_convert.families.gemma2 import GEMMA2
from ckpt_convert.families.gemma3 import GEMMA3
from ckpt_convert.families.gpt2 import GPT2
from ckpt_convert.families.gpt_oss import GPT_OSS
from ckpt_convert.families.llama import LLAMA
from ckpt_convert.families.mistral import MISTRAL
from ckpt_convert.families.mixtral import MIXTRAL
from ckpt_convert.families.olmo2 import OLMO2
from ckpt_convert.families.phi3 import PHI3
from ckpt_convert.families.qwen2 import QWEN2
from ckpt_convert.families.qwen3 import QWEN3
from ckpt_convert.families.qwen3_moe import QWEN3_MOE
from ckpt_convert.families.smollm3 import SMOLLM3

FAMILIES = (
    LLAMA,
    MISTRAL,
    MIXTRAL,
    QWEN2,
    QWEN3,
    QWEN3_MOE,
    GEMMA2,
    GEMMA3,
    PHI3,
    SMOLLM3,
    OLMO2,
    GPT2,
    GPT_OSS,
)


def hf_family(config: Mapping[str, Any]) -> Family:
    """Family of a Hugging Face config, by ``architectures[0]``, else by ``model_type``."""
    named = config.get("architectures") or []
    architecture = next(iter(named if isinstance(named, list) else [named]), None)
    if architecture is None:
        by_type = {
            name: family for family in FAMILIES for name in (family.name, *family.model_types)
        }
        return _known(by_type, config.get("model_type"), "model type")
    by_architecture = {name: family for family in FAMILIES for name in family.architectures}
    return _known(by_architecture, architecture, "architecture")


def gguf_family(architecture: str | None) -> Family:
    """Family of a GGUF file, by ``general.architecture``."""
    by_architecture = {name: family for family in FAMILIES for name in family.gguf_architectures}
    return _known(by_architecture, architecture, "GGUF architecture")


def _known(families: Mapping[str, Family], name: Any, what: str) -> Family:
    if not isinstance(name, str) or name not in families:
        known = ", ".join(sorted(families))
        raise ConversionError(f"{what} {name!r} is not supported (supported: {known})")
    return families[name]

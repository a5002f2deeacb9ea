"""specjax: speculative decoding in JAX and Flax that leaves the output's law untouched.

``LLM`` turns text into text; ``generate`` works on arrays and inside a caller's ``jit``.
"""

import importlib
from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from specjax.checkpoint import Model as Model
    from specjax.checkpoint import load as load
    from specjax.generation import generate as generate
    from specjax.llm import LLM as LLM
    from specjax.recompute import Recompute as Recompute
    from specjax.sampling import Sampling as Sampling
    from specjax.sampling_params import SamplingParams as SamplingParams

_HOME = {
    "LLM": "specjax.llm",
    "Model": "specjax.checkpoint",
    "Recompute": "specjax.recompute",
    "Sampling": "specjax.sampling",
    "SamplingParams": "specjax.sampling_params",
    "generate": "specjax.generation",
    "load": "specjax.checkpoint",
}
__all__ = sorted(_HOME)


def __getattr__(name):
    if name not in _HOME:
        raise AttributeError(f"module 'specjax' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__():
    return sorted([*globals(), *_HOME])

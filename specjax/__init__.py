"""specjax: speculative decoding in JAX and Flax that leaves the output's law untouched.

``LLM`` turns text into text; ``generate`` works on arrays and inside a caller's ``jit``.
"""

import importlib
import sys
import types
from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from specjax.checkpoint import Model as Model
    from specjax.checkpoint import load as load
    from specjax.generate import generate as generate
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
    "generate": "specjax.generate",
    "load": "specjax.checkpoint",
}
__all__ = sorted(_HOME)


class _Package(types.ModuleType):
    """Python would put a submodule where the function of its name is: `specjax.generate`."""

    def __setattr__(self, name, value):
        if name not in _HOME or not isinstance(value, types.ModuleType):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def __getattr__(name):
    if name not in _HOME:
        raise AttributeError(f"module 'specjax' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__():
    return sorted([*globals(), *_HOME])

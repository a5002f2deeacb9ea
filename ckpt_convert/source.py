"""What a reader of checkpoints offers to inspection and conversion, whatever the format."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from ckpt_convert.families.family import Family
from ckpt_convert.tensors import Ignored, TensorInfo, TensorRule
from specjax.models.decoder import DecoderConfig


class Source(Protocol):
    """A checkpoint of another format, opened: no tensor has been read yet.

    Its constructor raises ``ConversionError`` for what cannot be opened or mapped at all.
    """

    @property
    def family(self) -> Family: ...
    @property
    def config(self) -> DecoderConfig: ...
    @property
    def tensors(self) -> Mapping[str, TensorInfo]: ...
    @property
    def rules(self) -> tuple[TensorRule, ...]: ...
    @property
    def ignored(self) -> tuple[Ignored, ...]: ...
    @property
    def eos_ids(self) -> tuple[int, ...]: ...
    @property
    def bos_id(self) -> int | None: ...
    @property
    def generation(self) -> Mapping[str, Any]: ...

    @property
    def dtype(self) -> np.dtype:
        """The type that holds the matrices as the source has them."""
        ...

    @property
    def files(self) -> list[Path]:
        """What the source's digest is taken of."""
        ...

    def fault_of(self, name: str) -> str | None:
        """Why this tensor cannot be read, known before it is; None where it can."""
        ...

    def read(self, name: str, rows: slice | None = None) -> np.ndarray:
        """The tensor's values, dequantised where they were quantised; of some ``rows`` only."""
        ...

    def tokenizer_files(self) -> dict[str, bytes]:
        """The tokenizer's files by name, empty where there is none."""
        ...

    def original_files(self) -> dict[str, bytes]:
        """Configurations to keep as they were, so that an export can write them back."""
        ...

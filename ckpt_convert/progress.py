"""The one progress bar of conversion and export."""

from collections.abc import Iterable, Iterator
from typing import TypeVar

Item = TypeVar("Item")


def progress(items: Iterable[Item], total: int, doing: str, unit: str) -> Iterator[Item]:
    """``items``, with a bar on a terminal's or a notebook's stderr after two seconds."""
    from tqdm.auto import tqdm

    yield from tqdm(items, total=total, desc=doing, unit=unit, delay=2.0, disable=None)

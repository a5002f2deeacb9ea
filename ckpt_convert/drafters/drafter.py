"""What a format of drafters is: how it is told from others, its configuration and its tensors."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ckpt_convert.drafters.rules import Rule
from ckpt_convert.drafters.source import Found
from ckpt_convert.tensors import Ignored


@dataclass(frozen=True)
class Format:
    """One format: the names it goes by and everything that is read with it.

    ``named`` gives the tensors the names of the rules, and ``recognises`` is asked after it.
    ``read_config`` refuses by name what the network cannot do. ``choices`` names the fields of
    `Choices` that matter here. ``map_of`` gives the target's ids of a reduced draft vocabulary,
    from a format that has them.
    """

    name: str
    config: type
    named: Callable[[Found], Found]
    recognises: Callable[[Found], bool]
    read_config: Callable[[Found], Any]
    rules: Callable[[Any], tuple[Rule, ...]]
    sizes: Callable[[Any], Mapping[str, int]]
    ignored: tuple[Ignored, ...] = ()
    choices: tuple[str, ...] = ()
    map_of: Callable[[Found, Any], Any] | None = None

"""The type checker behind jaxtyping's import hook: beartype, taught what this package annotates."""

import typing
from collections.abc import Callable, Iterator
from typing import Any, Self

from beartype import BeartypeConf, FrozenDict, beartype

# jaxtyping decorates methods one by one, where beartype cannot know which class Self names.
_beartype = beartype(conf=BeartypeConf(hint_overrides=FrozenDict({Self: Any})))


def checked(function: Callable) -> Callable:
    """``function``, raising where an argument or its result is not what its annotation says."""
    for hint in function.__annotations__.values():
        for protocol in _protocols(hint):
            # Only the tests ask whether a value satisfies a protocol.
            typing.runtime_checkable(protocol)
    return _beartype(function)


def _protocols(hint: Any) -> Iterator[type]:
    if getattr(hint, "_is_protocol", False):
        yield hint
    for argument in typing.get_args(hint):
        yield from _protocols(argument)

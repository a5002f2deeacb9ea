"""What the numbers among a model's settings must be, told before anything compiles."""

import dataclasses
import math
import typing
from numbers import Integral, Real
from typing import Any


def check_numbers(settings: Any) -> None:
    """Raises ValueError naming the first number of a dataclass that is not above 0.

    By the fields' types: int and float, also in tuples, and None where a field may be it.
    """
    for field in dataclasses.fields(settings):
        _check(field.name, field.type, getattr(settings, field.name))


def _check(name: str, kind: Any, value: Any) -> None:
    kinds = typing.get_args(kind) or (kind,)
    if typing.get_origin(kind) is tuple:
        for one in value:
            _check(name, kinds[0], one)
    elif value is None and type(None) in kinds:
        return
    elif int in kinds and not _is_above_0(value, Integral):
        raise ValueError(f"{name}: {value!r} is no whole number above 0")
    elif float in kinds and not _is_above_0(value, Real):
        raise ValueError(f"{name}: {value!r} is no number above 0")


def _is_above_0(value: Any, kind: type) -> bool:
    is_number = isinstance(value, kind) and not isinstance(value, bool)
    return is_number and bool(0 < value < math.inf)  # NumPy's are another kind of bool

"""Integers between two bounds as a regular expression over their decimal digits."""

from collections.abc import Iterable


def integer_range(low: int | None, high: int | None) -> str:
    """A regex of the integers from ``low`` to ``high``, both included; None is no bound."""
    parts = []
    if low is None or low < 0:
        nearest = 1 if high is None or high >= 0 else -high
        parts.append("-" + _magnitudes(nearest, None if low is None else -low))
    if high is None or high >= 0:
        parts.append(_magnitudes(max(low or 0, 0), high))
    return _either(parts)


def _magnitudes(low: int, high: int | None) -> str:
    """Numbers from ``low`` up, one number of digits after the other."""
    digits = len(str(low))
    if high is None:
        return _either([_digits(str(low), "9" * digits), f"[1-9][0-9]{{{digits},}}"])
    lengths = range(digits, len(str(high)) + 1)
    smallest = {size: max(low, 10 ** (size - 1) if size > 1 else 0) for size in lengths}
    return _either(_digits(str(smallest[size]), str(min(high, 10**size - 1))) for size in lengths)


def _digits(low: str, high: str) -> str:
    """Numbers between two of the same number of digits."""
    if low == "0" * len(low) and high == "9" * len(low):
        return f"[0-9]{{{len(low)}}}" if low else ""
    if low[0] == high[0]:
        return low[0] + _digits(low[1:], high[1:])
    rest = len(low) - 1
    parts = [low[0] + _digits(low[1:], "9" * rest)]
    if int(high[0]) - int(low[0]) > 1:
        parts.append(f"[{int(low[0]) + 1}-{int(high[0]) - 1}][0-9]{{{rest}}}")
    parts.append(high[0] + _digits("0" * rest, high[1:]))
    return _either(parts)


def _either(parts: Iterable[str]) -> str:
    return f"(?:{'|'.join(parts)})"

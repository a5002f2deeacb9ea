"""JSON schemas as regular expressions.

Only what a finite automaton can hold exactly: a keyword that would be ignored is refused. The
texts are a subset of the valid ones: properties come in the schema's order, none that the schema
doesn't name, with at most one space after a comma or a colon.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from specjax.byte_automaton import byte_automaton
from specjax.integer_range import integer_range

# Escapes with \u are left out: what they stand for can be written as it is.
_CHARACTER = r'(?:[^"\\\x00-\x1f]|\\["\\/bfnrt])'
_NUMBER = r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]{1,2})?"
_COMMA, _COLON = ",[ ]?", ":[ ]?"

_YEAR = r"[1-9][0-9]{3}"
_DATE = (
    rf"{_YEAR}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])"
    r"|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8]))"
)
_NAME = "[A-Za-z0-9]+"
_CLOCK = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = rf"{_CLOCK}:[0-5][0-9](?:\.[0-9]{{1,6}})?(?:Z|[+-]{_CLOCK})"
FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "uuid": r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}",
    "email": rf"{_NAME}(?:[._%+-]{_NAME})*@{_NAME}(?:[.-]{_NAME})*\.[A-Za-z]{{2,63}}",
}

# What describes a schema and constrains nothing.
_NOTES = frozenset(
    "$schema $id $comment $defs definitions title description default examples deprecated readOnly "
    "writeOnly".split()
)
_CALLED = {str: "a string", Sequence: "a list", Mapping: "an object"}
# The keywords that each type understands.
_KEYWORDS = {
    "string": ("minLength", "maxLength", "pattern", "format"),
    "integer": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"),
    "number": (),
    "boolean": (),
    "null": (),
    "array": ("items", "prefixItems", "minItems", "maxItems", "uniqueItems"),
    "object": ("properties", "required", "additionalProperties"),
}


def json_schema_regex(schema: str | Mapping[str, Any] | type) -> str:
    """A regex whose texts are valid JSON under ``schema``: a dict, its JSON, or a pydantic model.

    Understood are ``type``, ``enum``, ``const``, ``anyOf``, references within the schema, and of
    each type: lengths, an anchored ``pattern`` or a ``format`` of strings; bounds of integers;
    items and their number; properties, ``required``, ``additionalProperties``. Raises ValueError
    naming the place and the keyword for anything else, and for a schema that refers to itself.
    """
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except ValueError as fault:
            raise ValueError(f"the schema is no JSON: {fault}") from None
    elif isinstance(schema, type) and hasattr(schema, "model_json_schema"):
        schema = schema.model_json_schema()
    return _Place(schema, schema, "$").regex()


class _Place:
    """One subschema: its value, where it stands, and the references that led there."""

    def __init__(self, root: Any, value: Any, at: str, references: tuple[str, ...] = ()):
        self.root, self.value, self.at, self.references = root, value, at, references

    def regex(self) -> str:
        if not isinstance(self.value, Mapping):
            raise self.fault(f"is {json.dumps(self.value, default=str)}: a schema is an object")
        for keyword, translate in _COMBINATIONS.items():
            if keyword in self.value:
                return translate(self)
        types = self.types()
        self.only("type", *(word for one in types for word in _KEYWORDS[one]))
        return _either(_TYPES[one](self) for one in types)

    def below(self, *steps: str | int) -> "_Place":
        value = self.value
        for step in steps:
            value = value[step]
        return _Place(self.root, value, ".".join([self.at, *map(str, steps)]), self.references)

    def types(self) -> Sequence[str]:
        if self.value.get("type") is None:
            given = [one for one, words in _KEYWORDS.items() if set(words) & set(self.value)]
            if len(given) != 1:
                raise self.fault(self.untyped())
            return given
        given = self.value["type"]
        given = [given] if isinstance(given, str) else self.some("type")
        unknown = [one for one in given if one not in [*_KEYWORDS]]
        if unknown:
            raise self.fault(f"has the unknown type {unknown[0]!r}; known: {', '.join(_KEYWORDS)}")
        return given

    def untyped(self) -> str:
        """What is wrong with a schema that names no type: a misspelt keyword, or nothing said."""
        known = {"type", *_NOTES}.union(*_KEYWORDS.values())
        strange = next((word for word in self.value if word not in known), None)
        if strange is not None:
            return f"has {strange!r}, which is not supported: give it a 'type' in its place"
        return "says too little of the value: give it a type"

    def part(self, keyword: str, kind: type, default: Any = None) -> Any:
        """What a keyword says, if it is a string, a list or an object, as it must be."""
        value = self.value.get(keyword, default)
        if not isinstance(value, kind) or (isinstance(value, str) and kind is not str):
            raise self.fault(f"has {keyword} {value!r}: it must be {_CALLED[kind]}")
        return value

    def some(self, keyword: str) -> Sequence[Any]:
        value = self.part(keyword, Sequence)
        if not value:
            raise self.fault(f"has {keyword} without an entry: nothing could be written, add one")
        return value

    def only(self, *keywords: str) -> None:
        others = [word for word in self.value if word not in keywords and word not in _NOTES]
        if others:
            beside = f" beside {', '.join(keywords)}" if keywords else ""
            raise self.fault(f"has {others[0]!r}, which is not supported{beside}: leave it out")

    def counts(self, at_least: str, at_most: str) -> tuple[int, int | None]:
        """The two bounds of a number of things: 0 and None are no bounds."""
        low, high = self._count(at_least) or 0, self._count(at_most)
        if high is not None and low > high:
            raise self.nothing_between(at_least, at_most)
        return low, high

    def _count(self, keyword: str) -> int | None:
        value = self.value.get(keyword)
        whole = isinstance(value, int) and not isinstance(value, bool) and value >= 0
        if value is not None and not whole:
            raise self.fault(f"has {keyword} {value!r}: it must be a whole number")
        return value

    def nothing_between(self, *keywords: str) -> ValueError:
        given = [
            f"{word} {self.value[word]}" for word in keywords if self.value.get(word) is not None
        ]
        return self.fault(f"has {' and '.join(given)}: nothing lies between, widen them")

    def fault(self, what: str) -> ValueError:
        return ValueError(f"the schema at {self.at} {what}")


def _reference(place: _Place) -> str:
    place.only("$ref")
    pointer = place.value["$ref"]
    if pointer in place.references:
        raise place.fault(f"refers to itself by {pointer!r}: its texts nest without end")
    base, _, path = str(pointer).partition("#")
    if base:
        raise place.fault(f"refers to {pointer!r}: only '#/...', within the schema, is followed")
    value = place.root
    try:
        for step in path.split("/")[1:]:
            value = value[step.replace("~1", "/").replace("~0", "~")]
    except (KeyError, TypeError):
        raise place.fault(f"refers to {pointer!r}, which is not there") from None
    return _Place(place.root, value, pointer, (*place.references, pointer)).regex()


def _any_of(place: _Place) -> str:
    place.only("anyOf")
    return _either(place.below("anyOf", index).regex() for index in range(len(place.some("anyOf"))))


def _all_of(place: _Place) -> str:
    place.only("allOf")
    if len(place.some("allOf")) != 1:
        raise place.fault("has 'allOf' of several schemas: merge them into one")
    return place.below("allOf", 0).regex()


def _one_of(place: _Place) -> str:
    raise place.fault("has 'oneOf', which is not supported: use 'anyOf'")


def _enum(place: _Place) -> str:
    place.only("type", "enum")
    return _literals(place, place.some("enum"))


def _const(place: _Place) -> str:
    place.only("type", "const")
    return _literals(place, [place.value["const"]])


_COMBINATIONS: dict[str, Callable[[_Place], str]] = {
    "$ref": _reference,
    "anyOf": _any_of,
    "allOf": _all_of,
    "oneOf": _one_of,
    "enum": _enum,
    "const": _const,
}


def _literals(place: _Place, values: Sequence[Any]) -> str:
    types = place.types() if "type" in place.value else [*_KEYWORDS]
    fitting = [value for value in values if any(_is(value, one) for one in types)]
    if not fitting:
        raise place.fault(f"lists no value of type {' or '.join(types)}")
    return _either(re.escape(_written(place, value)) for value in fitting)


def _written(place: _Place, value: Any) -> str:
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        text.encode()  # refuses half a surrogate pair
        return text
    except (TypeError, ValueError):
        raise place.fault(f"lists {value!r}, which JSON cannot write: leave it out") from None


def _is(value: Any, kind: str) -> bool:
    if isinstance(value, bool) or value is None:
        return kind == ("null" if value is None else "boolean")
    if kind == "integer":
        return isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    classes = {"string": str, "number": int | float, "array": list, "object": Mapping}
    return kind in classes and isinstance(value, classes[kind])


def _string(place: _Place) -> str:
    low, high = place.counts("minLength", "maxLength")
    kinds = [word for word in ("pattern", "format") if word in place.value]
    if len(kinds) == 2 or (kinds and (low or high is not None)):
        raise place.fault(f"has {kinds[0]!r} beside another limit: say it all in one 'pattern'")
    if "pattern" in place.value:
        return f'"(?:{_pattern(place)})"'
    if "format" in place.value:
        kind = place.part("format", str)
        if kind not in FORMATS:
            raise place.fault(f"has the format {kind!r}; known: {', '.join(FORMATS)}")
        return f'"{FORMATS[kind]}"'
    return f'"{_CHARACTER}{_repeated(low, high)}"'


def _pattern(place: _Place) -> str:
    pattern = place.part("pattern", str)
    if not (pattern.startswith("^") and pattern.endswith("$")):
        raise place.fault(f"has the pattern {pattern!r}: begin it with ^ and end it with $")
    escaped = [*range(0x20), ord('"'), ord("\\")]
    if (byte_automaton(pattern).next_state[:, escaped] >= 0).any():
        raise place.fault(
            f"has the pattern {pattern!r}, which matches quotes, backslashes or control "
            r"characters: exclude them, as [^\"\\\x00-\x1f] does"
        )
    return pattern[1:-1]


def _integer(place: _Place) -> str:
    lows = [place.value.get("minimum"), place.value.get("exclusiveMinimum")]
    highs = [place.value.get("maximum"), place.value.get("exclusiveMaximum")]
    for bound in (*lows, *highs):
        if bound is not None and not (_is(bound, "integer")):
            raise place.fault(f"has the bound {bound!r} of integers: it must be an integer")
    low = max((int(one) + add for add, one in enumerate(lows) if one is not None), default=None)
    high = min((int(one) - add for add, one in enumerate(highs) if one is not None), default=None)
    if low is not None and high is not None and low > high:
        raise place.nothing_between(*_KEYWORDS["integer"])
    return integer_range(low, high)


def _array(place: _Place) -> str:
    if place.value.get("uniqueItems"):
        raise place.fault("has 'uniqueItems', which no finite automaton can count")
    low, high = place.counts("minItems", "maxItems")
    if "prefixItems" in place.value:
        size = len(place.part("prefixItems", Sequence))
        if low > size or (high is not None and high < size):
            raise place.fault(f"has {size} prefixItems: only arrays of just these are written")
        items = (place.below("prefixItems", index).regex() for index in range(size))
        return rf"\[{_COMMA.join(items)}\]"
    if high == 0:
        return r"\[\]"
    if not isinstance(place.value.get("items"), Mapping):
        raise place.fault("is an array without 'items': say what it holds")
    return rf"\[{_listed(place.below('items').regex(), low, high)}\]"


def _object(place: _Place) -> str:
    properties = place.part("properties", Mapping, {})
    required = place.part("required", Sequence, [])
    absent = [name for name in required if name not in properties]
    if absent:
        raise place.fault(f"requires {absent[0]!r}, which is not among its properties")
    if not properties:
        if not isinstance(place.value.get("additionalProperties"), Mapping):
            raise place.fault("is an object without 'properties': say what it holds")
        value = place.below("additionalProperties").regex()
        member = f'"{_CHARACTER}*"{_COLON}{value}'
        return rf"\{{{_listed(member, 0, None)}\}}"
    members = [
        re.escape(_written(place, name)) + _COLON + place.below("properties", name).regex()
        for name in properties
    ]
    return rf"\{{{_chosen(members, [name in required for name in properties])}\}}"


def _chosen(members: Sequence[str], required: Sequence[bool]) -> str:
    """All required members and any of the others, in order, with commas between those present."""
    if any(required):
        first = required.index(True)
        before = "".join(f"(?:{one}{_COMMA})?" for one in members[:first])
        after = zip(members[first + 1 :], required[first + 1 :], strict=True)
        return before + members[first] + "".join(_then(*one) for one in after)
    after = [[_then(one, False) for one in members[begin + 1 :]] for begin in range(len(members))]
    return _either("".join([one, *rest]) for one, rest in zip(members, after, strict=True)) + "?"


def _then(member: str, required: bool) -> str:
    return f"(?:{_COMMA}{member}){'' if required else '?'}"


def _listed(item: str, low: int, high: int | None) -> str:
    more = _repeated(max(low - 1, 0), None if high is None else high - 1)
    whole = f"{item}(?:{_COMMA}{item}){more}"
    return whole if low else f"(?:{whole})?"


def _repeated(low: int, high: int | None) -> str:
    return f"{{{low},{'' if high is None else high}}}"


def _either(parts: Iterable[str]) -> str:
    return f"(?:{'|'.join(parts)})"


_TYPES: dict[str, Callable[[_Place], str]] = {
    "string": _string,
    "integer": _integer,
    "number": lambda place: _NUMBER,
    "boolean": lambda place: "(?:true|false)",
    "null": lambda place: "null",
    "array": _array,
    "object": _object,
}

"""JSON schemas: every text that the grammar allows parses and is valid; the rest is refused."""

import functools
import json
import math
import re

import jsonschema
import numpy as np
import pydantic
import pytest
from test_grammar import Walker, walk
from tiny_tokenizers import byte_level

from specjax.grammar import compile_json_schema
from specjax.integer_range import integer_range
from specjax.json_schema import json_schema_regex
from specjax.token_bytes import token_bytes

WHOLE = {
    "title": "Person",
    "description": "someone",
    "type": "object",
    "properties": {
        "first name": {"type": "string", "minLength": 1, "maxLength": 9},
        "age": {"type": "integer", "minimum": 0, "exclusiveMaximum": 130},
        "height": {"type": ["number", "null"]},
        "role": {"enum": ["user", 'the "boss"', 3, None, [1, "x"]]},
        "kind": {"const": "person"},
        "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 3},
        "home": {"$ref": "#/$defs/address"},
        "work": {"anyOf": [{"$ref": "#/$defs/address"}, {"type": "null"}]},
        "born": {"type": "string", "format": "date"},
        "code": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"},
        "point": {"prefixItems": [{"type": "number"}, {"type": "boolean"}], "minItems": 2},
        "more": {"type": "object", "additionalProperties": {"type": "integer", "maximum": -5}},
    },
    "required": ["age", "role", "home"],
    "additionalProperties": False,
    "$defs": {
        "address": {
            "type": "object",
            "properties": {"città": {"type": "string"}, "n°": {"allOf": [{"type": "integer"}]}},
        }
    },
}
SMALL = {
    "string": {"type": "string"},
    "lengths": {"type": "string", "minLength": 3, "maxLength": 5},
    "number": {"type": "number"},
    "enum": {"enum": ["Łódź", "a\nb", 1.5, {"k": [True, None]}]},
    "typed enum": {"type": "string", "enum": ["a", 1, "b"]},
    "optional": {"properties": {name: {"type": "boolean"} for name in "abc"}},
    "later required": {"properties": {name: {"type": "null"} for name in "abc"}, "required": ["b"]},
    "empty list": {"type": "array", "maxItems": 0},
    "list": {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 4},
    "mapping": {"type": "object", "additionalProperties": {"type": "null"}},
    "date-time": {"type": "string", "format": "date-time"},
    "time": {"type": "string", "format": "time"},
    "uuid": {"type": "string", "format": "uuid"},
    "email": {"type": "string", "format": "email"},
    "everything": WHOLE,
}
WALKS = 25


@functools.cache
def vocabulary():
    tokenizer = byte_level()
    return tokenizer, token_bytes(tokenizer)


def spoken(schema, walks: int = WALKS):
    """Texts of random walks through a schema's grammar."""
    tokenizer, pieces = vocabulary()
    walker = Walker(compile_json_schema(schema, tokenizer, [tokenizer.eos_id]))
    rng = np.random.default_rng(0)
    for steps in range(walks):
        *ids, _ = walk(walker, rng, 2 * steps)
        yield b"".join(pieces[id] for id in ids).decode()


@pytest.mark.parametrize("name", SMALL)
def test_what_comes_parses_and_is_valid(name):
    validator = jsonschema.Draft202012Validator(
        SMALL[name], format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER
    )
    texts = list(spoken(SMALL[name]))
    for text in texts:
        validator.validate(json.loads(text))
    assert len(set(texts)) > (name != "empty list")


def test_a_validator_would_see_a_fault():
    looser = {**WHOLE, "required": ["age"]}
    validator = jsonschema.Draft202012Validator(WHOLE)
    assert not all(validator.is_valid(json.loads(text)) for text in spoken(looser))


@pytest.mark.parametrize("name", SMALL)
def test_ordinary_json_is_among_what_may_come(name):
    """`json.dumps` of values that walks came to, with its spaces and without."""
    regex = re.compile(json_schema_regex(SMALL[name]))
    for text in spoken(SMALL[name], 10):
        value = json.loads(text)
        if "e" in text and "num" in name:
            continue  # another spelling of the same number
        assert regex.fullmatch(text)
        for separators in ((", ", ": "), (",", ":")):
            assert regex.fullmatch(json.dumps(value, ensure_ascii=False, separators=separators))


def test_json_text_and_pydantic_models_are_schemas_too():
    assert json_schema_regex(json.dumps(WHOLE)) == json_schema_regex(WHOLE)

    class Pet(pydantic.BaseModel):
        name: str
        legs: int = pydantic.Field(ge=0, le=8)
        friends: list[str] = []

    for text in spoken(Pet):
        Pet.model_validate_json(text)


BOUNDS = [None, -1000, -101, -10, -9, -1, 0, 1, 7, 9, 10, 19, 99, 100, 101, 120, 999, 1005]


def test_integers_between_bounds():
    values = [*range(-1200, 1200), -(10**9), 10**9]
    for low in BOUNDS:
        for high in BOUNDS:
            if low is not None and high is not None and low > high:
                continue
            regex = re.compile(integer_range(low, high))
            inside = [
                value
                for value in values
                if (low is None or value >= low) and (high is None or value <= high)
            ]
            assert [value for value in values if regex.fullmatch(str(value))] == inside
            assert not any(map(regex.fullmatch, ("", "-", "-0", "00", "07", "+1", "1.0")))


LISTS = {"type": "array"}
REFUSED = {
    "$.properties.a": ({"properties": {"a": {"type": "number", "minimum": 0}}}, "'minimum'"),
    "multiple": ({"type": "integer", "multipleOf": 2}, "'multipleOf'"),
    "one of": ({"oneOf": [{"type": "null"}]}, "use 'anyOf'"),
    "all of": ({"allOf": [{"type": "null"}, {"type": "string"}]}, "merge them"),
    "beside": ({"anyOf": [{"type": "null"}], "type": "null"}, "'type', which is not supported"),
    "anything": ({}, "give it a type"),
    "true": ({"anyOf": [True]}, "is true: a schema is an object"),
    "type": ({"type": "str"}, "unknown type 'str'"),
    "names": ({"type": "object", "propertyNames": {}}, "'propertyNames'"),
    "no items": (LISTS, "without 'items'"),
    "no properties": ({"type": "object"}, "without 'properties'"),
    "absent": ({"properties": {"a": {"type": "null"}}, "required": ["b"]}, "requires 'b'"),
    "unique": (LISTS | {"items": {"type": "null"}, "uniqueItems": True}, "'uniqueItems'"),
    "prefix": ({"prefixItems": [{"type": "null"}], "minItems": 2}, "1 prefixItems"),
    "many": (
        LISTS | {"items": {"type": "null"}, "minItems": 3, "maxItems": 2},
        "minItems 3 and maxItems 2",
    ),
    "long": ({"type": "string", "minLength": 2, "maxLength": 1}, "minLength 2 and maxLength 1"),
    "bounds": ({"type": "integer", "minimum": 3, "maximum": 2}, "minimum 3 and maximum 2"),
    "open bounds": (
        {"type": "integer", "exclusiveMinimum": 2, "exclusiveMaximum": 3},
        "exclusiveMinimum 2 and exclusiveMaximum 3: nothing lies between",
    ),
    "not": ({"not": {}}, "has 'not', which is not supported: give it a 'type'"),
    "misspelt": ({"typ": "string"}, "has 'typ', which is not supported: give it a 'type'"),
    "nan": ({"const": math.nan}, "lists nan, which JSON cannot write"),
    "infinity": ({"enum": [1, -math.inf]}, "lists -inf, which JSON cannot write"),
    "deep": ({"const": [{"a": math.nan}]}, "which JSON cannot write"),
    "text of nan": ('{"const": NaN}', "lists nan, which JSON cannot write"),
    "half a pair": ({"const": "\ud800"}, r"lists '\ud800', which JSON cannot write"),
    "true length": ({"type": "string", "minLength": True}, "minLength True: it must be a whole"),
    "numbered type": ({"type": 5}, "has type 5: it must be a list"),
    "type of types": ({"type": [["null"]]}, "unknown type ['null']"),
    "no type": ({"type": []}, "has type without an entry"),
    "no choice": ({"anyOf": []}, "has anyOf without an entry"),
    "one choice": ({"anyOf": {"type": "null"}}, "it must be a list"),
    "text as enum": ({"enum": "ab"}, "has enum 'ab': it must be a list"),
    "all": ({"allOf": 5}, "has allOf 5: it must be a list"),
    "numbers": ({"prefixItems": 5}, "has prefixItems 5: it must be a list"),
    "listed": ({"properties": ["a"]}, "has properties ['a']: it must be an object"),
    "required": ({"properties": {}, "required": "a"}, "has required 'a': it must be a list"),
    "numbered pattern": ({"type": "string", "pattern": 5}, "pattern 5: it must be a string"),
    "numbered format": ({"type": "string", "format": [5]}, "format [5]: it must be a string"),
    "fraction": ({"type": "integer", "minimum": 0.5}, "bound 0.5"),
    "length": ({"type": "string", "minLength": -1}, "minLength -1"),
    "format": ({"type": "string", "format": "ipv4"}, "'ipv4'; known: date"),
    "search": ({"type": "string", "pattern": "abc"}, "begin it with"),
    "quotes": ({"type": "string", "pattern": "^.*$"}, "quotes, backslashes"),
    "two limits": ({"type": "string", "pattern": "^a$", "maxLength": 3}, "beside another limit"),
    "no value": ({"type": "string", "enum": [1, 2]}, "no value of type string"),
    "elsewhere": ({"$ref": "other.json#/a"}, "within the schema"),
    "nowhere": ({"$ref": "#/$defs/a"}, "not there"),
    "itself": ({"type": "array", "items": {"$ref": "#"}}, "refers to itself"),
    "text": ("{", "is no JSON"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_be_ignored_is_refused(name):
    schema, fault = REFUSED[name]
    with pytest.raises(ValueError, match=re.escape(fault)) as raised:
        json_schema_regex(schema)
    assert name in str(raised.value) or not name.startswith("$")

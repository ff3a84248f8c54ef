"""JSON schemas with finitely many answers, drawn from a seed: of the kinds in the JSON Schema Test Suite."""

from __future__ import annotations

import random
from typing import Any

# Each rule may be empty, so each may come first.
COSTLY = "start: " + " ".join(f"r{i}" for i in range(2000)) + "".join(f'\nr{i}: "a"*' for i in range(2000))
_WORDS = ["name", "größe", "a b", 'quo"te', "back\\slash", "emoji 🦆", "tab\t", "x", "id", "中文", "ключ"]


def schema(seed: int) -> dict[str, Any]:
    """An object or an array at the top, as callers ask for."""
    rng = random.Random(seed)
    return [_object, _array, _composed, _reference, _object, _recursive][seed % 6](rng, 3)


def _any(rng: random.Random, depth: int) -> dict[str, Any]:
    kinds = [_integer, _boolean, _enum, _const, _string, _null, _number, _pattern, _format]
    if depth > 0:
        kinds += [_object, _array, _either, _tuple] * 2 + [_composed, _exclusive, _map, _dependent, _counted]
    return rng.choice(kinds)(rng, depth)


def _integer(rng: random.Random, depth: int) -> dict[str, Any]:
    low = rng.randint(-1000, 1000)
    bounds = {"minimum": low, "maximum": low + rng.randint(0, 5000)}
    if rng.random() < 0.2:
        return {"type": "integer", "minimum": low, "maximum": low + 500, "multipleOf": rng.choice([2, 5, 30])}
    if rng.random() < 0.3:
        bounds = {"exclusiveMinimum": low, "exclusiveMaximum": low + rng.randint(2, 99)}
    return {"type": "integer", **bounds}


def _number(rng: random.Random, depth: int) -> dict[str, Any]:
    low = rng.randint(-100, 100)
    return {"type": "number", "minimum": low, "maximum": low + rng.choice([1, 10, 1000])}


def _boolean(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"type": "boolean"}


def _null(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"type": "null"}


def _enum(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"enum": rng.sample([*_WORDS, 1, 2.5, None, True, "", [], {"a": [1]}, "1"], rng.randint(1, 5))}


def _const(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"const": rng.choice([*_WORDS, 0, -1.5, False, [1, "2"], {"k": None}])}


def _string(rng: random.Random, depth: int) -> dict[str, Any]:
    low = rng.randint(0, 4)
    return {"type": "string", "minLength": low, "maxLength": low + rng.randint(0, 8)}


def _pattern(rng: random.Random, depth: int) -> dict[str, Any]:
    return {
        "type": "string",
        "pattern": rng.choice(["^[a-z]{1,5}$", "^(ja|nein)$", r"^\d{3}-\d{2}$", "^[äöü]{2}$"]),
    }


def _format(rng: random.Random, depth: int) -> dict[str, Any]:
    formats = ["date", "time", "date-time", "duration", "uuid", "ipv4", "ipv6", "email", "int32", "binary"]
    return {"type": "string", "format": rng.choice(formats), "maxLength": 60}


def _object(rng: random.Random, depth: int) -> dict[str, Any]:
    names = rng.sample(_WORDS, rng.randint(0, 4))
    return {
        "type": "object",
        "properties": {name: _any(rng, depth - 1) for name in names},
        "required": rng.sample(names, rng.randint(0, len(names))),
        "additionalProperties": False,
    }


def _array(rng: random.Random, depth: int) -> dict[str, Any]:
    low = rng.randint(0, 2)
    return {
        "type": "array",
        "items": _any(rng, depth - 1),
        "minItems": low,
        "maxItems": low + rng.randint(0, 3),
    }


def _tuple(rng: random.Random, depth: int) -> dict[str, Any]:
    items = [_any(rng, depth - 1) for _ in range(rng.randint(1, 3))]
    return {"type": "array", "prefixItems": items, "items": False, "minItems": len(items)}


def _either(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"anyOf": [_any(rng, depth - 1) for _ in range(rng.randint(1, 3))]}


def _reference(rng: random.Random, depth: int) -> dict[str, Any]:
    """One definition, used twice."""
    return {
        "type": "object",
        "$defs": {"one": _any(rng, 0)},
        "properties": {"a": {"$ref": "#/$defs/one"}, "b": {"$ref": "#/$defs/one"}},
        "required": ["a"],
        "additionalProperties": False,
    }


def _composed(rng: random.Random, depth: int) -> dict[str, Any]:
    """Parts that must hold together, under ``allOf`` or as alternatives beside ``properties``."""
    names = rng.sample(_WORDS, 3)
    properties = {name: _any(rng, 0) for name in names}
    return {
        "type": "object",
        "properties": properties,
        "allOf": [
            {"required": [names[0]]},
            {"properties": {names[1]: {"type": ["string", "null", "number"]}}},
        ],
        "anyOf": [{"required": [names[1]]}, {"required": [names[2]]}],
        "additionalProperties": False,
    }


def _exclusive(rng: random.Random, depth: int) -> dict[str, Any]:
    """``oneOf`` by type, constant, range, length, or by the properties that are there."""
    low = rng.randint(-50, 50)
    one, other = rng.sample(_WORDS, 2)
    return {
        "oneOf": rng.choice(
            [
                [_integer(rng, 0), _format(rng, 0), {"type": "null"}],
                [{"const": low}, {"const": low + 1, "title": one}, {"const": True}],
                [{"type": "integer", "maximum": low, "minimum": low - 9}, _above(low)],
                [{"type": "string", "maxLength": 2}, {"type": "string", "minLength": 3, "maxLength": 9}],
                [_closed(one, _integer(rng, 0)), _closed(other, _boolean(rng, 0))],
                [_closed("n", {"const": 1}), _closed("n", {"enum": [2, 3]})],
            ]
        )
    }


def _above(low: int) -> dict[str, Any]:
    return {"type": "integer", "exclusiveMinimum": low, "maximum": low + 99}


def _closed(name: str, value: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {name: value},
        "required": [name],
        "additionalProperties": False,
    }


def _map(rng: random.Random, depth: int) -> dict[str, Any]:
    """Names that are not listed one by one as properties."""
    value = _any(rng, 0)
    names = rng.choice(
        [
            {"propertyNames": {"enum": rng.sample(_WORDS, 3)}, "additionalProperties": value},
            {"propertyNames": {"type": "string", "pattern": "^[a-c]{1,3}$"}, "additionalProperties": value},
            {"patternProperties": {"^x-[a-z]{1,3}$": value}, "additionalProperties": False},
            {"properties": {"a": value}, "unevaluatedProperties": False},
        ]
    )
    return {"type": "object", "maxProperties": 3, **names}


def _dependent(rng: random.Random, depth: int) -> dict[str, Any]:
    one, other, third = rng.sample(_WORDS, 3)
    return {
        "type": "object",
        "properties": {name: _any(rng, 0) for name in (one, other, third)},
        "additionalProperties": False,
        "dependentRequired": {one: [other]},
        "dependentSchemas": {other: {"required": [third]}},
    }


def _counted(rng: random.Random, depth: int) -> dict[str, Any]:
    names = rng.sample(_WORDS, 3)
    return {
        "type": "object",
        "properties": {name: _any(rng, 0) for name in names},
        "minProperties": 1,
        "additionalProperties": False,
    }


def _recursive(rng: random.Random, depth: int) -> dict[str, Any]:
    """A tree of at most two children a node."""
    child = {"$ref": "#/$defs/node"}
    node = {
        "type": "object",
        "properties": {"value": _any(rng, 0), "children": {"type": "array", "items": child, "maxItems": 2}},
        "required": ["value"],
        "additionalProperties": False,
    }
    return {"$defs": {"node": node}, "type": "array", "items": child, "minItems": 1, "maxItems": 2}

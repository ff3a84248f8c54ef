"""Whether the alternatives of a JSON schema exclude each other: then ``oneOf`` is ``anyOf``."""

from __future__ import annotations

import math
from itertools import combinations
from typing import Any

Definitions = dict[str, Any]  # by reference

# References that lead to one another, and properties within properties.
_MOST_FOLLOWED, _DEEPEST = 16, 4
# Of those that are not all constants: each is compared with each other.
_MOST_COMPARED = 32
_Bounds = tuple[float, bool]  # of values: the bound, and whether it is excluded


def exclusive(alternatives: list[Any], definitions: Definitions) -> bool:
    """Whether it is certain that no value matches two of them."""
    found = [resolved(each, definitions) for each in alternatives]
    values = [_values(each) for each in found]
    if all(values):
        return len(set().union(*values)) == sum(map(len, values))
    if len(found) > _MOST_COMPARED:
        return False
    return all(_disjoint(one, other, definitions, _DEEPEST) for one, other in combinations(found, 2))


def resolved(schema: Any, definitions: Definitions) -> dict[str, Any]:
    """What a schema with a reference demands at least; {} if that is not known."""
    for _ in range(_MOST_FOLLOWED):
        if not isinstance(schema, dict):
            return {}
        name = schema.get("$ref")
        if name is None:
            return schema
        schema = definitions.get(name) if isinstance(name, str) else None
        if isinstance(schema, dict) and "$id" in schema:
            return {}
    return {}


def types_of(schema: dict[str, Any]) -> set[str]:
    """The types of its values; empty: not known. Whole numbers are numbers."""
    given = schema.get("type")
    given = [given] if isinstance(given, str) else given
    if isinstance(given, list) and all(isinstance(each, str) for each in given):
        return {"number" if each == "integer" else each for each in given}
    return {kind for kind, _ in _values(schema)}


def required_by(schema: dict[str, Any]) -> set[str]:
    names = schema.get("required")
    return {name for name in names if isinstance(name, str)} if isinstance(names, list) else set()


def closed(schema: dict[str, Any]) -> bool:
    """Whether objects have no other properties than those that are listed."""
    return schema.get("additionalProperties") is False and not schema.get("patternProperties")


def _disjoint(one: dict[str, Any], other: dict[str, Any], definitions: Definitions, depth: int) -> bool:
    types, others = types_of(one), types_of(other)
    values, other_values = _values(one), _values(other)
    if (types and others and not types & others) or (
        values and other_values and values.isdisjoint(other_values)
    ):
        return True
    if types != others or len(types) != 1 or not depth:
        return False
    match types.pop():
        case "number":
            return _no_overlap(_numbers(one), _numbers(other))
        case "string":
            return _no_overlap(_lengths(one), _lengths(other))
        case "object":
            if _lacks(one, required_by(other)) or _lacks(other, required_by(one)):
                return True
            for name in required_by(one) & required_by(other):
                mine, theirs = (_property(each, name, definitions) for each in (one, other))
                if _disjoint(mine, theirs, definitions, depth - 1):
                    return True
    return False


def _values(schema: dict[str, Any]) -> set[tuple[str, Any]]:
    """The values it allows at most, by type; empty: others, too, or not known."""
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if not isinstance(values, list):
        return set()
    found = set()
    for value in values:
        if isinstance(value, dict | list):
            return set()
        kind = {bool: "boolean", int: "number", float: "number", str: "string"}.get(type(value), "null")
        found.add((kind, value))
    return found


def _no_overlap(one: tuple[_Bounds, _Bounds], other: tuple[_Bounds, _Bounds]) -> bool:
    """Whether two ranges, each from its lower to its upper bound, have nothing in common."""
    return any(
        upper[0] < lower[0] or (upper[0] == lower[0] and (upper[1] or lower[1]))
        for (_, upper), (lower, _) in ((one, other), (other, one))
    )


def _numbers(schema: dict[str, Any]) -> tuple[_Bounds, _Bounds]:
    """Draft 4 has booleans beside the bounds: a range without its ends is then taken for one with them."""
    lowers = (
        (_number(schema, "minimum", -math.inf), False),
        (_number(schema, "exclusiveMinimum", -math.inf), True),
    )
    uppers = (
        (_number(schema, "maximum", math.inf), False),
        (_number(schema, "exclusiveMaximum", math.inf), True),
    )
    return max(lowers), min(uppers, key=lambda bound: (bound[0], not bound[1]))


def _lengths(schema: dict[str, Any]) -> tuple[_Bounds, _Bounds]:
    return (_number(schema, "minLength", 0), False), (_number(schema, "maxLength", math.inf), False)


def _number(schema: dict[str, Any], name: str, otherwise: float) -> float:
    value = schema.get(name)
    return value if isinstance(value, int | float) and not isinstance(value, bool) else otherwise


def _lacks(schema: dict[str, Any], names: set[str]) -> bool:
    """Whether objects of the schema cannot have one of these properties."""
    properties = schema.get("properties", {})
    return closed(schema) and isinstance(properties, dict) and not names <= set(properties)


def _property(schema: dict[str, Any], name: str, definitions: Definitions) -> dict[str, Any]:
    properties = schema.get("properties")
    return resolved(properties.get(name), definitions) if isinstance(properties, dict) else {}

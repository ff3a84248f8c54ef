"""JSON schemas rewritten, with the same meaning, as far as llguidance can then enforce more of them."""

from __future__ import annotations

from itertools import combinations
from typing import Any

Definitions = dict[str, Any]  # by reference

# Where a schema has schemas. Values elsewhere, as in ``enum``, are data.
_ONE = (
    *("items", "additionalItems", "contains", "additionalProperties", "propertyNames", "not", "if", "then"),
    *("else", "unevaluatedItems", "unevaluatedProperties"),
)
_SEVERAL = ("anyOf", "allOf", "oneOf", "prefixItems", "items")
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_ROOTS = ("$defs", "definitions")
# References that lead to one another.
_MOST_FOLLOWED = 16
# How messages of llguidance begin.
_ONE_OF, _KEYWORDS = "oneOf constraints are not supported", "Unimplemented keys:"


def enforceable(schema: Any) -> Any:
    """Return an equal schema. The argument is not changed.

    - ``uniqueItems`` is left out where it demands nothing.
    - ``oneOf`` becomes ``anyOf`` where no value matches two alternatives. llguidance sees that by itself, but
      not through references.
    """
    definitions: Definitions = {}
    if isinstance(schema, dict):
        for root in _ROOTS:
            named = schema.get(root)
            if isinstance(named, dict):
                definitions |= {f"#/{root}/{name}": each for name, each in named.items()}
    return _rewritten(schema, definitions)


def refusal(message: str) -> str:
    """Say what a client can do about a refusal of llguidance; other messages are returned as they are."""
    if message.startswith(_ONE_OF):
        return (
            "the schema cannot be enforced: the alternatives of a oneOf may overlap; use anyOf, or give each "
            "alternative a required property with another constant"
        )
    if message.startswith(_KEYWORDS):
        names = message.removeprefix(_KEYWORDS).strip(" []")
        return f"the schema has keywords that cannot be enforced: {names}; leave them out"
    return message


def _rewritten(schema: Any, definitions: Definitions) -> Any:
    if not isinstance(schema, dict):
        return schema
    result = {name: _inside(name, value, definitions) for name, value in schema.items()}
    unique, most = schema.get("uniqueItems"), schema.get("maxItems")
    if unique is False or (unique is True and type(most) is int and most <= 1):
        del result["uniqueItems"]
    alternatives = result.get("oneOf")
    if isinstance(alternatives, list) and "anyOf" not in result and _exclusive(alternatives, definitions):
        result["anyOf"] = result.pop("oneOf")
    return result


def _inside(name: str, value: Any, definitions: Definitions) -> Any:
    """The value of a keyword with all schemas in it rewritten."""
    if name in _NAMED and isinstance(value, dict):
        return {key: _inner(each, definitions) for key, each in value.items()}
    if name in _SEVERAL and isinstance(value, list):
        return [_inner(each, definitions) for each in value]
    return _inner(value, definitions) if name in _ONE else value


def _inner(schema: Any, definitions: Definitions) -> Any:
    # With an ``$id`` of its own, its references are to itself.
    return _rewritten(schema, {} if isinstance(schema, dict) and "$id" in schema else definitions)


def _exclusive(alternatives: list[Any], definitions: Definitions) -> bool:
    found = [_named(each, definitions) for each in alternatives]
    return all(_disjoint(one, other, definitions) for one, other in combinations(found, 2))


def _named(schema: Any, definitions: Definitions) -> dict[str, Any]:
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


def _disjoint(one: dict[str, Any], other: dict[str, Any], definitions: Definitions) -> bool:
    """Whether it is certain that no value matches both."""
    types, others = _types(one), _types(other)
    if types and others and not types & others:
        return True
    if types != {"object"} or others != {"object"}:
        return False
    for name in _required(one) & _required(other):
        texts, other_texts = (_texts(each, name, definitions) for each in (one, other))
        if texts and other_texts and not texts & other_texts:
            return True
    return False


def _types(schema: dict[str, Any]) -> set[str]:
    """The types of its values; empty: not known. Whole numbers are numbers."""
    given = schema.get("type")
    given = [given] if isinstance(given, str) else given
    if not isinstance(given, list) or not all(isinstance(each, str) for each in given):
        return set()
    return {"number" if each == "integer" else each for each in given}


def _required(schema: dict[str, Any]) -> set[str]:
    names = schema.get("required")
    return {name for name in names if isinstance(name, str)} if isinstance(names, list) else set()


def _texts(schema: dict[str, Any], name: str, definitions: Definitions) -> set[str]:
    """The texts that one of its properties may have; empty: others too, or not known."""
    properties = schema.get("properties")
    field = _named(properties.get(name), definitions) if isinstance(properties, dict) else {}
    values = [field["const"]] if "const" in field else field.get("enum")
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        return set()
    return set(values)

"""JSON schemas rewritten, with the same meaning, as far as llguidance can then enforce more of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from moonpool.runtime.structure.alternatives import (
    Definitions,
    closed,
    exclusive,
    required_by,
    resolved,
    types_of,
)

WHITESPACE = r"[ \n\t]{0,16}"
"""Between the parts of JSON. Without a bound a model may write blanks for ever, which the schema allows."""
# Where a schema has schemas. Values elsewhere, as in ``enum``, are data.
_ONE = (
    *("items", "additionalItems", "contains", "additionalProperties", "propertyNames", "not", "if", "then"),
    *("else", "unevaluatedItems", "unevaluatedProperties"),
)
_SEVERAL = ("anyOf", "allOf", "oneOf", "prefixItems", "items")
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_ROOTS = ("$defs", "definitions")
# Keywords that say nothing of values of other types, or without another keyword.
_OF_TYPE = {
    "array": ("uniqueItems", "contains", "minContains", "maxContains", "unevaluatedItems"),
    "object": (
        *("propertyNames", "dependentRequired", "dependentSchemas", "dependencies", "unevaluatedProperties"),
        "minProperties",
    ),
}
_BESIDE = {"then": "if", "else": "if", "minContains": "contains", "maxContains": "contains"}
# Schemas beside the properties and items of a schema that may describe more of them.
_IN_PLACE = frozenset(("$ref", "$dynamicRef", "allOf", "anyOf", "oneOf", "if", "not", "dependentSchemas"))
_FORMATS = (
    *("date-time", "time", "date", "duration", "email", "idn-email", "hostname", "idn-hostname", "ipv4"),
    *("ipv6", "uuid", "uri", "uri-reference", "iri", "iri-reference", "uri-template", "json-pointer"),
    *("relative-json-pointer", "regex"),
)
_ANNOTATIONS = frozenset(("title", "description", "default", "examples", "deprecated", "$comment"))
# Each doubles what llguidance has to tell apart.
_MOST_DEPENDENT = 4


def enforceable(schema: Any) -> Any:
    """Return an equal schema. The argument is not changed.

    ``oneOf`` becomes ``anyOf`` where no value matches two alternatives. Dependencies become alternatives, and
    names of properties that are listed or have a pattern become properties. What demands nothing is left out,
    as formats that JSON Schema does not define, and orders to llguidance, which could loosen others.
    """
    return _rewritten(schema, definitions_of(schema))


def definitions_of(schema: Any) -> Definitions:
    """What references of the whole schema may lead to."""
    definitions: Definitions = {}
    if isinstance(schema, dict):
        for root in _ROOTS:
            named = schema.get(root)
            if isinstance(named, dict):
                definitions |= {f"#/{root}/{name}": each for name, each in named.items()}
    return definitions


def places(schema: Any, at: str = "#") -> Iterator[tuple[str, dict[str, Any]]]:
    """All schemas in a schema, each with its JSON pointer."""
    if not isinstance(schema, dict):
        return
    yield at, schema
    for name, value in schema.items():
        if name in _NAMED and isinstance(value, dict):
            inner = value.items()
        elif name in _SEVERAL and isinstance(value, list):
            inner = enumerate(value)  # type: ignore[assignment]
        else:
            if name in _ONE:
                yield from places(value, f"{at}/{name}")
            continue
        for key, each in inner:
            yield from places(each, f"{at}/{name}/{str(key).replace('~', '~0').replace('/', '~1')}")


def rewritten_level(schema: dict[str, Any], definitions: Definitions) -> dict[str, Any]:
    """The schema with its own keywords rewritten, and those of the schemas in it as they are."""
    result = _without_idle(schema)
    _open_unevaluated(result)
    _open_names(result, definitions)
    _open_dependencies(result)
    _open_counts(result)
    alternatives = result.get("oneOf")
    if isinstance(alternatives, list) and "anyOf" not in result and exclusive(alternatives, definitions):
        result["anyOf"] = result.pop("oneOf")
    return result


def _rewritten(schema: Any, definitions: Definitions) -> Any:
    if not isinstance(schema, dict):
        return schema
    level = rewritten_level(schema, definitions)
    return {name: _inside(name, value, definitions) for name, value in level.items()}


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


def _without_idle(schema: dict[str, Any]) -> dict[str, Any]:
    """Without what demands nothing of a value."""
    types = types_of(schema)
    idle = {"x-guidance"}
    idle |= {word for kind, words in _OF_TYPE.items() if types and kind not in types for word in words}
    idle |= {word for word, other in _BESIDE.items() if other not in schema}
    if "if" in schema and not {"then", "else"} & schema.keys():
        idle.add("if")
    unique, most = schema.get("uniqueItems"), schema.get("maxItems")
    if unique is False or (unique is True and type(most) is int and most <= 1):
        idle.add("uniqueItems")
    if isinstance(schema.get("format"), str) and schema["format"] not in _FORMATS:
        idle.add("format")
    return {name: value for name, value in schema.items() if name not in idle}


def _open_unevaluated(result: dict[str, Any]) -> None:
    """Nothing is unevaluated beside ``additionalProperties`` or ``items``; else it takes their place."""
    for word, own in (("unevaluatedProperties", "additionalProperties"), ("unevaluatedItems", "items")):
        if word not in result or isinstance(result.get(own), list):
            continue
        if own in result:
            del result[word]
        elif not (_IN_PLACE | {"contains"}) & result.keys():
            result[own] = result.pop(word)


def _open_names(result: dict[str, Any], definitions: Definitions) -> None:
    """``propertyNames`` as properties, or as a pattern of them."""
    if "propertyNames" not in result:
        return
    given = result["propertyNames"]
    names = {} if given is True else resolved(given, definitions)
    words, properties = names.keys() - _ANNOTATIONS, result.get("properties", {})
    if given is not True and given != {} and not names:
        return  # not known
    if not words or (words == {"type"} and "string" in types_of(names)):
        del result["propertyNames"]
        return
    if "patternProperties" in result or not isinstance(properties, dict):
        return
    others = result.get("additionalProperties", True)
    values = [names["const"]] if "const" in names else names.get("enum")
    pattern = names.get("pattern")
    if len(words - {"type"}) != 1:
        return
    if isinstance(values, list):
        texts = [value for value in values if isinstance(value, str)]
        known = {name: each for name, each in properties.items() if name in texts}
        result["properties"] = known | {name: others for name in texts if name not in known}
    elif isinstance(pattern, str) and not properties:
        result["patternProperties"] = {pattern: others}
    else:
        return
    result["additionalProperties"] = False
    del result["propertyNames"]


def _open_dependencies(result: dict[str, Any]) -> None:
    """Either there is no such property, or what it demands holds, too."""
    given = {word: result.get(word) for word in ("dependentRequired", "dependentSchemas", "dependencies")}
    every = [item for each in given.values() if isinstance(each, dict) for item in each.items()]
    before = result.get("allOf", [])
    if not every or len(every) > _MOST_DEPENDENT or not isinstance(before, list):
        return
    demands = [
        {"anyOf": [{"properties": {name: False}}, {"required": [name, *needs]}]}
        if isinstance(needs, list)
        else {"anyOf": [{"properties": {name: False}}, {"allOf": [{"required": [name]}, needs]}]}
        for name, needs in every
    ]
    result["allOf"] = [*before, *demands]
    for word in given:
        result.pop(word, None)


def _open_counts(result: dict[str, Any]) -> None:
    """Without bounds that properties which are all known, or required, are always within."""
    least, most, properties = (result.get(word) for word in ("minProperties", "maxProperties", "properties"))
    if type(least) is int and len(required_by(result)) >= least:
        del result["minProperties"]
    if type(most) is int and closed(result) and isinstance(properties, dict) and len(properties) <= most:
        del result["maxProperties"]

"""What is said of a JSON schema that cannot be enforced: the keyword, its place, and what to do."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

from moonpool.runtime.structure.alternatives import closed, required_by
from moonpool.runtime.structure.automaton import brief
from moonpool.runtime.structure.schemas import definitions_of, places, rewritten_level

# How messages of llguidance begin.
_ONE_OF, _KEYWORDS, _FORMAT = "oneOf constraints are not supported", "Unimplemented keys:", "Unknown format:"
_LEAST, _REGEX = "min/maxProperties only supported", "regex parse error"
_NOT = "the schema cannot be enforced"
_MOST_CHARS = 160
_Level = dict[str, Any]


def unsound(schema: Any, rewritten: Any) -> str:
    """What llguidance would let through unenforced; empty: nothing.

    ``rewritten``: ``enforceable(schema)``.
    """
    if not any(_counts_names(level) for _, level in places(rewritten)):
        return ""
    what = _at("minProperties", _first(schema, _counts_names))
    return f"{_NOT}: {what} counts names that are not listed; list them as required properties"


def refusal(message: str, schema: Any = None) -> str:
    """Say what a client can do about a refusal of llguidance; ``schema``: the client's."""
    short = brief(message)
    if short.startswith(_ONE_OF):
        place = _first(schema, lambda level: "oneOf" in level)
        return (
            f"{_NOT}: the alternatives of {_at('a oneOf', place)} may overlap; use anyOf, or give each "
            "alternative a required property with another constant"
        )
    if short.startswith(_KEYWORDS):
        names = re.findall(r'"([^"]+)"', short)
        found = (_at(f'"{name}"', _first(schema, partial(_has, name))) for name in names)
        return f"the schema has keywords that cannot be enforced: {', '.join(found)}; leave them out"
    if short.startswith(_FORMAT):
        name = short.removeprefix(_FORMAT).strip()
        place = _first(schema, lambda level: level.get("format") == name)
        return f"{_NOT}: {_at(f'the format {name!r}', place)} is not known; leave it out"
    if short.startswith(_LEAST):
        what = _at("minProperties or maxProperties", _first(schema, _bounds_optional))
        return f"{_NOT}: {what} beside optional properties; require all that are listed, or leave it out"
    if short.startswith(_REGEX):
        place = _first(schema, lambda level: any(text in message for text in _expressions(level)))
        return f"{short} ({_at('of a pattern', place)})" if place else short
    return short


def _first(schema: Any, fits: Callable[[_Level], bool]) -> str:
    """The place of the first schema that fits when it is rewritten; empty: none does."""
    definitions = definitions_of(schema)
    found = (place for place, each in places(schema) if fits(rewritten_level(each, definitions)))
    return next(found, "")[:_MOST_CHARS]


def _at(what: str, place: str) -> str:
    return f"{what} at {place}" if place else what


def _has(name: str, level: _Level) -> bool:
    return name in level


def _counts_names(level: _Level) -> bool:
    """A name may stand twice in an object that llguidance allows; it counts once when the text is read."""
    least = level.get("minProperties")
    return type(least) is int and least > len(required_by(level)) + 1 and not closed(level)


def _bounds_optional(level: _Level) -> bool:
    properties = level.get("properties")
    bounded = "minProperties" in level or "maxProperties" in level
    return bounded and isinstance(properties, dict) and not properties.keys() <= required_by(level)


def _expressions(level: _Level) -> list[str]:
    patterns = level.get("patternProperties")
    given = [level.get("pattern"), *(patterns if isinstance(patterns, dict) else ())]
    return [each for each in given if isinstance(each, str) and each]

"""How models write calls of tools: the formats of chat templates, and grammars that enforce calls."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moonpool.runtime.structure.grammars import Structure
from moonpool.runtime.structure.schemas import WHITESPACE, enforceable


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """A call is a JSON object with a name and arguments, between marks.

    begin: opens the calls, or each call; empty: the text itself begins with a call. end: closes a call;
    empty: all text after ``begin`` is calls. separators: characters between calls.
    """

    name: str
    begin: str
    end: str
    separators: str
    arguments: str  # the name of the arguments
    special: bool  # the marks are special tokens, which texts do not show otherwise
    # What a call, the first one, and all of them are written between, where they are enforced.
    around_call: tuple[str, str]
    around_all: tuple[str, str]
    between: str


HERMES = ToolFormat(
    "hermes",
    "<tool_call>",
    "</tool_call>",
    "",
    "arguments",
    False,
    ("<tool_call>\n", "\n</tool_call>"),
    ("", ""),
    "\n",
)
LLAMA3 = ToolFormat("llama3", "", "", ";", "parameters", True, ("", ""), ("", ""), "; ")
MISTRAL = ToolFormat(
    "mistral", "[TOOL_CALLS]", "", "[],", "arguments", True, ("", ""), ("[TOOL_CALLS][", "]"), ", "
)
FORMATS: Mapping[str, ToolFormat] = {each.name: each for each in (HERMES, LLAMA3, MISTRAL)}
# What a template of the format has in it.
_SIGNS = (
    (HERMES, "<tool_call>"),
    (MISTRAL, "[TOOL_CALLS]"),
    (LLAMA3, "<|python_tag|>"),
    (LLAMA3, '"parameters": '),
)


def format_of(template: str) -> ToolFormat:
    """The format that a chat template describes to its model; Hermes' where none can be told."""
    return next((found for found, sign in _SIGNS if sign in template), HERMES)


def enforced(
    form: ToolFormat,
    tools: Sequence[tuple[str, Mapping[str, Any] | None]],
    token_id: Callable[[str], int | None],
    *,
    several: bool,
) -> Structure:
    """The structure of an answer that calls one of ``tools`` (name, schema of its arguments) or more.

    ``token_id``: of a token by its text; None: there is no such token. ``several``: more than one call.
    """
    before, after = form.around_call
    first, last = form.around_all
    mark = token_id(form.begin) if form.special and form.begin else None
    opened = _quoted(first)
    if mark is not None:
        opened = f"<[{mark}]> {_quoted(first.removeprefix(form.begin))}"
    rest = f" ({_quoted(form.between)} call)*" if several else ""
    calls = " | ".join(f"call_{i}" for i in range(len(tools)))
    lines = [f"start: {opened} call{rest} {_quoted(last)}", f"call: {calls}"]
    for i, (name, schema) in enumerate(tools):
        head = f'{before}{{"name": {json.dumps(name)}, "{form.arguments}": '
        lines.append(f"call_{i}: {_quoted(head)} arguments_{i} {_quoted('}' + after)}")
        orders = {"x-guidance": {"whitespace_pattern": WHITESPACE}}
        arguments = {**enforceable(schema or NO_PARAMETERS), **orders}
        lines.append(f"arguments_{i}: %json {json.dumps(arguments)}")
    return Structure("grammar", "\n".join(lines))


NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else ""

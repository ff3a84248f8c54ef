"""Calls of tools in texts, however the texts are cut."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from moonpool.conductor.tools.formats import FORMATS, HERMES, LLAMA3, MISTRAL, ToolFormat, format_of
from moonpool.conductor.tools.parser import CallParser

Parsed = tuple[str, list[tuple[str, str]]]
ARGUMENTS = '{"city": "Köln \\"am\\" Rhein {[", "days": [1, {"x": "}"}], "deep": {"a": {}}}'

CASES: dict[str, tuple[ToolFormat, str, Parsed]] = {
    "hermes": (
        HERMES,
        f'<tool_call>\n{{"name": "look", "arguments": {ARGUMENTS}}}\n</tool_call>',
        ("", [("look", ARGUMENTS)]),
    ),
    "hermes, two after a text": (
        HERMES,
        f'I look.\n<tool_call>{{"name": "look", "arguments": {ARGUMENTS} }}</tool_call>\n'
        '<tool_call>\n{"arguments": {}, "name": "go"}\n</tool_call>\n',
        ("I look.\n", [("look", ARGUMENTS), ("go", "{}")]),
    ),
    "hermes, arguments as a text": (
        HERMES,
        '<tool_call>{"name": "look", "arguments": "{\\"a\\": 1}"}</tool_call>',
        ("", [("look", '{"a": 1}')]),
    ),
    "hermes, text after it": (
        HERMES,
        '<tool_call>{"name": "go", "arguments": {}}</tool_call> And now?',
        (" And now?", [("go", "{}")]),
    ),
    "hermes, no call": (HERMES, "a <b> <tool> c <tool_cal", ("a <b> <tool> c <tool_cal", [])),
    "hermes, no object": (HERMES, "<tool_call>now", ("<tool_call>now", [])),
    "hermes, no name": (HERMES, '<tool_call>{"a": 1}</tool_call>', ('<tool_call>{"a": 1}</tool_call>', [])),
    "hermes, cut off before the name": (HERMES, '<tool_call>{"na', ('<tool_call>{"na', [])),
    "hermes, cut off in the arguments": (
        HERMES,
        '<tool_call>{"name": "look", "arguments": {"a": [1, ',
        ("", [("look", '{"a": [1, ')]),
    ),
    "hermes, cut off at the end": (
        HERMES,
        '<tool_call>{"name": "go", "arguments": {}}\n</tool_',
        ("", [("go", "{}")]),
    ),
    "llama": (LLAMA3, f'{{"name": "look", "parameters": {ARGUMENTS}}}', ("", [("look", ARGUMENTS)])),
    "llama, two with a tag": (
        LLAMA3,
        '<|python_tag|>{"name": "look", "parameters": {"a": 1}}; {"name": "go", "parameters": {}}',
        ("", [("look", '{"a": 1}'), ("go", "{}")]),
    ),
    "llama, text": (LLAMA3, 'So: {"name": "go"}', ('So: {"name": "go"}', [])),
    "llama, an object": (LLAMA3, '{"a": 1} is it', ('{"a": 1} is it', [])),
    "mistral": (
        MISTRAL,
        f'[TOOL_CALLS][{{"name": "look", "arguments": {ARGUMENTS}}}, {{"name": "go", "arguments": {{}}}}]',
        ("", [("look", ARGUMENTS), ("go", "{}")]),
    ),
    "mistral, later models": (
        MISTRAL,
        f"Well. [TOOL_CALLS]look[ARGS]{ARGUMENTS}[TOOL_CALLS]go[CALL_ID]abc123[ARGS]{{}}",
        ("Well. ", [("look", ARGUMENTS), ("go", "{}")]),
    ),
    "mistral, no call": (MISTRAL, "[TOOL_CALL] or [1]", ("[TOOL_CALL] or [1]", [])),
}


def parse(form: ToolFormat, pieces: list[str]) -> Parsed:
    parser, content, calls = CallParser(form), "", list[list[str]]()
    for step in [*map(parser.push, pieces), (parser.flush(), [])]:
        content += step[0]
        for call in step[1]:
            if call.name:
                assert call.index == len(calls)
                calls.append([call.name, ""])
            calls[call.index][1] += call.arguments
    return content, [(name, arguments) for name, arguments in calls]


@pytest.mark.parametrize("name", CASES)
def test_calls_are_found_however_the_text_is_cut(name: str) -> None:
    form, text, expected = CASES[name]
    assert parse(form, [text]) == expected
    assert parse(form, list(text)) == expected
    rng = random.Random(name)
    for _ in range(20):
        cuts = sorted(rng.sample(range(len(text) + 1), min(5, len(text))))
        pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        assert parse(form, pieces) == expected


@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
def test_arguments_come_as_they_are_written(form: ToolFormat) -> None:
    parser, seen = CallParser(form), list[Any]()
    text = form.around_all[0] + form.around_call[0] + f'{{"name": "look", "{form.arguments}": {ARGUMENTS}'
    for character in text:
        seen += parser.push(character)[1]
    assert "".join(call.arguments for call in seen) == ARGUMENTS
    assert len(seen) > len(ARGUMENTS) // 2


@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
def test_plain_text_is_not_held_back(form: ToolFormat) -> None:
    parser = CallParser(form)
    assert parser.push("Hello, ") == ("Hello, ", [])
    assert parser.push("world.") == ("world.", [])


def test_the_template_says_the_format() -> None:
    assert format_of("{{ '<tool_call>' }} \"parameters\": ") is HERMES
    assert format_of("[TOOL_CALLS]") is MISTRAL
    assert format_of('{"name": function name, "parameters": dictionary}') is LLAMA3
    assert format_of("{{ messages }}") is HERMES
    assert json.loads(ARGUMENTS)["days"] == [1, {"x": "}"}]

"""Tools over HTTP, with the official client."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pydantic
import pytest

from moonpool.conductor.text.chat_template import ChatTemplate
from moonpool.conductor.tools.formats import FORMATS, HERMES, ToolFormat, enforced
from moonpool.conductor.tools.parser import CallParser
from tests.conductor.conftest import prompt_of
from tests.conductor.random_texts import Writer

MODEL = Path(__file__).parents[2] / "moonpool" / "demo" / "model"
DAY = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Ulm", "Köln"]},
        "days": {"type": "integer", "minimum": 0, "maximum": 9},
    },
    "required": ["city"],
    "additionalProperties": False,
}
LOOK: Any = {"type": "function", "function": {"name": "look", "description": "Weather", "parameters": DAY}}
GO: Any = {"type": "function", "function": {"name": "go"}}
HI: list[Any] = [{"role": "user", "content": "Hi"}]
TWO = (
    '<tool_call>\n{"name": "look", "arguments": {"city": "Ulm"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "go", "arguments": {}}\n</tool_call>'
)


@pytest.fixture
def api(tools_api: Any) -> Any:
    return tools_api


async def test_calls(api: Any, client: openai.AsyncOpenAI) -> None:
    api.core.script = lambda request: api.core.says("Well. " + TWO)
    answer = await client.chat.completions.create(model="tiny", messages=HI, tools=[LOOK, GO], n=2)
    assert '"name": "look"' in prompt_of(api)
    names = set()
    for choice in answer.choices:
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content == "Well. "
        calls: Any = choice.message.tool_calls
        assert [(call.function.name, call.function.arguments) for call in calls] == [
            ("look", '{"city": "Ulm"}'),
            ("go", "{}"),
        ]
        names |= {call.id for call in calls}
    assert len(names) == 4
    assert api.core.requests[-1].sampling.structure is None
    # The next turn: the calls and what came of them are part of the prompt.
    message = answer.choices[0].message
    again: list[Any] = [
        *HI,
        message,
        {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "Rain"},
    ]
    api.core.script = lambda request: api.core.says("It rains.")
    answer = await client.chat.completions.create(model="tiny", messages=again, tools=[LOOK])
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].message.content == "It rains."
    assert answer.choices[0].message.tool_calls is None
    assert '{"arguments": {"city": "Ulm"}' in prompt_of(api) or '"arguments": {"city": "Ulm"}' in prompt_of(
        api
    )
    assert "Rain" in prompt_of(api)


async def test_arguments_of_an_earlier_call_that_are_nested_too_deep_are_refused(api: Any) -> None:
    call = {"type": "function", "function": {"name": "look", "arguments": "[" * 1000 + "]" * 1000}}
    messages = [*HI, {"role": "assistant", "tool_calls": [call]}]
    status, answer = await api.post("/v1/chat/completions", {"messages": messages})
    assert (status, answer["error"]["param"]) == (400, "messages"), answer


async def test_calls_streamed(api: Any, client: openai.AsyncOpenAI) -> None:
    api.core.script = lambda request: api.core.says("Well. " + TWO)
    stream = await client.chat.completions.create(model="tiny", messages=HI, tools=[LOOK, GO], stream=True)
    chunks = [chunk async for chunk in stream]
    content = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert content == "Well. "
    parts = [part for chunk in chunks for part in chunk.choices[0].delta.tool_calls or []]
    assert [(part.index, part.function.name, part.type) for part in parts if part.id] == [
        (0, "look", "function"),
        (1, "go", "function"),
    ]
    assert "".join(part.function.arguments or "" for part in parts if part.index == 0) == '{"city": "Ulm"}'
    assert len([part for part in parts if part.index == 0]) > 3, "as they come"
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


async def test_an_earlier_message_without_calls_has_none(api: Any, client: openai.AsyncOpenAI) -> None:
    # As Llama's templates ask: a message that has the field has exactly one call.
    api.context.template = ChatTemplate(
        "{% for m in messages %}{% if 'tool_calls' in m %}{% if m.tool_calls | length != 1 %}"
        "{{ raise_exception('This model only supports single tool-calls at once!') }}{% endif %}{% endif %}"
        "<|{{ m.role }}|>{{ m.content }}<|eos|>{% endfor %}",
        {},
    )
    first = await client.chat.completions.create(model="tiny", messages=HI)
    answered: Any = first.choices[0].message.model_dump()
    assert answered["tool_calls"] is None, "as the official client writes it"
    for calls in (None, []):
        messages: list[Any] = [*HI, {**answered, "tool_calls": calls}, *HI]
        await client.chat.completions.create(model="tiny", messages=messages)
        assert prompt_of(api) == "<|user|>Hi<|eos|><|assistant|>Hello, world.<|eos|><|user|>Hi<|eos|>"


class Look(pydantic.BaseModel):
    city: str
    days: int = 1


async def test_the_client_parses_and_streams_calls(api: Any, client: openai.AsyncOpenAI) -> None:
    tool: Any = openai.pydantic_function_tool(Look)
    text = '<tool_call>{"name": "Look", "arguments": {"city": "Ulm", "days": 3}}</tool_call>'
    api.core.script = lambda request: api.core.says(text)
    answer = await client.chat.completions.parse(model="tiny", messages=HI, tools=[tool])
    calls: Any = answer.choices[0].message.tool_calls
    assert calls[0].function.parsed_arguments == Look(city="Ulm", days=3)
    async with client.chat.completions.stream(model="tiny", messages=HI, tools=[tool]) as stream:
        kinds = [event.type async for event in stream]
        final = await stream.get_final_completion()
    assert "tool_calls.function.arguments.delta" in kinds
    calls = final.choices[0].message.tool_calls
    assert calls[0].function.parsed_arguments == Look(city="Ulm", days=3)


async def test_one_call_where_several_are_not_wanted(api: Any, client: openai.AsyncOpenAI) -> None:
    api.core.script = lambda request: api.core.says(TWO)
    answer = await client.chat.completions.create(
        model="tiny", messages=HI, tools=[LOOK, GO], parallel_tool_calls=False
    )
    calls: Any = answer.choices[0].message.tool_calls
    assert [call.function.name for call in calls] == ["look"]


async def test_no_calls_where_none_are_wanted(api: Any, client: openai.AsyncOpenAI) -> None:
    api.core.script = lambda request: api.core.says(TWO)
    answer = await client.chat.completions.create(
        model="tiny", messages=HI, tools=[LOOK, GO], tool_choice="none"
    )
    assert answer.choices[0].message.content == TWO
    assert answer.choices[0].finish_reason == "stop"
    assert "look" not in prompt_of(api)


async def test_a_call_cut_off_by_the_limit(api: Any, client: openai.AsyncOpenAI) -> None:
    api.core.script = lambda request: api.core.says(TWO)
    answer = await client.chat.completions.create(model="tiny", messages=HI, tools=[LOOK], max_tokens=40)
    assert answer.choices[0].finish_reason == "length"


CHOICES: dict[str, tuple[Any, bool, list[str], bool]] = {
    "required": ("required", True, ["look", "go"], True),
    "one required": ("required", False, ["look", "go"], False),
    "named": ({"type": "function", "function": {"name": "look"}}, True, ["look"], False),
}


@pytest.mark.parametrize("name", CHOICES)
async def test_required_calls_are_enforced(api: Any, client: openai.AsyncOpenAI, name: str) -> None:
    choice, parallel, names, several = CHOICES[name]
    api.core.script = lambda request: api.core.says(TWO)
    await client.chat.completions.create(
        model="tiny", messages=HI, tools=[LOOK, GO], tool_choice=choice, parallel_tool_calls=parallel
    )
    structure = api.core.requests[-1].sampling.structure
    described = [(each, DAY if each == "look" else None) for each in names]
    assert structure == enforced(HERMES, described, lambda text: None, several=several)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses"])
async def test_calls_are_required_with_a_format_that_asks_for_nothing(api: Any, path: str) -> None:
    api.core.script = lambda request: api.core.says(TWO)
    text: Any = {"type": "text"}
    chat = {"messages": HI, "tools": [LOOK], "response_format": text}
    response = {"input": "Hi", "tools": [{"type": "function", **LOOK["function"]}], "text": {"format": text}}
    body = response if path == "/v1/responses" else chat
    status, answer = await api.post(path, {**body, "tool_choice": "required"})
    assert status == 200, answer
    structure = api.core.requests[-1].sampling.structure
    assert structure == enforced(HERMES, [("look", DAY)], lambda text: None, several=True)


async def test_a_broken_call_that_is_sent_back_stays_a_text(api: Any) -> None:
    call = {"type": "function", "function": {"name": "look", "arguments": "{city: Ulm}"}}
    messages = [*HI, {"role": "assistant", "tool_calls": [call]}]
    status, answer = await api.post("/v1/chat/completions", {"messages": messages})
    assert status == 200, answer
    assert '"arguments": "{city: Ulm}"' in prompt_of(api)


async def test_a_tool_that_cannot_be_required_is_named(api: Any, client: openai.AsyncOpenAI) -> None:
    odd = {"type": "object", "properties": {"city": {"type": "string", "not": {"const": "Ulm"}}}}
    tool: Any = {"type": "function", "function": {"name": "odd", "parameters": odd}}
    with pytest.raises(openai.BadRequestError) as refused:
        await client.chat.completions.create(
            model="tiny", messages=HI, tools=[LOOK, tool], tool_choice="required"
        )
    assert "tool 'odd'" in str(refused.value)
    assert '"not" at #/properties/city' in refused.value.message.replace("\\", "")
    assert api.core.requests == []
    await client.chat.completions.create(model="tiny", messages=HI, tools=[LOOK, tool])


async def test_arguments_are_enforced_as_any_schema_is() -> None:
    """What is rewritten elsewhere is rewritten here, and blanks have the same bound."""
    words = {"type": "object", "propertyNames": {"enum": ["a"]}, "additionalProperties": {"type": "null"}}
    structure = enforced(HERMES, [("go", words)], lambda text: None, several=False)
    writer = Writer(MODEL, 2048, (1,))
    call = '<tool_call>\n{"name": "go", "arguments": %s}\n</tool_call>'
    for arguments, allowed in (
        ('{"a":null}', True),
        ('{"b":null}', False),
        ("{" + 16 * " " + '"a":null}', True),
        ("{" + 17 * " " + '"a":null}', False),
    ):
        assert await writer.accepts(structure, call % arguments) == allowed


@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("several", [False, True])
async def test_enforced_calls_are_parsed_and_validate(form: ToolFormat, several: bool) -> None:
    writer = Writer(MODEL, 2048, (1,))
    schemas: dict[str, Any] = {"look": DAY, "go": {"type": "object", "maxProperties": 0}}
    structure = enforced(form, [("look", DAY), ("go", None)], lambda text: None, several=several)
    counts = set()
    for seed in range(12):
        text = await writer.text(structure, seed, max_tokens=2000, hurry=150)
        parser = CallParser(form)
        content, calls = parser.push(text)
        assert (content, parser.flush()) == ("", "")
        assert parser.num_calls == len({call.index for call in calls})
        counts.add(parser.num_calls)
        whole = {call.index: [call.name, ""] for call in calls if call.name}
        for call in calls:
            whole[call.index][1] += call.arguments
        for called, arguments in whole.values():
            jsonschema.validate(json.loads(arguments), schemas[called])
    assert counts == {1} if not several else max(counts) > 1

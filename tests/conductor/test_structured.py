"""Structured output over HTTP: what the core is asked for, and what is refused."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
import pydantic
import pytest

from moonpool.conductor.errors import NoStructures
from moonpool.runtime.structure import grammars
from moonpool.runtime.structure.grammars import Structure

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"type": "string"}}}
HI: list[Any] = [{"role": "user", "content": "Hi"}]


def asked(api: Any) -> Structure | None:
    structure: Structure | None = api.core.requests[-1].sampling.structure
    return structure


FORMS: dict[str, tuple[dict[str, Any], Structure]] = {
    "object": ({"response_format": {"type": "json_object"}}, Structure("json_object")),
    "schema": (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": SCHEMA, "strict": None},
            }
        },
        Structure("json", json.dumps(SCHEMA, separators=(",", ":"))),
    ),
    "vllm schema": (
        {"structured_outputs": {"json": SCHEMA}},
        Structure("json", json.dumps(SCHEMA, separators=(",", ":"))),
    ),
    "vllm text": (
        {"structured_outputs": {"json": json.dumps(SCHEMA)}},
        Structure("json", json.dumps(SCHEMA, separators=(",", ":"))),
    ),
    "vllm object": ({"structured_outputs": {"json_object": True}}, Structure("json_object")),
    "regex": ({"structured_outputs": {"regex": "[ab]+"}}, Structure("regex", "[ab]+")),
    "choice": ({"structured_outputs": {"choice": ["ja", "nein"]}}, Structure("choice", '["ja","nein"]')),
    "grammar": ({"structured_outputs": {"grammar": 'start: "a"'}}, Structure("grammar", 'start: "a"')),
}


@pytest.mark.parametrize("name", FORMS)
async def test_both_endpoints_pass_the_structure_on(api: Any, name: str) -> None:
    fields, structure = FORMS[name]
    for path, body in ((COMPLETIONS, {"prompt": "In"}), (CHAT, {"messages": HI})):
        status, answer = await api.post(path, {**body, **fields, "n": 2})
        assert status == 200, answer
        assert [request.sampling.structure for request in api.core.requests[-2:]] == [structure] * 2
        await api.events(path, **body, **fields, logprobs=None)
        assert asked(api) == structure
    message = structure and api.core.requests[-1].sampling.to_proto(1)
    assert (message.structure.kind, message.structure.text) == (structure.kind, structure.text)


async def test_text_is_no_structure(api: Any) -> None:
    status, _ = await api.post(CHAT, {"messages": HI, "response_format": {"type": "text"}})
    assert (status, asked(api)) == (200, None)
    assert not api.core.requests[-1].sampling.to_proto(1).HasField("structure")


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "unsatisfiable": (
        {"structured_outputs": {"json": {"type": "integer", "minimum": 2, "maximum": 1}}},
        "invalid_structure",
    ),
    "expression": ({"structured_outputs": {"regex": "a(b"}}, "invalid_structure"),
    "text of a schema": ({"structured_outputs": {"json": "{"}}, "invalid_value"),
    "two": ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "text"}}, "invalid_value"),
    "no end": ({"response_format": {"type": "json_object"}, "ignore_eos": True}, "invalid_value"),
    "deep": (
        {"structured_outputs": {"json": json.loads('{"items":' * 40 + "{}" + "}" * 40)}},
        "invalid_value",
    ),
    "deep text": ({"structured_outputs": {"json": '{"items":' * 300 + "{}" + "}" * 300}}, "invalid_value"),
}


@pytest.mark.parametrize("name", WRONG)
async def test_what_is_wrong_is_refused_with_the_reason(api: Any, name: str) -> None:
    fields, code = WRONG[name]
    for stream in (False, True):
        status, answer = await api.post(CHAT, {"messages": HI, "stream": stream, **fields})
        assert (status, answer["error"]["code"]) == (400, code), answer
        assert len(answer["error"]["message"]) > 10
    assert api.core.requests == []


async def test_nodes_without_the_library_are_told(api: Any) -> None:
    api.core.script = lambda request: [NoStructures("decode-0")]
    status, answer = await api.post(CHAT, {"messages": HI, "response_format": {"type": "json_object"}})
    assert (status, answer["error"]["code"]) == (501, "structure_unsupported")
    assert "moonpool[serve]" in answer["error"]["message"]


async def test_a_conductor_without_the_library_says_so(api: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammars, "find_spec", lambda name: None)
    status, answer = await api.post(CHAT, {"messages": HI, "response_format": {"type": "json_object"}})
    assert (status, answer["error"]["code"]) == (501, "structure_unsupported")
    assert "moonpool[serve]" in answer["error"]["message"]


async def test_each_structure_is_compiled_once(api: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[Structure] = []
    inner = grammars.Grammars._compile
    monkeypatch.setattr(
        grammars.Grammars,
        "_compile",
        lambda self, structure: compiled.append(structure) or inner(self, structure),
    )
    body = {"messages": HI, "structured_outputs": {"regex": "[a-z]{7}"}}
    await asyncio.gather(*(api.post(CHAT, body) for _ in range(5)))
    assert compiled == [Structure("regex", "[a-z]{7}")]


async def test_a_client_that_leaves_while_it_compiles_leaves_nothing(
    api: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    began, go = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    inner = grammars.Grammars._compile

    def slow(self: grammars.Grammars, structure: Structure) -> Any:
        loop.call_soon_threadsafe(began.set)
        asyncio.run_coroutine_threadsafe(go.wait(), loop).result()
        return inner(self, structure)

    monkeypatch.setattr(grammars.Grammars, "_compile", slow)
    body = {"messages": HI, "structured_outputs": {"regex": "[a-z]{8}"}}
    leaving = asyncio.create_task(api.post(CHAT, body))
    await began.wait()
    # The loop serves others meanwhile.
    assert (await api.post(CHAT, {"messages": HI}))[0] == 200
    leaving.cancel()
    await asyncio.wait((leaving,))
    staying = asyncio.create_task(api.post(CHAT, body))
    go.set()
    assert (await staying)[0] == 200
    assert len(api.core.requests) == 2


async def test_too_many_at_once_are_told_to_wait(api: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    go = asyncio.Event()
    loop = asyncio.get_running_loop()
    inner = grammars.Grammars._compile

    def slow(self: grammars.Grammars, structure: Structure) -> Any:
        asyncio.run_coroutine_threadsafe(go.wait(), loop).result()
        return inner(self, structure)

    monkeypatch.setattr(grammars.Grammars, "_compile", slow)
    monkeypatch.setattr(grammars, "_MAX_WAITING", 2)
    waiting = [
        asyncio.create_task(api.context.grammars.check(Structure("regex", f"a{{{count}}}")))
        for count in (1, 2)
    ]
    await asyncio.sleep(0)
    status, answer = await api.post(CHAT, {"messages": HI, "structured_outputs": {"regex": "b"}})
    assert (status, answer["error"]["code"]) == (429, "rate_limit_exceeded")
    go.set()
    await asyncio.gather(*waiting)


class City(pydantic.BaseModel):
    name: str
    inhabitants: int


async def test_the_official_client_parses(api: Any) -> None:
    api.core.script = lambda request: api.core.says('{"name": "Ulm", "inhabitants": 5}')
    async with openai.AsyncOpenAI(base_url=f"{api.url}/v1", api_key="any", max_retries=0) as client:
        answer = await client.chat.completions.parse(model="tiny", messages=HI, response_format=City)
        assert answer.choices[0].message.parsed == City(name="Ulm", inhabitants=5)
        structure = asked(api)
        assert structure is not None
        assert set(json.loads(structure.text)["properties"]) == {"name", "inhabitants"}
        async with client.chat.completions.stream(model="tiny", messages=HI, response_format=City) as stream:
            kinds = {event.type async for event in stream}
            final = await stream.get_final_completion()
        assert "content.done" in kinds
        assert final.choices[0].message.parsed == City(name="Ulm", inhabitants=5)

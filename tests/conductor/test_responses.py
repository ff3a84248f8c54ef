"""The Responses API, with the official client; and the endpoints about tokens."""

from __future__ import annotations

import json
from typing import Any

import openai
import pydantic
import pytest

from moonpool.conductor.api.responses import conversations
from moonpool.conductor.api.responses.conversations import Conversations
from moonpool.runtime.structure.grammars import Structure
from tests.conductor.conftest import prompt_of

LOOK: Any = {
    "type": "function",
    "name": "look",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}
CALL = '<tool_call>\n{"name": "look", "arguments": {"city": "Ulm"}}\n</tool_call>'


@pytest.fixture
def api(tools_api: Any) -> Any:
    return tools_api


async def test_text_and_the_next_turn(api: Any, client: openai.AsyncOpenAI) -> None:
    first = await client.responses.create(model="tiny", instructions="Be brief.", input="Hi")
    assert (first.output_text, first.status) == ("Hello, world.", "completed")
    assert first.usage is not None
    assert first.usage.total_tokens == first.usage.input_tokens + first.usage.output_tokens
    assert "<|system|>Be brief.<|eos|><|user|>Hi<|eos|>" in prompt_of(api)
    second = await client.responses.create(
        model="tiny", input=[{"role": "user", "content": "And?"}], previous_response_id=first.id
    )
    assert "<|user|>Hi<|eos|><|assistant|>Hello, world.<|eos|><|user|>And?<|eos|>" in prompt_of(api)
    assert "brief" not in prompt_of(api)
    assert second.previous_response_id == first.id
    with pytest.raises(openai.NotFoundError, match="whole conversation"):
        await client.responses.create(model="tiny", input="Hi", previous_response_id="resp_unheard-of")
    unkept = await client.responses.create(model="tiny", input="Hi", store=False)
    with pytest.raises(openai.NotFoundError):
        await client.responses.create(model="tiny", input="Hi", previous_response_id=unkept.id)


async def test_a_limit_leaves_it_incomplete(api: Any, client: openai.AsyncOpenAI) -> None:
    answer = await client.responses.create(model="tiny", input="Hi", max_output_tokens=2)
    assert answer.status == "incomplete"
    assert answer.incomplete_details is not None
    assert answer.incomplete_details.reason == "max_output_tokens"
    (message,) = answer.output
    assert message.status == "incomplete"


async def test_a_call_that_was_cut_off_is_not_complete(api: Any, client: openai.AsyncOpenAI) -> None:
    api.core.script = lambda request: api.core.says("Well. " + CALL)
    asked: dict[str, Any] = {"model": "tiny", "input": "Hi", "tools": [LOOK]}
    asked["max_output_tokens"] = len(api.core.says("Well. " + CALL.partition(' "Ulm')[0]))
    answer = await client.responses.create(**asked)
    async with client.responses.stream(**asked) as stream:
        events = [event async for event in stream]
    assert events[-1].type == "response.incomplete"
    for one in (answer, events[-1].response):
        text, call = one.output
        assert call.type == "function_call"
        assert call.arguments == '{"city":'
        assert (text.status, call.status) == ("completed", "incomplete")


async def test_calls_and_their_outputs(api: Any, client: openai.AsyncOpenAI) -> None:
    api.core.script = lambda request: api.core.says(CALL)
    answer = await client.responses.create(model="tiny", input="Hi", tools=[LOOK])
    (call,) = answer.output
    assert call.type == "function_call"
    assert (call.name, call.arguments) == ("look", '{"city": "Ulm"}')
    api.core.script = lambda request: api.core.says("Rain.")
    output: Any = [{"type": "function_call_output", "call_id": call.call_id, "output": "It rains"}]
    answer = await client.responses.create(
        model="tiny", input=output, previous_response_id=answer.id, tools=[LOOK]
    )
    assert answer.output_text == "Rain."
    assert "It rains" in prompt_of(api)
    assert '"look"' in prompt_of(api).partition("<|assistant|>")[2]
    await client.responses.create(
        model="tiny", input="Hi", tools=[LOOK], tool_choice={"type": "function", "name": "look"}
    )
    assert api.core.requests[-1].sampling.structure.kind == "grammar"


@pytest.mark.parametrize(
    ("arguments", "cut"), [("{city: Ulm}", False), ('{"city": "Ulm"}', True)], ids=["no JSON", "cut off"]
)
async def test_a_response_with_a_broken_call_is_continued(
    api: Any, client: openai.AsyncOpenAI, arguments: str, cut: bool
) -> None:
    text = CALL.replace('{"city": "Ulm"}', arguments)
    begun = text.partition(' "Ulm')[0] if cut else text
    api.core.script = lambda request: api.core.says(text)
    limit: Any = {"max_output_tokens": len(api.core.says(begun))} if cut else {}
    answer = await client.responses.create(model="tiny", input="Hi", tools=[LOOK], **limit)
    call = answer.output[-1]
    api.core.script = lambda request: api.core.says("Rain.")
    assert call.type == "function_call"
    assert call.arguments == ('{"city":' if cut else arguments)
    output: Any = [{"type": "function_call_output", "call_id": call.call_id, "output": "It is broken"}]
    answer = await client.responses.create(
        model="tiny", input=output, previous_response_id=answer.id, tools=[LOOK]
    )
    assert answer.output_text == "Rain."
    assert "It is broken" in prompt_of(api)
    assert json.dumps(call.arguments) in prompt_of(api)


async def test_fields_of_chats_reach_the_core(api: Any, client: openai.AsyncOpenAI) -> None:
    sent: Any = {
        "presence_penalty": 1,
        "frequency_penalty": -1.5,
        "repetition_penalty": 1.2,
        "logit_bias": {"7": -100},
        "min_tokens": 2,
        "stop_token_ids": [9],
        "ignore_eos": True,
        "speculation": False,
        "timeout": 2.5,
    }
    await client.responses.create(model="tiny", input="Hi", max_output_tokens=5, extra_body=sent)
    request = api.core.requests[-1]
    sampling = request.sampling
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (1, -1.5)
    assert (sampling.repetition_penalty, sampling.logit_bias) == (1.2, {7: -100})
    assert (sampling.min_tokens, sampling.stop_token_ids, sampling.ignore_eos) == (2, (9,), True)
    assert not sampling.speculation
    assert 0 < request.deadline_s <= 2.5


@pytest.mark.parametrize("text", [{}, {"text": {"format": {"type": "text"}}}], ids=str)
async def test_a_structure_of_vllms_api(api: Any, client: openai.AsyncOpenAI, text: Any) -> None:
    sent = {"structured_outputs": {"regex": "[a-z]+"}}
    await client.responses.create(model="tiny", input="Hi", extra_body=sent, **text)
    assert api.core.requests[-1].sampling.structure == Structure("regex", "[a-z]+")


async def test_events(api: Any, client: openai.AsyncOpenAI) -> None:
    api.core.script = lambda request: api.core.says("Well. " + CALL)
    async with client.responses.stream(model="tiny", input="Hi", tools=[LOOK]) as stream:
        events = [event async for event in stream]
        final = await stream.get_final_response()
    assert [event.sequence_number for event in events if hasattr(event, "sequence_number")] == sorted(
        event.sequence_number for event in events if hasattr(event, "sequence_number")
    )
    kinds = list(dict.fromkeys(event.type for event in events))
    assert kinds == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
        "response.completed",
    ]
    assert final.output_text == "Well. "
    assert final.output[1].type == "function_call"
    assert final.output[1].arguments == '{"city": "Ulm"}'


async def test_text_comes_together_with_the_end_of_a_call(api: Any, client: openai.AsyncOpenAI) -> None:
    api.core.script = lambda request: api.core.says(CALL.replace("\n", "") + " Rain?")
    # What may be the beginning of the stop string is held back, and comes in one piece.
    stop: Any = {"stop": "}}</tool_call> Rain."}
    stream = await client.responses.create(
        model="tiny", input="Hi", tools=[LOOK], stream=True, extra_body=stop
    )
    done = [event.item async for event in stream if event.type == "response.output_item.done"]
    assert [item.type for item in done] == ["function_call", "message"]
    assert done[0].type == "function_call"
    assert done[0].arguments == '{"city": "Ulm"}'
    assert done[1].type == "message"
    assert done[1].content[0].to_dict()["text"] == " Rain?"


class City(pydantic.BaseModel):
    name: str


async def test_the_client_parses(api: Any, client: openai.AsyncOpenAI) -> None:
    api.core.script = lambda request: api.core.says('{"name": "Ulm"}')
    answer = await client.responses.parse(model="tiny", input="Hi", text_format=City)
    assert answer.output_parsed == City(name="Ulm")
    assert api.core.requests[-1].sampling.structure.kind == "json"


@pytest.mark.parametrize(
    "body",
    [
        {"input": "Hi", "background": True},
        {"input": "Hi", "tools": [{"type": "web_search"}]},
        {"input": [{"type": "computer_call"}]},
        {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
        {"input": 5},
        {"input": ["Hi"]},
        {},
        {"input": "Hi", "previous_response_id": 5},
        {"input": "Hi", "tools": 5},
        {"input": "Hi", "text": {"format": {"type": "xml"}}},
        {
            "input": "Hi",
            "text": {"format": {"type": "json_object"}},
            "structured_outputs": {"regex": "a"},
        },
        {"input": "Hi", "bad_words": ["damn"]},
        {"input": "Hi", "truncate_prompt_tokens": 5},
    ],
    ids=str,
)
async def test_what_does_not_map_is_refused(api: Any, body: dict[str, Any]) -> None:
    status, answer = await api.post("/v1/responses", body)
    assert status == 400, answer
    assert len(answer["error"]["message"]) > 10
    assert api.core.requests == []


async def test_conversations_are_forgotten_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversations, "MAX_KEPT", 2)
    kept = Conversations()
    for name in "abc":
        await kept.put("t", name, [{"content": name}])
    assert await kept.get("t", "a") is None
    assert await kept.get("t", "c") == [{"content": "c"}]
    assert await kept.get("another", "c") is None
    monkeypatch.setattr(conversations, "MAX_CHARS", 100)
    await kept.put("t", "d", [{"content": "x" * 90}])
    assert await kept.get("t", "c") is None


async def test_a_response_that_is_written_again_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    # A stream that broke just before its end has its conversation kept, and again when it goes on.
    monkeypatch.setattr(conversations, "MAX_CHARS", 300)
    kept = Conversations()
    for name in ("before", "again", "again", "again"):
        await kept.put("t", name, [{"content": "x" * 90}])
    assert await kept.get("t", "before") is not None
    assert await kept.get("t", "again") is not None


async def test_tokens_to_and_fro(api: Any) -> None:
    status, answer = await api.post("/tokenize", {"prompt": "Hello, 世界", "return_token_strs": True})
    assert status == 200
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"])
    assert answer["max_model_len"] == 8192
    assert (await api.post("/detokenize", {"tokens": answer["tokens"]}))[1] == {"prompt": "Hello, 世界"}
    status, chat = await api.post("/tokenize", {"messages": [{"role": "user", "content": "Hi"}]})
    assert status == 200
    assert chat["token_strs"] is None
    text = (await api.post("/detokenize", {"tokens": chat["tokens"]}))[1]["prompt"]
    assert text == "<|user|>Hi<|eos|><|assistant|>"
    for path, body in (
        ("/tokenize", {}),
        ("/tokenize", {"prompt": [1, 2]}),
        ("/tokenize", {"prompt": "a", "return_token_strs": 1}),
        ("/detokenize", {}),
        ("/detokenize", {"tokens": [320]}),
        ("/detokenize", {"tokens": ["a"]}),
        ("/v1/embeddings", {"input": "a"}),
    ):
        status, answer = await api.post(path, body)
        assert status == 400, (path, body)
        assert len(answer["error"]["message"]) > 10
    assert (await api.post("/tokenize", {"prompt": "a", "model": "other"}))[0] == 404

"""The official client works unchanged."""

from __future__ import annotations

from typing import Any

import pytest

from moonpool.conductor.errors import NoNodes, RequestRejected
from moonpool.conductor.text.chat_template import ChatTemplate
from tests.conductor.conftest import prompt_of
from tests.lazily import Lazily

openai = Lazily("openai")

MESSAGES: list[Any] = [{"role": "user", "content": "Hi"}]


async def test_models(client: openai.AsyncOpenAI) -> None:
    assert [model.id async for model in client.models.list()] == ["tiny"]
    assert (await client.models.retrieve("tiny")).owned_by == "moonpool"


async def test_chat(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(
        model="tiny", messages=MESSAGES, n=2, logprobs=True, top_logprobs=2, seed=3, stop=["rld"], user="me"
    )
    assert [choice.message.content for choice in answer.choices] == ["Hello, wo"] * 2
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].logprobs is not None
    assert answer.choices[0].logprobs.content is not None
    assert len(answer.choices[0].logprobs.content[0].top_logprobs) == 2
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 0


async def test_a_developers_message_is_the_systems(api: Any, client: openai.AsyncOpenAI) -> None:
    messages: Any = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    await client.chat.completions.create(model="tiny", messages=messages)
    assert "<|system|>Be brief.<|eos|><|user|>Hi<|eos|>" in prompt_of(api)
    # Not where the template has a place of its own for it.
    api.context.template = ChatTemplate(
        "{% for m in messages %}{{ 'D' if m.role == 'developer' else m.role }}: {{ m.content }} {% endfor %}",
        {},
    )
    await client.chat.completions.create(model="tiny", messages=messages)
    assert prompt_of(api) == "D: Be brief. user: Hi "


async def test_chat_streamed(client: openai.AsyncOpenAI) -> None:
    stream = await client.chat.completions.create(
        model="tiny", messages=MESSAGES, stream=True, stream_options={"include_usage": True}, max_tokens=3
    )
    chunks = [chunk async for chunk in stream]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-2].choices[0].finish_reason == "length"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 3


async def test_chat_through_the_streaming_helper(client: openai.AsyncOpenAI) -> None:
    async with client.chat.completions.stream(model="tiny", messages=MESSAGES) as stream:
        async for _ in stream:
            pass
        final = await stream.get_final_completion()
    assert final.choices[0].message.content == "Hello, world."
    assert final.choices[0].finish_reason == "stop"


async def test_completion(client: openai.AsyncOpenAI) -> None:
    answer = await client.completions.create(
        model="tiny",
        prompt=["In", "the"],
        echo=True,
        logprobs=1,
        max_tokens=2,
        extra_body={"return_token_ids": True},
    )
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert answer.choices[1].text.startswith("the")
    assert answer.choices[0].logprobs is not None
    assert answer.choices[0].logprobs.tokens is not None
    assert answer.choices[0].model_extra is not None
    assert len(answer.choices[0].model_extra["token_ids"]) == 2


async def test_completion_streamed(client: openai.AsyncOpenAI) -> None:
    stream = await client.completions.create(model="tiny", prompt=[5, 6], stream=True)
    assert "".join([chunk.choices[0].text async for chunk in stream]) == "Hello, world."


async def test_errors_become_the_clients_exceptions(api: Any, client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        await client.completions.create(model="gpt-4", prompt="x")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as bad:
        await client.completions.create(model="tiny", prompt="x", temperature=9)
    assert (bad.value.param, bad.value.type) == ("temperature", "invalid_request_error")
    api.core.script = lambda request: [RequestRejected("full", 1.0)]
    with pytest.raises(openai.RateLimitError):
        await client.completions.create(model="tiny", prompt="x")
    api.core.script = lambda request: [5, NoNodes("decode", 0.0)]
    with pytest.raises(openai.APIError, match="no decode node"):
        async for _ in await client.completions.create(model="tiny", prompt="x", stream=True):
            pass


async def test_the_client_retries_when_told_to(api: Any, client: openai.AsyncOpenAI) -> None:
    failures: list[Exception] = [RequestRejected("full", 0.1)]
    api.core.script = lambda request: [failures.pop()] if failures else api.core.says("ok")
    patient = client.with_options(max_retries=1)
    answer = await patient.completions.create(model="tiny", prompt="x")
    assert answer.choices[0].text == "ok"
    assert len(api.core.requests) == 2

"""Hints of agents in the API: what is passed on, what is refused, and prompts that are prefetched."""

from __future__ import annotations

from typing import Any

import pytest

from moonpool.conductor.request import CacheHint
from tests.conductor.conftest import prompt_of

MESSAGES = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "I call a tool."}]


@pytest.mark.parametrize(
    ("path", "prompt"),
    [
        ("/v1/completions", {"prompt": "In the"}),
        ("/v1/chat/completions", {"messages": MESSAGES[:1]}),
        ("/v1/responses", {"input": "Hi"}),
        ("/v1/prefetch", {"messages": MESSAGES}),
    ],
)
async def test_hints_go_with_the_request(api: Any, path: str, prompt: dict[str, Any]) -> None:
    status, answer = await api.post(path, prompt | {"cache_hint": {"pin_s": 30, "prefetch": True}})
    assert status == 200, answer
    assert api.core.requests[-1].cache_hint == CacheHint(30.0, prefetch=True)
    assert (await api.post(path, prompt))[0] == 200
    assert api.core.requests[-1].cache_hint is None


@pytest.mark.parametrize(
    ("hint", "says"),
    [
        ({"pin_s": -1}, "greater than or equal to 0"),
        ({"pin_s": 3601}, "less than or equal to 3600"),
        ({"pin_s": "30"}, "number"),
        ({"prefetch": 1}, "boolean"),
        ({"pin_s": 1, "drop_after": True}, "together"),
        ({"drop_from": 512}, "drop_from"),
        ([], "object"),
    ],
)
async def test_hints_that_mean_nothing_are_refused(api: Any, hint: Any, says: str) -> None:
    status, answer = await api.post("/v1/completions", {"prompt": "In the", "cache_hint": hint})
    assert status == 400
    assert says in answer["error"]["message"]
    assert answer["error"]["param"].startswith("cache_hint")
    assert api.core.requests == []


async def test_a_prefetch_computes_the_messages_alone(api: Any) -> None:
    api.core.cached = 4
    body = {
        "messages": MESSAGES,
        **{"stream": True, "n": 3, "max_tokens": 50, "response_format": {"type": "json_object"}},
    }
    status, answer = await api.post("/v1/prefetch", body)
    assert status == 200, answer
    (request,) = api.core.requests
    assert request.sampling.max_tokens == 1
    assert request.sampling.structure is None
    assert prompt_of(api) == "<|bos|><|user|>Hi<|eos|><|assistant|>I call a tool.<|eos|>"
    assert answer["object"] == "prefetch"
    assert (answer["prompt_tokens"], answer["cached_tokens"]) == (len(request.prompt_token_ids), 4)


@pytest.mark.parametrize(
    ("body", "status"),
    [({}, 400), ({"messages": MESSAGES, "model": "unknown"}, 404), ({"prompt": "In"}, 400)],
)
async def test_what_cannot_be_prefetched_is_refused(api: Any, body: dict[str, Any], status: int) -> None:
    assert (await api.post("/v1/prefetch", body))[0] == status


async def test_the_tools_of_the_next_turn_are_in_its_prompt(tools_api: Any) -> None:
    tool = {"type": "function", "function": {"name": "find", "parameters": {"type": "object"}}}
    status, answer = await tools_api.post("/v1/prefetch", {"messages": MESSAGES, "tools": [tool]})
    assert status == 200, answer
    assert '"find"' in prompt_of(tools_api)

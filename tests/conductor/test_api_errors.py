"""Whatever is wrong with a request, the answer has OpenAI's shape and names the field."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from moonpool.conductor.errors import (
    ConductorClosed,
    DeadlineExceeded,
    NoNodes,
    RequestEndsLives,
    RequestFailed,
    RequestInvalid,
    RequestRejected,
)

LOOK = {"type": "function", "function": {"name": "look"}}
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HI = [{"role": "user", "content": "Hi"}]


def check_shape(answer: Any) -> Any:
    assert set(answer) == {"error"}
    error = answer["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str)
    assert error["message"]
    return error


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("prompt", None),
        ("prompt", ""),
        ("prompt", []),
        ("prompt", 7),
        ("prompt", {"text": "a"}),
        ("prompt", 1.5),
        ("prompt[0]", [""]),
        ("prompt[1]", ["a", ""]),
        ("prompt[1]", ["a", 5]),
        ("prompt[1]", [[1], []]),
        ("prompt[1]", [1, "a"]),
        ("prompt[0]", [True]),
        ("prompt[1]", [1, 2.0]),
        ("prompt[0][1]", [[1, None]]),
        ("prompt", [1, -1]),
        ("prompt", [1, 320]),
        ("prompt[0]", [[1, 2**40]]),
        ("prompt", list(range(256))),
        ("prompt", "In the beginning " * 100),
        ("temperature", -0.1),
        ("temperature", 2.1),
        ("temperature", "1"),
        ("temperature", True),
        ("temperature", [1]),
        ("top_p", 0),
        ("top_p", 1.01),
        ("top_k", -2),
        ("top_k", 1.5),
        ("top_k", 2**31),
        ("top_k", 2**70),
        ("timeout", 0),
        ("timeout", -1),
        ("timeout", "5"),
        ("min_p", 2),
        ("seed", 1.5),
        ("seed", 2**64),
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("max_tokens", "10"),
        ("max_tokens", 256),
        ("max_completion_tokens", 10**9),
        ("min_tokens", -1),
        ("min_tokens", 17.5),
        ("n", 0),
        ("n", 129),
        ("n", "2"),
        ("best_of", 3),
        ("stop", ""),
        ("stop", 5),
        ("stop", ["x"] * 65),
        ("stop[0]", [""]),
        ("stop[1]", ["a", 3]),
        ("stop_token_ids", 5),
        ("stop_token_ids", [320]),
        ("stop_token_ids[0]", [-1]),
        ("logprobs", 21),
        ("logprobs", -1),
        ("logprobs", True),
        ("echo", "yes"),
        ("presence_penalty", 2.5),
        ("frequency_penalty", -2.5),
        ("repetition_penalty", 0),
        ("repetition_penalty", 1e-300),
        ("logit_bias", []),
        ("logit_bias", {"a": 1}),
        ("logit_bias", {"320": 1}),
        ("logit_bias", {"²": 1}),
        ("logit_bias", {"0" * 20 + "320": 1}),
        ("logit_bias", {"9" * 5000: 1}),
        ("logit_bias.5", {"5": 101}),
        ("ignore_eos", 1),
        ("stream", "true"),
        ("stream_options", {"include_usage": True}),
        ("stream_options", 3),
        ("return_token_ids", "no"),
        ("priority", 2**40),
        ("user", 5),
        ("model", 5),
        ("suffix", "the end"),
        ("response_format.type", {"type": "xml"}),
        ("response_format", {"type": "json_schema"}),
        ("structured_outputs", {"regex": ".*", "choice": ["a"]}),
        ("structured_outputs.choice", {"choice": []}),
        ("structured_outputs.xml", {"xml": "a"}),
        ("guided_json", {"type": "object"}),
        ("tools", [{"type": "function", "function": {"name": "look"}}]),
        ("allowed_token_ids", [5]),
        ("bad_words", ["damn"]),
        ("truncate_prompt_tokens", 5),
        ("prompt_logprobs", 0),
        ("prompt_logprobs", 1),
    ],
)
async def test_a_wrong_field_of_a_completion_is_named(api: Any, field: str, value: Any) -> None:
    name = field.partition("[")[0].partition(".")[0]
    status, answer = await api.post(COMPLETIONS, {"prompt": "In", **{name: value}})
    error = check_shape(answer)
    assert (status, error["type"]) == (400, "invalid_request_error"), answer
    # Of the two ways to see a wrong stop, the one that names the item is right, too.
    assert error["param"] in (field, f"{field}[0]"), answer
    assert error["code"]
    assert api.core.requests == []


@pytest.mark.parametrize(
    ("field", "body"),
    [
        ("messages", {}),
        ("messages", {"messages": []}),
        ("messages", {"messages": "Hi"}),
        ("messages[0]", {"messages": ["Hi"]}),
        ("messages[0].role", {"messages": [{"content": "Hi"}]}),
        ("messages[0].role", {"messages": [{"role": 5, "content": "Hi"}]}),
        ("messages[0]", {"messages": [{"role": "user"}]}),
        ("messages[0].content", {"messages": [{"role": "user", "content": 5}]}),
        ("messages[0].content", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}),
        ("messages[0].content", {"messages": [{"role": "user", "content": ["Hi"]}]}),
        ("messages", {"messages": [{"role": "tool", "content": "5"}]}),  # the template's own refusal
        ("messages", {"messages": [{"role": "user", "content": "In the beginning " * 100}]}),
        ("top_logprobs", {"messages": HI, "top_logprobs": 2}),
        ("top_logprobs", {"messages": HI, "logprobs": True, "top_logprobs": 21}),
        ("logprobs", {"messages": HI, "logprobs": 2}),
        ("max_tokens", {"messages": HI, "max_tokens": 0}),
        ("max_completion_tokens", {"messages": HI, "max_completion_tokens": 256}),
        ("min_tokens", {"messages": HI, "max_tokens": 2, "min_tokens": 3}),
        ("tools[0].function", {"messages": HI, "tools": [{"type": "function"}]}),
        (
            "tools[0].function.name",
            {"messages": HI, "tools": [{"type": "function", "function": {"name": "a b"}}]},
        ),
        ("tool_choice", {"messages": HI, "tool_choice": "required"}),
        (
            "tool_choice",
            {
                "messages": HI,
                "tools": [LOOK],
                "tool_choice": {"type": "function", "function": {"name": "go"}},
            },
        ),
        (
            "tool_choice",
            {
                "messages": HI,
                "tools": [LOOK],
                "tool_choice": "required",
                "response_format": {"type": "json_object"},
            },
        ),
        ("tool_choice", {"messages": HI, "tools": [LOOK], "tool_choice": "foo"}),
        ("tool_choice", {"messages": HI, "tools": [LOOK], "tool_choice": {"type": "function"}}),
        ("chat_template", {"messages": HI, "chat_template": "{{ messages }}"}),
        ("echo", {"messages": HI, "echo": True}),
        ("chat_template_kwargs", {"messages": HI, "chat_template_kwargs": 5}),
        (
            "continue_final_message",
            {"messages": HI, "continue_final_message": True, "add_generation_prompt": True},
        ),
    ],
)
async def test_a_wrong_field_of_a_chat_is_named(api: Any, field: str, body: dict[str, Any]) -> None:
    status, answer = await api.post(CHAT, body)
    error = check_shape(answer)
    assert (status, error["param"]) == (400, field), answer
    assert api.core.requests == []


@pytest.mark.parametrize("path", [CHAT, "/v1/responses", "/v1/prefetch"])
async def test_fields_that_ask_for_nothing_are_accepted(api: Any, path: str) -> None:
    nothing = {
        "allowed_token_ids": None,
        "bad_words": [],
        "truncate_prompt_tokens": None,
        "prompt_logprobs": None,
        "chat_template": "",
        "echo": False,
        "surprise": True,
    }
    body = {"input": "Hi"} if path == "/v1/responses" else {"messages": HI}
    status, answer = await api.post(path, {**body, **nothing})
    assert status == 200, answer


async def test_a_template_of_the_request_is_refused_for_a_prefetch(api: Any) -> None:
    status, answer = await api.post("/v1/prefetch", {"messages": HI, "chat_template": "{{ messages }}"})
    assert (status, check_shape(answer)["param"]) == (400, "chat_template")


async def test_too_long_a_prompt_is_told_with_the_numbers(api: Any) -> None:
    _, answer = await api.post(COMPLETIONS, {"prompt": [5] * 300})
    error = answer["error"]
    assert error["code"] == "context_length_exceeded"
    assert "256 tokens" in error["message"]
    assert "300 tokens" in error["message"]
    _, answer = await api.post(COMPLETIONS, {"prompt": [5] * 200, "max_tokens": 57})
    message = answer["error"]["message"]
    assert all(number in message for number in ("256", "257", "200", "57", "56"))


async def test_an_unknown_model_is_not_found(api: Any) -> None:
    status, answer = await api.post(CHAT, {"model": "gpt-4", "messages": HI})
    error = check_shape(answer)
    assert (status, error["param"], error["code"]) == (404, "model", "model_not_found")
    async with api.client.get(f"{api.url}/v1/models/gpt-4") as response:
        assert response.status == 404
        check_shape(await response.json())


@pytest.mark.parametrize(
    "raw", [b"", b"{", b"[]", b"3", b'"x"', b"\xff", b'{"prompt": NaN}', b'{"prompt": "\\ud800"}']
)
async def test_a_body_that_is_no_json_object(api: Any, raw: bytes) -> None:
    async with api.client.post(api.url + COMPLETIONS, data=raw) as response:
        assert response.status == 400
        assert check_shape(await response.json())["code"] == "invalid_json"


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e400", "-1e400", "9" * 400])
@pytest.mark.parametrize("field", ["timeout", "temperature", "top_k", "seed", "priority", "surprise"])
async def test_a_number_that_is_none_gets_nowhere(api: Any, field: str, number: str) -> None:
    raw = f'{{"prompt": "In", "{field}": {number}}}'
    async with api.client.post(api.url + COMPLETIONS, data=raw) as response:
        assert response.status == 400, await response.text()
        check_shape(await response.json())
    assert api.core.requests == []


@pytest.mark.parametrize("chunked", [False, True])
async def test_a_body_over_the_limit(api: Any, chunked: bool) -> None:
    raw = json.dumps({"prompt": "a" * (1 << 17)}).encode()

    async def pieces() -> Any:
        for start in range(0, len(raw), 4096):
            yield raw[start : start + 4096]

    async with api.client.post(api.url + COMPLETIONS, data=pieces() if chunked else raw) as response:
        assert response.status == 413
        assert check_shape(await response.json())["code"] == "body_too_large"


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/nothing", 404),
        ("GET", "/v1/completions", 405),
        ("POST", "/v1/models", 405),
        ("DELETE", "/", 405),
        ("GET", "/v1/requests/unknown/timeline", 404),
        ("GET", "/v1/requests/unknown/timeline?format=xml", 400),
        ("GET", "/v1/requests?limit=0", 400),
        ("GET", f"/v1/requests?limit=00000001{10**20}", 400),
        ("GET", "/static/../app.py", 404),
        ("GET", "/static/missing.js", 404),
    ],
)
async def test_wrong_routes_and_methods(api: Any, method: str, path: str, status: int) -> None:
    async with api.client.request(method, api.url + path) as response:
        assert response.status == status
        check_shape(await response.json())
        assert response.headers["x-request-id"]
        assert status != 405 or response.headers["Allow"]


FAILURES = [
    (RequestRejected("the cluster is full", 2.4), 429, "rate_limit_exceeded"),
    (NoNodes("decode", 1.0), 503, "no_nodes"),
    (DeadlineExceeded(300.0, 0), 504, "deadline_exceeded"),
    (RequestInvalid("it has more blocks than any node"), 400, "invalid_request"),
    (ConductorClosed(), 503, "draining"),
    (RequestFailed("node d-1 is unavailable", 4, 3), 500, "request_failed"),
    (RequestEndsLives(["node d-1: rank 1 is lost", "node d-2: rank 1 is lost"]), 400, "request_ends_nodes"),
    (ZeroDivisionError("a bug"), 500, "internal_error"),
]


@pytest.mark.parametrize(("failure", "status", "code"), FAILURES)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_failure_before_the_first_token_has_a_status(
    api: Any, failure: Exception, status: int, code: str, stream: bool
) -> None:
    api.core.script = lambda request: [failure]
    body = {"prompt": "In", "stream": stream}
    async with api.client.post(api.url + COMPLETIONS, json=body) as response:
        assert response.status == status
        assert check_shape(await response.json())["code"] == code
        assert response.headers.get("Retry-After") == {429: "3", 503: "1"}.get(status)


@pytest.mark.parametrize(("failure", "status", "code"), FAILURES)
async def test_a_failure_within_a_stream_is_its_last_event(
    api: Any, failure: Exception, status: int, code: str
) -> None:
    api.core.script = lambda request: api.core.says("abc", failure)
    *events, last = await api.events(COMPLETIONS, prompt="In")
    assert check_shape(last)["code"] == code
    assert "".join(event["choices"][0]["text"] for event in events) == "abc"


async def test_one_failed_choice_cancels_the_others(api: Any) -> None:
    never = asyncio.Event()
    api.core.script = lambda request: (
        [5, NoNodes("decode", 1.0)] if len(request.prompt_token_ids) == 1 else [5, never]
    )
    status, answer = await api.post(COMPLETIONS, {"prompt": [[7, 7], [7], [7, 7]]})
    assert (status, answer["error"]["code"]) == (503, "no_nodes")
    await api.core.until(lambda: not api.core.running)
    assert len(api.core.cancelled) == 2

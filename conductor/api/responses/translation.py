"""From a request of the Responses API to a chat."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from moonpool.conductor.api.errors import ApiError, bad_request
from moonpool.conductor.api.schemas import REFUSED

# Fields with the same name and meaning in both.
_SAME = (
    *("model", "stream", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "user", "priority"),
    *("parallel_tool_calls", "service_tier", "cache_salt", "cache_hint", "chat_template_kwargs"),
    *("stream_options", "past", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias"),
    *("min_tokens", "stop_token_ids", "include_stop_str_in_output", "ignore_eos", "skip_special_tokens"),
    *("speculation", "timeout", "structured_outputs"),
    # The chat refuses these.
    *REFUSED.keys() - {"tools"},
)
# Ignoring these would change the meaning of a request.
_REFUSED = {
    "background": "responses in the background are not supported",
    "conversation": "conversations are not kept: use previous_response_id",
    "prompt": "stored prompts are not supported",
    "max_tool_calls": "no tools run here",
}
_PARTS = ("input_text", "output_text", "text")


def chat_of(given: Mapping[str, Any], earlier: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The body of the chat. ``earlier``: messages of the responses before.

    Raises:
        ApiError: 400 for what has no equal in a chat.
    """
    for name, why in _REFUSED.items():
        if given.get(name):
            raise bad_request(f"{name}: {why}", name, "unsupported_parameter")
    chat = {name: given[name] for name in _SAME if given.get(name) is not None}
    if given.get("max_output_tokens") is not None:
        chat["max_completion_tokens"] = given["max_output_tokens"]
    instructions = given.get("instructions")
    system = [{"role": "system", "content": instructions}] if instructions else []
    chat["messages"] = [*system, *earlier, *messages_of(given.get("input"))]
    if given.get("tools"):
        chat["tools"] = [_tool(tool, i) for i, tool in enumerate(_list(given["tools"], "tools"))]
    choice = given.get("tool_choice")
    if isinstance(choice, Mapping):
        choice = {"type": choice.get("type"), "function": {"name": choice.get("name")}}
    if choice is not None:
        chat["tool_choice"] = choice
    form = (given.get("text") or {}).get("format") if isinstance(given.get("text"), Mapping) else None
    if form is not None and form != {"type": "text"}:
        if "structured_outputs" in chat:
            raise bad_request(
                "structured_outputs: not allowed together with text.format", "structured_outputs"
            )
        chat["response_format"] = _format(form)
    return chat


def messages_of(given: Any) -> list[dict[str, Any]]:
    """The messages of an ``input``: a text, or a list of messages, calls and their outputs."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    messages: list[dict[str, Any]] = []
    for i, item in enumerate(_list(given, "input")):
        where = f"input[{i}]"
        if not isinstance(item, Mapping):
            raise bad_request(f"{where}: must be an object", where)
        kind = item.get("type", "message")
        if kind == "message":
            role = "system" if item.get("role") == "developer" else item.get("role")
            messages.append({"role": role, "content": _text(item.get("content"), where)})
        elif kind == "function_call":
            call = {
                "id": item.get("call_id"),
                "type": "function",
                "function": {"name": item.get("name"), "arguments": item.get("arguments")},
            }
            if messages and messages[-1]["role"] == "assistant":
                messages[-1].setdefault("tool_calls", []).append(call)
            else:
                messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
        elif kind == "function_call_output":
            output = _text(item.get("output"), where)
            messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": output})
        elif kind != "reasoning":
            raise bad_request(f"{where}: items of the type {str(kind)[:64]!r} are not supported", where)
    return messages


def _text(content: Any, where: str) -> Any:
    if not isinstance(content, list):
        return content
    for part in content:
        if not isinstance(part, Mapping) or part.get("type") not in _PARTS:
            raise bad_request(f"{where}.content: only text is supported", f"{where}.content")
    return "\n".join(str(part.get("text", "")) for part in content)


def _tool(tool: Any, position: int) -> dict[str, Any]:
    where = f"tools[{position}]"
    if not isinstance(tool, Mapping) or tool.get("type") != "function":
        raise bad_request(f"{where}: only functions are supported", where, "unsupported_parameter")
    function = {name: tool[name] for name in ("name", "description", "parameters", "strict") if name in tool}
    return {"type": "function", "function": function}


def _format(form: Any) -> Any:
    if not isinstance(form, Mapping) or form.get("type") != "json_schema":
        return form
    schema = {name: form[name] for name in ("name", "schema", "strict") if name in form}
    return {"type": "json_schema", "json_schema": schema}


def _list(value: Any, name: str) -> list[Any]:
    if not isinstance(value, list):
        raise bad_request(f"{name}: must be a list", name)
    return value


def not_found(response_id: str) -> ApiError:
    return ApiError(
        404,
        f"no response {response_id[:64]!r} is known: the latest ones of each tenant are kept for an hour; "
        "send the whole conversation as input",
        param="previous_response_id",
        code="previous_response_not_found",
    )

"""Fields of chats about tools, as in OpenAI's API."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import orjson
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

MAX_TOOLS = 128
_Name = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]


class _Field(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")  # what is not known here is for the chat template


class Function(_Field):
    name: _Name
    description: str | None = None
    parameters: dict[str, Any] | None = None  # a JSON schema; None: no parameters


class Tool(_Field):
    type: Literal["function"]
    function: Function


class NamedFunction(_Field):
    name: _Name


class NamedTool(_Field):
    type: Literal["function"]
    function: NamedFunction


ToolChoice = Literal["none", "auto", "required"] | NamedTool


def _with_objects(calls: Any) -> Any:
    """Calls of an earlier message with their arguments as objects, as chat templates want them.

    Arguments that are not JSON stay a text: a model may have written them, or a limit cut them off.
    """
    if not isinstance(calls, list):
        return [] if calls is None else calls
    return [_with_object(call) for call in calls]


def _with_object(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = orjson.loads(function["arguments"] or "{}")
    except orjson.JSONDecodeError:
        return call
    return {**call, "function": {**function, "arguments": arguments}}


EarlierCalls = Annotated[list[dict[str, Any]], BeforeValidator(_with_objects)]

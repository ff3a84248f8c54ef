"""Schemas of request bodies. Errors name the wrong field as in the request."""

from __future__ import annotations

import logging
import reprlib
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from moonpool.conductor.api.errors import ApiError, bad_request
from moonpool.conductor.api.structure.fields import ResponseFormat, StructuredOutputs
from moonpool.conductor.api.structure.tool_fields import MAX_TOOLS, EarlierCalls, NamedTool, Tool, ToolChoice
from moonpool.conductor.request import CacheHint
from moonpool.runtime.structure.grammars import Structure

log = logging.getLogger(__name__)

MAX_CHOICES = 128  # n
MAX_LOGPROBS = 20
MAX_STOPS = 64
MAX_STOP_CHARS = 1024
MAX_PIN_S = 3600.0
MAX_INT32 = 2**31 - 1

# Ignoring these would silently change the meaning of a request.
REFUSED = {
    "tools": "tools are for /v1/chat/completions",
    "functions": "this form is of an earlier API: use tools",
    "suffix": "filling in before a suffix is not supported",
    "use_beam_search": "beam search is not supported",
    "guided_json": "use structured_outputs",
    "guided_regex": "use structured_outputs",
    "guided_choice": "use structured_outputs",
    "guided_grammar": "use structured_outputs",
    "prompt_embeds": "embeddings as prompts are not supported",
    "allowed_token_ids": "use logit_bias, or structured_outputs",
    "bad_words": "use logit_bias",
    "truncate_prompt_tokens": "prompts are not cut: send a shorter one",
    "prompt_logprobs": "use echo and logprobs of /v1/completions",
    "chat_template": "the checkpoint's template is used: render the prompt, and send it to /v1/completions",
    "echo": "the prompt is repeated by /v1/completions only",
}
_HARMLESS: tuple[object, ...] = ([], {}, "", False, {"type": "text"})

_seen_unknown: set[str] = set()


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _as_text(content: Any) -> Any:
    """The text of a message in parts; only text parts are supported."""
    if not isinstance(content, list):
        return content
    for position, part in enumerate(content):
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise ValueError(f'part {position} is not {{"type": "text", "text": …}}: only text is supported')
    return "\n".join(part["text"] for part in content)


StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]
TokenId = Annotated[int, Field(ge=0)]
Penalty = Annotated[float, Field(ge=-2, le=2)]


class _Schema(BaseModel):
    # Strict: a number in quotes is an error.
    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)


class StreamOptions(_Schema):
    include_usage: bool = False
    resumable: bool = False  # events have ids: see ``api.resume``


class CarriedPast(BaseModel):
    """See ``api.streams.carried``: of a stream that another cluster began."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    name: str = Field(max_length=64)
    at: str = Field(max_length=1024)
    entries: list[str]


class CacheHintField(BaseModel):
    """See ``conductor.request.CacheHint``."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    pin_s: float = Field(default=0.0, ge=0, le=MAX_PIN_S)
    prefetch: bool = False
    drop_after: bool = False

    @model_validator(mode="after")
    def _agree(self) -> CacheHintField:
        if self.pin_s and self.drop_after:
            raise ValueError("pin_s is not allowed together with drop_after")
        return self

    @property
    def hint(self) -> CacheHint:
        return CacheHint(self.pin_s, self.prefetch, self.drop_after)


class GenerationBody(_Schema):
    """Fields of both endpoints. ``parse`` removes nulls before validation."""

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: int = Field(default=1, ge=1, le=MAX_CHOICES)
    best_of: int | None = Field(default=None, ge=1)
    max_tokens: int | None = Field(default=None, ge=0)
    max_completion_tokens: int | None = Field(default=None, ge=0)
    min_tokens: int = Field(default=0, ge=0)
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=-1, le=MAX_INT32)
    min_p: float | None = Field(default=None, ge=0, le=1)
    repetition_penalty: float | None = Field(default=None, ge=0.01, le=100)
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**64)
    stop: Annotated[list[StopString], BeforeValidator(_as_list), Field(max_length=MAX_STOPS)] = []
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_STOPS)] = []
    include_stop_str_in_output: bool = False
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] = {}
    ignore_eos: bool = False
    speculation: bool = True  # False: one token a step, also where nodes speculate
    skip_special_tokens: bool = True
    return_token_ids: bool = False
    priority: int = Field(default=0, ge=-MAX_INT32, le=MAX_INT32)  # among those of the tenant, lower first
    timeout: float | None = Field(
        default=None, gt=0
    )  # seconds for the whole request; the server's limits stay
    user: str | None = None
    cache_salt: str = ""
    cache_hint: CacheHintField | None = None
    past: CarriedPast | None = None  # sent by routers of cells
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    service_tier: Literal["auto", "default", "priority", "flex"] = "auto"  # flex: the batch class

    @property
    def token_limit(self) -> int | None:
        """The limit of output tokens, under either of its names."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def structure(self) -> Structure | None:
        """What the text of an answer must match; None: any text."""
        if self.structured_outputs is not None:
            return self.structured_outputs.structure
        return None if self.response_format is None else self.response_format.structure

    @property
    def num_logprobs(self) -> int:
        """-1: none, 0: of the chosen token, n: also of the n best."""
        return -1

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def resumable(self) -> bool:
        return self.stream_options is not None and self.stream_options.resumable

    @model_validator(mode="after")
    def _agree(self) -> GenerationBody:
        """Checks over several fields. Messages start with the field's name, which ``parse`` reads."""
        limit = self.token_limit
        if self.best_of not in (None, 1, self.n):
            raise ValueError("best_of: only 1, or the value of n, is supported")
        if limit is not None and self.min_tokens > limit:
            raise ValueError(f"min_tokens: must be at most max_tokens, {limit}, got {self.min_tokens}")
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options: only allowed together with stream: true")
        if self.structured_outputs is not None and self.response_format is not None:
            raise ValueError("structured_outputs: not allowed together with response_format")
        if self.ignore_eos and self.structure is not None:
            raise ValueError("ignore_eos: not allowed where the answer must match a structure")
        return self


class CompletionBody(GenerationBody):
    """``POST /v1/completions``. ``prompt`` is read by ``moonpool.conductor.api.prompts``."""

    prompt: Any = None
    logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    echo: bool = False
    add_special_tokens: bool = True

    @property
    def num_logprobs(self) -> int:
        return -1 if self.logprobs is None else self.logprobs

    @model_validator(mode="after")
    def _some_output(self) -> CompletionBody:
        if self.token_limit == 0 and not self.echo:
            raise ValueError("max_tokens: must be at least 1, unless echo is true, got 0")
        return self


class Message(_Schema):
    """Other fields (name, tool_call_id, …) are passed to the chat template."""

    role: str = Field(min_length=1)
    content: Annotated[str | None, BeforeValidator(_as_text)] = None
    tool_calls: EarlierCalls = []

    @model_validator(mode="after")
    def _says_something(self) -> Message:
        if self.content is None and self.role != "assistant":
            raise ValueError(f"a message of the {self.role} needs a content")
        return self


class ChatBody(GenerationBody):
    """``POST /v1/chat/completions``"""

    messages: list[Message] = Field(min_length=1)
    logprobs: bool = False
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    chat_template_kwargs: dict[str, Any] = {}
    tools: list[Tool] = Field(default=[], max_length=MAX_TOOLS)
    tool_choice: ToolChoice | None = None  # None: auto
    parallel_tool_calls: bool = True

    @property
    def num_logprobs(self) -> int:
        return (self.top_logprobs or 0) if self.logprobs else -1

    @model_validator(mode="after")
    def _chat_agrees(self) -> ChatBody:
        if self.token_limit == 0:
            raise ValueError("max_tokens: must be at least 1, got 0")
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs: only allowed together with logprobs: true")
        if self.continue_final_message and self.add_generation_prompt:
            if "add_generation_prompt" in self.model_fields_set:
                raise ValueError("continue_final_message: not allowed together with add_generation_prompt")
            self.add_generation_prompt = False
        self._check_tools()
        return self

    def _check_tools(self) -> None:
        choice = self.tool_choice
        if choice in (None, "none", "auto"):
            return
        if self.structure is not None:
            raise ValueError("tool_choice: a call cannot be required together with a structure of the answer")
        names = [tool.function.name for tool in self.tools]
        if not names:
            raise ValueError("tool_choice: a call cannot be required without tools")
        if isinstance(choice, NamedTool) and choice.function.name not in names:
            raise ValueError(f"tool_choice: {choice.function.name!r} is not one of the tools")
        if self.ignore_eos:
            raise ValueError("ignore_eos: not allowed where a call is required")


B = TypeVar("B", bound=BaseModel)


def parse(schema: type[B], body: Mapping[str, Any]) -> B:
    """Validate a request.

    Raises:
        ApiError: 400 with the first wrong field and what it should be.
    """
    given = {name: value for name, value in body.items() if value is not None}
    if given.get("tool_choice") == "none":
        given.pop("tools", None)
    for name in given.keys() & REFUSED.keys() - schema.model_fields.keys():
        if not any(type(given[name]) is type(each) and given[name] == each for each in _HARMLESS):
            raise bad_request(f"{name}: {REFUSED[name]}", name, "unsupported_parameter")
    try:
        parsed = schema.model_validate(given)
    except ValidationError as error:
        raise _first_error(error) from None
    _note_unknown(parsed.model_extra or {})
    return parsed


def _first_error(error: ValidationError) -> ApiError:
    first = error.errors(include_url=False)[0]
    message = first["msg"].removeprefix("Value error, ")
    if not first["loc"]:  # from a check over several fields
        return bad_request(message, message.partition(":")[0])
    # What follows are names of the two forms that a choice may have.
    place = first["loc"][:1] if first["loc"][0] == "tool_choice" else first["loc"]
    param = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place).lstrip(".")
    if first["type"] == "missing":
        return bad_request(f"{param}: is required", param, "missing_required_parameter")
    if first["type"] in ("too_short", "string_too_short"):
        return bad_request(f"{param}: must not be empty", param)
    if first["type"] == "model_type":
        message = "must be an object"
    message = message.replace("Input should be", "must be").replace("should have", "must have")
    return bad_request(f"{param}: {message}, got {_shown(first['input'])}", param)


def _shown(value: object) -> str:
    """A wrong value, shortened."""
    brief = reprlib.Repr()
    brief.maxstring = brief.maxother = 80
    return brief.repr(value)


def _note_unknown(extra: Mapping[str, Any]) -> None:
    """Log each ignored unknown field once, up to a limit."""
    for name in extra.keys() - _seen_unknown:
        if len(_seen_unknown) < 256:
            _seen_unknown.add(name)
            log.debug("ignoring the unknown request field %r", name[:64])

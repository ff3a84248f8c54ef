"""The prompts of a request as token ids, from any of the forms that OpenAI's API allows."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from moonpool.conductor.api.errors import ApiError, bad_request
from moonpool.conductor.api.request_body import MAX_INLINE_MESSAGES
from moonpool.conductor.api.schemas import ChatBody, CompletionBody, GenerationBody, Message
from moonpool.conductor.fleet.served_model import ServedModel
from moonpool.conductor.text.chat_template import ChatTemplate
from moonpool.conductor.text.tokenizer import MAX_INLINE_CHARS, Tokenizer

MAX_PROMPTS = 2048  # in one request; the body's size bounds the rest
# What encoding a text costs, whatever its length, in characters.
_TEXT_CHARS = 16


@dataclass(frozen=True, slots=True)
class Prompt:
    """``param``: its field, for messages; ``text``: None where token ids were sent."""

    token_ids: npt.NDArray[np.int32]  # [num_tokens], at least one
    text: str | None
    param: str


async def completion_prompts(body: CompletionBody, tokenizer: Tokenizer, model: ServedModel) -> list[Prompt]:
    """A string, a list of strings, a list of token ids, or a list of such lists.

    Raises:
        ApiError: 400 for another type, an empty prompt, or a token id outside the vocabulary.
    """
    split = _split(body.prompt)

    def read() -> list[Prompt]:
        return [
            _token_prompt(one, param, model) if isinstance(one, list) else encoded(one, param)
            for one, param in split
        ]

    def encoded(text: str, param: str) -> Prompt:
        ids = tokenizer.encode_now(text, add_special_tokens=body.add_special_tokens)
        return _text_prompt(text, ids, param)

    # A token id costs less than a character.
    num_chars = sum(len(one) + _TEXT_CHARS for one, _ in split)
    return read() if num_chars <= MAX_INLINE_CHARS else await asyncio.to_thread(read)


async def chat_prompt(body: ChatBody, template: ChatTemplate | None, tokenizer: Tokenizer) -> Prompt:
    """The conversation rendered with the checkpoint's chat template.

    Raises:
        ApiError: 400 if the checkpoint has no template or the text is empty.
        ChatTemplateError: the template rejected the messages.
    """
    if template is None:
        raise bad_request(
            "the served model has no chat template: use /v1/completions",
            "messages",
            "no_chat_template",
        )
    if sum(1 + len(message.tool_calls) for message in body.messages) <= MAX_INLINE_MESSAGES:
        text = _rendered(body, template)
    else:
        text = await asyncio.to_thread(_rendered, body, template)
    ids = await tokenizer.encode(text, add_special_tokens=body.add_special_tokens)
    return _text_prompt(text, ids, "messages")


def output_limit(prompt: Prompt, body: GenerationBody, default: int | None, model: ServedModel) -> int:
    """The limit of output tokens: the requested one, else ``default``, else all that fit.

    Raises:
        ApiError: 400 if prompt and output exceed the model's context length.
    """
    longest, length = model.max_model_len, len(prompt.token_ids)
    asked = body.token_limit
    room = longest - length
    if room < 1:
        raise bad_request(
            f"the model's maximum context length is {longest} tokens, but {prompt.param} has {length} tokens "
            f"and the answer needs at least one: shorten it by {length - longest + 1} or more",
            prompt.param,
            "context_length_exceeded",
        )
    if asked is None:
        limit = room if default is None else min(default, room)
        return max(limit, min(body.min_tokens, room))
    if asked > room:
        raise bad_request(
            f"the model's maximum context length is {longest} tokens, but {length + asked} were requested "
            f"({length} in {prompt.param}, {asked} for the answer): at most {room} fit",
            "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens",
            "context_length_exceeded",
        )
    return asked


def _rendered(body: ChatBody, template: ChatTemplate) -> str:
    tools = [tool.model_dump(exclude_unset=True) for tool in body.tools]
    return template.render(
        [_for_template(message, template) for message in body.messages],
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        variables=body.chat_template_kwargs | ({"tools": tools} if tools else {}),
    )


def _for_template(message: Message, template: ChatTemplate) -> dict[str, Any]:
    given = message.model_dump(exclude_unset=True)
    if message.role == "developer" and message.role not in template.source:
        # OpenAI's newer name. Templates that do not know it refuse the message, or leave it out.
        given["role"] = "system"
    if not message.tool_calls:
        # Clients send null or an empty list; some templates ask only whether the field is there.
        given.pop("tool_calls", None)
    return given


def _split(prompt: Any) -> list[tuple[str | list[Any], str]]:
    """Each prompt with the name of its field."""
    if prompt is None:
        raise bad_request("prompt: is required", "prompt", "missing_required_parameter")
    if isinstance(prompt, str):
        return [(prompt, "prompt")]
    if not isinstance(prompt, list):
        raise _wrong_type("prompt", prompt)
    if not prompt:
        raise _empty("prompt")
    if isinstance(prompt[0], int | float):
        return [(prompt, "prompt")]
    if len(prompt) > MAX_PROMPTS:
        raise bad_request(f"prompt: at most {MAX_PROMPTS} prompts, got {len(prompt)}", "prompt")
    for position, one in enumerate(prompt):
        if not isinstance(one, str | list):
            raise _wrong_type(f"prompt[{position}]", one)
    return [(one, f"prompt[{position}]") for position, one in enumerate(prompt)]


def _text_prompt(text: str, token_ids: npt.NDArray[np.int32], param: str) -> Prompt:
    if not text or not len(token_ids):
        raise _empty(param)
    return Prompt(token_ids, text, param)


def _token_prompt(token_ids: Sequence[Any], param: str, model: ServedModel) -> Prompt:
    if not token_ids:
        raise _empty(param)
    if set(map(type, token_ids)) != {int}:
        position = next(i for i, one in enumerate(token_ids) if type(one) is not int)
        raise _wrong_type(f"{param}[{position}]", token_ids[position])
    low, high = min(token_ids), max(token_ids)
    if low < 0 or high >= model.vocab_size:
        wrong = low if low < 0 else high
        raise bad_request(
            f"{param}: token id {wrong} is outside the model's vocabulary, 0 to {model.vocab_size - 1}", param
        )
    return Prompt(np.array(token_ids, dtype=np.int32), None, param)


def _empty(param: str) -> ApiError:
    return bad_request(f"{param}: must not be empty", param, "empty_prompt")


def _wrong_type(param: str, value: Any) -> ApiError:
    names: Mapping[type, str] = {bool: "a boolean", float: "a fraction", dict: "an object", str: "a string"}
    got = names.get(type(value), type(value).__name__)
    return bad_request(
        f"{param}: prompts are strings or lists of token ids, got {got}",
        param,
        "invalid_type",
    )

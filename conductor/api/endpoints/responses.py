"""``/v1/responses``."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from moonpool.conductor.access.gate import PRINCIPAL
from moonpool.conductor.api.answer import Answer
from moonpool.conductor.api.context import CONTEXT, ApiContext
from moonpool.conductor.api.errors import ApiError, bad_request
from moonpool.conductor.api.exchange import GenerationExchange
from moonpool.conductor.api.prompts import chat_prompt
from moonpool.conductor.api.responses.answer import ResponseAnswer
from moonpool.conductor.api.responses.translation import chat_of, not_found
from moonpool.conductor.api.schemas import ChatBody
from moonpool.conductor.api.streams.resume import carried_messages
from moonpool.conductor.api.structure.tool_use import tool_use
from moonpool.conductor.requests.conversation_records import Messages
from moonpool.kvstore.errors import IndexUnavailable


async def responses(http: web.Request) -> web.StreamResponse:
    """``POST /v1/responses``"""
    context, tenant = http.app[CONTEXT], http[PRINCIPAL].client.name
    about: dict[str, Any] = {}
    chat: dict[str, Any] = {}
    earlier: Messages = []

    async def translate(given: dict[str, Any]) -> dict[str, Any]:
        previous = given.get("previous_response_id")
        if previous is not None:
            if not isinstance(previous, str):
                raise bad_request("previous_response_id: must be a text", "previous_response_id")
            found = carried_messages(given.get("past"), tenant)
            if found is None:
                found = await _earlier(context, tenant, previous)
            if found is None:
                raise not_found(previous)
            earlier.extend(found)
        chat.update(chat_of(given, earlier))
        about.update(_about(given))
        return chat

    with context.serving(), GenerationExchange(http, context, ResponseAnswer) as exchange:
        body = await exchange.parse(ChatBody, translate)

        def prepare(answer: Answer) -> None:
            async def keep(message: dict[str, Any]) -> None:
                # Instructions are of one response alone.
                kept = chat["messages"][bool(about["instructions"]) :]
                await context.conversations.put(tenant, answer.answer_id, [*kept, message])

            assert isinstance(answer, ResponseAnswer)
            answer.about = about
            answer.keep = keep if about["store"] else None

        async def ask(own: ApiContext) -> web.StreamResponse | None:
            prompt = await exchange.tokenize(chat_prompt(body, own.template, own.tokenizer))
            return await exchange.answer(body, [prompt], None, tool_use(body, own), prepare, earlier)

        return await exchange.respond(ask)


async def _earlier(context: ApiContext, tenant: str, response_id: str) -> Messages | None:
    """The messages up to a response; None: it is unknown. Raises ``ApiError``: 503, Redis does not answer."""
    try:
        return await context.conversations.get(tenant, response_id)
    except IndexUnavailable as error:
        raise ApiError(
            503,
            "responses of other conductors are unknown while Redis does not answer: try again, or send the "
            "whole conversation as input",
            param="previous_response_id",
            code="responses_unknown",
            headers={"Retry-After": "1"},
        ) from error


def _about(given: dict[str, Any]) -> dict[str, Any]:
    """What a response repeats of its request."""
    return {
        "instructions": given.get("instructions"),
        "max_output_tokens": given.get("max_output_tokens"),
        "metadata": given.get("metadata") or {},
        "parallel_tool_calls": given.get("parallel_tool_calls", True),
        "previous_response_id": given.get("previous_response_id"),
        "store": given.get("store", True) is not False,
        "temperature": given.get("temperature"),
        "text": given.get("text") or {"format": {"type": "text"}},
        "tool_choice": given.get("tool_choice") or "auto",
        "tools": given.get("tools") or [],
        "top_p": given.get("top_p"),
        "truncation": "disabled",
    }

"""``/v1/responses``."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from moonpool.conductor.access.gate import PRINCIPAL
from moonpool.conductor.api.answer import Answer
from moonpool.conductor.api.context import CONTEXT
from moonpool.conductor.api.errors import bad_request
from moonpool.conductor.api.exchange import GenerationExchange
from moonpool.conductor.api.prompts import chat_prompt
from moonpool.conductor.api.responses.answer import ResponseAnswer
from moonpool.conductor.api.responses.translation import chat_of, not_found
from moonpool.conductor.api.schemas import ChatBody
from moonpool.conductor.api.structure.tool_use import tool_use


async def responses(http: web.Request) -> web.StreamResponse:
    """``POST /v1/responses``"""
    context, tenant = http.app[CONTEXT], http[PRINCIPAL].client.name
    about: dict[str, Any] = {}
    chat: dict[str, Any] = {}

    def translate(given: dict[str, Any]) -> dict[str, Any]:
        previous, earlier = given.get("previous_response_id"), list[dict[str, Any]]()
        if previous is not None:
            if not isinstance(previous, str):
                raise bad_request("previous_response_id: must be a text", "previous_response_id")
            found = context.conversations.get(tenant, previous)
            if found is None:
                raise not_found(previous)
            earlier = found
        chat.update(chat_of(given, earlier))
        about.update(_about(given))
        return chat

    with context.serving(), GenerationExchange(http, context, ResponseAnswer) as exchange:
        body = await exchange.parse(ChatBody, translate)
        own = exchange.context
        prompt = await exchange.tokenize(chat_prompt(body, own.template, own.tokenizer))
        made: list[ResponseAnswer] = []

        def prepare(answer: Answer) -> None:
            assert isinstance(answer, ResponseAnswer)
            answer.about = about
            made.append(answer)

        response = await exchange.answer(body, [prompt], None, tool_use(body, own), prepare)
        if about["store"] and made[0].outcome.finish_reason is not None:
            # Instructions are of one response alone.
            kept = chat["messages"][bool(about["instructions"]) :]
            context.conversations.put(tenant, made[0].answer_id, [*kept, made[0].message()])
        return response


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

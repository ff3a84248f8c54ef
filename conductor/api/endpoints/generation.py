"""``/v1/completions`` and ``/v1/chat/completions``."""

from __future__ import annotations

from aiohttp import web

from moonpool.conductor.api.answer import ChatAnswer, CompletionAnswer
from moonpool.conductor.api.context import CONTEXT, ApiContext
from moonpool.conductor.api.exchange import GenerationExchange
from moonpool.conductor.api.prompts import chat_prompt, completion_prompts
from moonpool.conductor.api.schemas import ChatBody, CompletionBody
from moonpool.conductor.api.structure.tool_use import tool_use

DEFAULT_COMPLETION_TOKENS = 16  # as in OpenAI's API; a chat may go on as long as the model can


async def completions(http: web.Request) -> web.StreamResponse:
    """``POST /v1/completions``"""
    context = http.app[CONTEXT]
    with context.serving(), GenerationExchange(http, context, CompletionAnswer) as exchange:
        body = await exchange.parse(CompletionBody)

        async def ask(own: ApiContext) -> web.StreamResponse | None:
            prompts = await exchange.tokenize(completion_prompts(body, own.tokenizer, own.conductor.model))
            return await exchange.answer(body, prompts, DEFAULT_COMPLETION_TOKENS)

        return await exchange.respond(ask)


async def chat_completions(http: web.Request) -> web.StreamResponse:
    """``POST /v1/chat/completions``"""
    context = http.app[CONTEXT]
    with context.serving(), GenerationExchange(http, context, ChatAnswer) as exchange:
        body = await exchange.parse(ChatBody)

        async def ask(own: ApiContext) -> web.StreamResponse | None:
            prompt = await exchange.tokenize(chat_prompt(body, own.template, own.tokenizer))
            return await exchange.answer(body, [prompt], None, tool_use(body, own))

        return await exchange.respond(ask)

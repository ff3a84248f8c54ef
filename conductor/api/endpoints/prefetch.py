"""``/v1/prefetch``: the prompt of a chat computed, or loaded, before it is needed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from aiohttp import web

from moonpool.conductor.api.answer import ChatAnswer, Outcome, Usage
from moonpool.conductor.api.choice import Choice
from moonpool.conductor.api.context import CONTEXT, ApiContext
from moonpool.conductor.api.exchange import GenerationExchange
from moonpool.conductor.api.prompts import chat_prompt
from moonpool.conductor.api.schemas import ChatBody

# Fields that decide what the prompt is and how it is scheduled. Others, as of the sampling, are ignored.
_FIELDS = (
    *("model", "messages", "tools", "chat_template_kwargs", "add_special_tokens", "continue_final_message"),
    *("chat_template", "truncate_prompt_tokens"),  # refused
    *("add_generation_prompt", "cache_salt", "cache_hint", "priority", "service_tier", "timeout", "user"),
)


class PrefetchAnswer(ChatAnswer):
    id_prefix = "prefetch-"
    whole_object = "prefetch"

    def fields(self, choices: Sequence[tuple[Choice, Outcome]], usage: Usage) -> dict[str, Any]:
        counted = {"prompt_tokens": usage.prompt_tokens, "cached_tokens": usage.cached_tokens}
        head = {"id": self._id, "object": self.whole_object, "created": self._created, "model": self._model}
        return head | counted


async def prefetch(http: web.Request) -> web.StreamResponse:
    """``POST /v1/prefetch``: answers once a prefill node has the KV of the messages in its pool."""

    async def translate(given: dict[str, Any]) -> dict[str, Any]:
        body = {name: given[name] for name in _FIELDS if given.get(name) is not None}
        # The next turn goes on after the messages, and not after the beginning of an answer.
        ends = {} if body.get("continue_final_message") else {"add_generation_prompt": False}
        # A prefill computes the token after the prompt.
        return {**ends, **body, "max_tokens": 1}

    context = http.app[CONTEXT]
    with context.serving(), GenerationExchange(http, context, PrefetchAnswer) as exchange:
        body = await exchange.parse(ChatBody, translate)

        async def ask(own: ApiContext) -> web.StreamResponse | None:
            prompt = await exchange.tokenize(chat_prompt(body, own.template, own.tokenizer))
            return await exchange.answer(body, [prompt], None)

        return await exchange.respond(ask)

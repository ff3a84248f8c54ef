"""``/tokenize`` and ``/detokenize`` as in vLLM's API, and the refusal of ``/v1/embeddings``."""

from __future__ import annotations

from typing import Any

import numpy as np
from aiohttp import web

from moonpool.conductor.api.answer import token_label
from moonpool.conductor.api.context import CONTEXT, ApiContext
from moonpool.conductor.api.errors import bad_request
from moonpool.conductor.api.models.lanes import LANES
from moonpool.conductor.api.prompts import Prompt, chat_prompt, completion_prompts
from moonpool.conductor.api.request_body import read_object, validated
from moonpool.conductor.api.schemas import ChatBody, CompletionBody
from moonpool.conductor.api.status_routes import reply


async def tokenize(http: web.Request) -> web.Response:
    """``POST /tokenize``: the token ids of a ``prompt``, or of the prompt of ``messages``."""
    context = http.app[CONTEXT]
    given = await read_object(http, context.options.max_body_nbytes)
    strings = given.pop("return_token_strs", None)
    if not isinstance(strings, bool | None):
        raise bad_request("return_token_strs: must be true or false", "return_token_strs")
    context = await _model_of(given, http)
    prompt = await _prompt(http, given, context)
    token_ids = prompt.token_ids.tolist()
    labels = [token_label(token_id, context.tokenizer) for token_id in token_ids] if strings else None
    return reply(
        {
            "count": len(token_ids),
            "max_model_len": context.conductor.model.max_model_len,
            "tokens": token_ids,
            "token_strs": labels,
        }
    )


async def detokenize(http: web.Request) -> web.Response:
    """``POST /detokenize``: the text of ``tokens``."""
    context = http.app[CONTEXT]
    given = await read_object(http, context.options.max_body_nbytes)
    context = await _model_of(given, http)
    token_ids, size = given.get("tokens"), context.conductor.model.vocab_size
    if not isinstance(token_ids, list) or any(type(i) is not int or not 0 <= i < size for i in token_ids):
        raise bad_request(f"tokens: must be a list of token ids from 0 to {size - 1}", "tokens")
    text = context.tokenizer.decode(np.array(token_ids, np.int32), skip_special=False)
    return reply({"prompt": text})


async def embeddings(http: web.Request) -> web.Response:
    """``POST /v1/embeddings``"""
    raise bad_request(
        "embeddings are not supported: the served model generates text", None, "unsupported_endpoint"
    )


async def _prompt(http: web.Request, given: dict[str, Any], context: ApiContext) -> Prompt:
    if "messages" in given:
        chat = await validated(http, ChatBody, given)
        return await chat_prompt(chat, context.template, context.tokenizer)
    body = await validated(http, CompletionBody, given)
    if not isinstance(body.prompt, str):
        raise bad_request("prompt: must be a text", "prompt", "invalid_type")
    (prompt,) = await completion_prompts(body, context.tokenizer, context.conductor.model)
    return prompt


async def _model_of(given: dict[str, Any], http: web.Request) -> ApiContext:
    name, lanes = given.get("model"), http.app[LANES]
    if name is None:
        return lanes.first
    lane, _ = lanes.known(str(name))
    return await lane.context()

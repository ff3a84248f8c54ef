"""HTTP routes that load and unload LoRA adapters, as vLLM has them."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from moonpool.conductor.api.context import CONTEXT
from moonpool.conductor.api.errors import bad_request
from moonpool.conductor.api.models.lanes import LANES
from moonpool.conductor.api.request_body import read_object

_MOST_CHARS = 4096


async def load(http: web.Request) -> web.Response:
    """``POST /v1/load_lora_adapter``: ``lora_name``, ``lora_path``, ``load_inplace`` to replace another
    content of that name, and ``base_model_name`` where a cluster has several models."""
    context = http.app[CONTEXT]
    body = await read_object(http, context.options.max_body_nbytes)
    name, path = _text(body, "lora_name"), _text(body, "lora_path")
    replace = body.get("load_inplace", False)
    if not isinstance(replace, bool):
        raise bad_request("load_inplace: must be true or false", "load_inplace")
    base = body.get("base_model_name")
    lane = http.app[LANES].named(None if base is None else str(base))
    await lane.conductor.adapters.load(name, path, replace=replace)
    return web.Response(text=f"Success: LoRA adapter '{name}' added successfully.")


async def unload(http: web.Request) -> web.Response:
    """``POST /v1/unload_lora_adapter``: ``lora_name``. Requests that have begun finish with it."""
    context = http.app[CONTEXT]
    name = _text(await read_object(http, context.options.max_body_nbytes), "lora_name")
    found = (lane.conductor for lane in http.app[LANES] if lane.conductor.adapters.find(name) is not None)
    await next(found, context.conductor).adapters.unload(name)
    return web.Response(text=f"Success: LoRA adapter '{name}' removed successfully.")


def _text(body: dict[str, Any], field: str) -> str:
    value = body.get(field)
    if not isinstance(value, str) or not 0 < len(value) <= _MOST_CHARS:
        raise bad_request(f"{field}: must be a text of 1 to {_MOST_CHARS} characters", field)
    return value

"""The body of a request: a JSON object, within bounds of size, time and nesting."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, Final, TypeVar

import orjson
from aiohttp import web
from pydantic import BaseModel

from moonpool.conductor.api.errors import ApiError, bad_request
from moonpool.conductor.api.schemas import parse

BODY_S: Final = 60.0
"""From the headers to the last byte: 8 MiB over 1.2 Mbit/s."""
MAX_NESTING: Final = 32
"""Lists and objects within each other: templates and validation descend by recursion. Requests need 6."""
# Each bounds what is done on the event loop to about 1 ms. Larger bodies go to a thread.
MAX_INLINE_NBYTES: Final = 16 << 10
MAX_INLINE_MESSAGES: Final = 128
# Checked by its own reader, which descends twice: it may be millions of numbers.
_FLAT: Final = "prompt"
B = TypeVar("B", bound=BaseModel)


async def read_object(http: web.Request, limit_nbytes: int) -> dict[str, Any]:
    """The request's JSON object. Raises ``ApiError`` 400, 408, 413 or 415."""
    encoding = http.headers.get("Content-Encoding", "identity")
    if encoding.lower() != "identity":
        raise ApiError(
            415,
            f"the body is compressed ({encoding[:64]}): send it as it is",
            code="unsupported_encoding",
            headers={"Connection": "close", "Accept-Encoding": "identity"},
        )
    if (http.content_length or 0) > limit_nbytes:
        raise ApiError(
            413,
            f"the request body has {http.content_length} bytes, more than the {limit_nbytes} allowed",
            code="body_too_large",
            headers={"Connection": "close"},
        )
    try:
        async with asyncio.timeout(BODY_S):
            raw = await http.read()
    except TimeoutError:
        raise ApiError(
            408,
            f"the request body did not arrive within {BODY_S:g} s",
            code="body_too_slow",
            headers={"Connection": "close"},
        ) from None
    return _object_of(raw) if len(raw) <= MAX_INLINE_NBYTES else await asyncio.to_thread(_object_of, raw)


async def validated(http: web.Request, schema: type[B], given: Mapping[str, Any]) -> B:
    """``given``, what ``read_object`` returned or a chat made of it, as ``schema``.

    Raises ``ApiError``: 400 with the first wrong field.
    """
    # A chat may have the messages of earlier responses, too.
    messages = given.get("messages")
    num_messages = len(messages) if isinstance(messages, list) else 0
    if len(await http.read()) <= MAX_INLINE_NBYTES and num_messages <= MAX_INLINE_MESSAGES:
        return parse(schema, given)
    return await asyncio.to_thread(parse, schema, given)


def _object_of(raw: bytes) -> dict[str, Any]:
    try:
        value = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise bad_request(f"the request body is not valid JSON: {error}", None, "invalid_json") from None
    if not isinstance(value, dict):
        raise bad_request("the request body must be a JSON object", None, "invalid_json")
    _check_nesting(value)
    return value


def _check_nesting(body: Mapping[str, Any]) -> None:
    for name, value in body.items():
        level, depth = [value] if name != _FLAT else [], 1
        while level := [inner for each in level for inner in _inside(each)]:
            depth += 1
            if depth > MAX_NESTING:
                raise bad_request(f"{name[:64]}: nested more than {MAX_NESTING} deep", name[:64])


def _inside(value: Any) -> list[Any]:
    """The lists and objects that are directly in ``value``."""
    elements = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [each for each in elements if isinstance(each, dict | list)]

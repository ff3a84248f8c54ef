"""Questions about requests that another worker of this conductor has (``conductor.workers``)."""

from __future__ import annotations

from collections.abc import Sequence

import aiohttp
from aiohttp import web
from yarl import URL

HOST = "127.0.0.1"
"""Where workers take questions of each other, at ``worker_port`` of their facts."""
_ASKED = "X-Moonpool-Asked-By-Worker"
# What says who asks: the other worker's gate decides again.
_PROOFS = ("Authorization", "Cookie")
_TIMEOUT = aiohttp.ClientTimeout(total=2.0)


async def ask_siblings(http: web.Request, ports: Sequence[int]) -> web.Response | None:
    """The answer of the worker that has what ``http``, a GET, is about; None: none has. ``ports``: of the
    others."""
    if not ports or _ASKED in http.headers:
        return None
    headers = {name: http.headers[name] for name in _PROOFS if name in http.headers} | {_ASKED: "1"}
    async with aiohttp.ClientSession(timeout=_TIMEOUT) as session:
        for port in ports:
            url = URL(f"http://{HOST}:{port}{http.raw_path}", encoded=True)
            try:
                async with session.get(url, headers=headers) as answer:
                    if answer.status == 200:
                        return web.Response(body=await answer.read(), content_type=answer.content_type)
            except (aiohttp.ClientError, TimeoutError):
                continue  # it has just ended
    return None

"""The connection to a vLLM engine: its OpenAI server for requests, the store node inside it for blocks."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import orjson

from moonpool.conductor.engines.completion import Delta, Prefilled, delta_of, prefilled_of
from moonpool.conductor.fleet.node_client import NodeClient, RequestKey
from moonpool.kvstore.index.redis.node_record import NodeLoad
from moonpool.runtime.errors import NodeUnavailable, RemoteError

log = logging.getLogger(__name__)

# How often its load is asked for, which is its liveness, too; and how long a busy server's answer may take.
_ASK_EVERY_S = 0.5
_ANSWER_S = 5.0
_CONNECT_S = 5.0

# On its metrics page.
_RUNNING = "vllm:num_requests_running"
_WAITING = "vllm:num_requests_waiting"
_USED = "vllm:kv_cache_usage_perc"
_CONFIG = "vllm:cache_config_info"
_NUM_BLOCKS = re.compile(r'num_gpu_blocks="(\d+)"')

_STATUSES = {400: "INVALID_ARGUMENT", 422: "INVALID_ARGUMENT", 429: "RESOURCE_EXHAUSTED", 503: "UNAVAILABLE"}


class EngineClient(NodeClient):
    """``connected``: its server answers. ``model``: its name there, known while it is connected."""

    def __init__(
        self,
        node_id: str,
        url: str,
        rpc_address: str,
        on_change: Callable[[], None],
        *,
        key: str,
        on_load: Callable[[NodeLoad], None],
    ) -> None:
        """``url``: of the server; ``key``: its ``--api-key``; empty: none."""
        super().__init__(node_id, rpc_address, on_change)
        self.model = ""
        self._url = url.rstrip("/")
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._on_load = on_load
        self._session: aiohttp.ClientSession | None = None
        self._look = asyncio.Event()
        self._said = ""

    async def close(self) -> None:
        await super().close()
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    def cancel(self, key: RequestKey) -> None:
        """Nothing to do: ``tokens`` closes the connection, and vLLM aborts the request."""

    async def tokens(self, body: dict[str, Any], timeout_s: float) -> AsyncGenerator[Delta, None]:
        """Stream a completion. Leave it with ``aclose``: the engine stops its work then.

        Raises ``NodeUnavailable``; ``RemoteError``: it refused or ended the request.
        """
        async with self._answer("POST", "/v1/completions", timeout_s, json=body) as response:
            rest = b""
            async for data in response.content.iter_any():
                *lines, rest = (rest + data).split(b"\n")
                for line in lines:
                    if not line.startswith(b"data: "):
                        continue
                    if line[6:].strip() == b"[DONE]":
                        return
                    delta = delta_of(self.node_id, self._parsed(line[6:]))
                    if delta is not None:
                        yield delta
            raise NodeUnavailable(self.node_id, "its stream ended too early")

    async def compute(self, body: dict[str, Any], timeout_s: float) -> Prefilled:
        """Compute a prompt for another engine. Cancelling this call ends the engine's work.

        Raises ``NodeUnavailable``; ``RemoteError``: it refused or ended the request.
        """
        async with self._answer("POST", "/v1/completions", timeout_s, json=body) as response:
            return prefilled_of(self.node_id, self._parsed(await response.read()))

    def look_now(self) -> None:
        """Ask at once whether it is alive."""
        self._look.set()

    async def _watch(self) -> None:
        while True:
            try:
                if not self.connected:
                    async with self._answer("GET", "/v1/models", _ANSWER_S) as response:
                        self.model = str(self._parsed(await response.read())["data"][0]["id"])
                async with self._answer("GET", "/metrics", _ANSWER_S) as response:
                    load = _load_of(await response.text())
                self._set_connected(True, "")
                self._on_load(load)
            except (NodeUnavailable, RemoteError) as error:
                if not self.connected and str(error) != self._said:
                    log.warning("%s", error)
                    self._said = str(error)
                self._set_connected(False, str(error))
            self._look.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._look.wait(), _ASK_EVERY_S)

    def _parsed(self, data: bytes) -> Any:
        try:
            return orjson.loads(data)
        except orjson.JSONDecodeError as error:
            raise RemoteError(
                self.node_id, "Failed", "INTERNAL", f"its answer is not JSON: {error}"
            ) from error

    @asynccontextmanager
    async def _answer(
        self, method: str, path: str, timeout_s: float, **options: Any
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """An answer with status 200. Raises ``NodeUnavailable``, ``RemoteError``."""
        if self._session is None:
            # The number of requests is bounded by admission.
            self._session = aiohttp.ClientSession(
                self._url, headers=self._headers, connector=aiohttp.TCPConnector(limit=0)
            )
        limits = aiohttp.ClientTimeout(total=timeout_s, sock_connect=_CONNECT_S)
        try:
            async with self._session.request(method, path, timeout=limits, **options) as response:
                if response.status != 200:
                    text = (await response.text())[:500]
                    status = _STATUSES.get(response.status, "INTERNAL")
                    raise RemoteError(
                        self.node_id, "Failed", status, f"{path} answered {response.status}: {text}"
                    )
                yield response
        except TimeoutError as error:
            raise NodeUnavailable(self.node_id, f"{path} was not answered within {timeout_s:g} s") from error
        except (aiohttp.ClientError, OSError) as error:
            self.look_now()
            raise NodeUnavailable(self.node_id, f"{self._url}{path}: {error}") from error


def _load_of(page: str) -> NodeLoad:
    """The sum over its engine processes. What the metrics page does not have counts as 0."""
    found = dict.fromkeys((_RUNNING, _WAITING, _USED), 0.0)
    num_blocks = num_free = 0
    usages = []
    sizes = []
    for line in page.splitlines():
        name, _, rest = line.partition("{")
        if name == _CONFIG and (given := _NUM_BLOCKS.search(rest)):
            sizes.append(int(given[1]))
        elif name in found:
            value = float(line.rpartition(" ")[2])
            found[name] += value
            if name == _USED:
                usages.append(value)
    for size, usage in zip(sizes, usages, strict=False):
        num_blocks += size
        num_free += round(size * (1 - min(max(usage, 0.0), 1.0)))
    return NodeLoad(
        num_running=int(found[_RUNNING]),
        num_waiting=int(found[_WAITING]),
        num_blocks=num_blocks,
        free_blocks=num_free,
    )

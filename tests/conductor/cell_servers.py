"""Stand-ins for the conductors of cells, and a router in front of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import aiohttp
from aiohttp import web

from moonpool.conductor.access.gate import Gate
from moonpool.conductor.cells import watch
from moonpool.conductor.cells.router import Router
from moonpool.conductor.cells.server import create_app
from moonpool.conductor.cells.watch import CellEntry, Cells
from moonpool.conductor.costs.regions import RegionLinks
from moonpool.runtime.config.options import ConductorOptions


@dataclass
class CellServer:
    """A conductor of a cell: answers with its name, and keeps what it was asked."""

    name: str
    region: str = ""
    url: str = ""
    summary: dict[str, Any] = field(
        default_factory=lambda: {
            "ready": True,
            "models": ["m"],
            "num_conductors": 1,
            "num_nodes": 4,
            "num_requests": 0,
            "requests_per_s": 0.0,
            "hot": [],
        }
    )
    status: int = 200
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[Mapping[str, str]] = field(default_factory=list)  # names in any case
    begun: asyncio.Event = field(default_factory=asyncio.Event)
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)
    hold: asyncio.Event | None = None  # awaited before the first byte of an answer, or after it in a stream
    breaks: bool = False  # streams break after their first event
    silent: bool = False  # as behind a partition: its summary never comes
    asked: int = 0  # for its summary
    offers: list[dict[str, Any]] = field(default_factory=list)  # hot prefixes, for other cells
    taken: list[str] = field(default_factory=list)  # those of others
    _runner: web.AppRunner | None = None

    async def start(self) -> None:
        app = web.Application()
        app.router.add_get("/v1/cell", self._cell)
        app.router.add_get("/v1/cell/prefixes", self._offered)
        app.router.add_post("/v1/cell/prefixes", self._take)
        app.router.add_route("*", "/{path:.*}", self._answer)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.0)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    async def _cell(self, http: web.Request) -> web.Response:
        self.asked += 1
        if self.silent:
            await asyncio.Event().wait()
        return web.json_response(self.summary)

    async def _offered(self, http: web.Request) -> web.Response:
        return web.json_response({"prefixes": self.offers})

    async def _take(self, http: web.Request) -> web.Response:
        given = (await http.json())["prefixes"]
        new = [one for one in given if one not in self.taken]
        self.taken += new
        return web.json_response({"held": list(range(len(given))), "copied": len(new)})

    async def _answer(self, http: web.Request) -> web.StreamResponse:
        body = await http.json() if http.can_read_body else {}
        self.bodies.append(body)
        self.headers.append(http.headers)
        self.begun.set()
        try:
            if self.status != 200:
                wait = {"Retry-After": "7"}
                return web.json_response({"error": {"code": self.name}}, status=self.status, headers=wait)
            if not body.get("stream"):
                if self.hold is not None:
                    await self.hold.wait()
                return web.json_response({"cell": self.name, "path": http.path_qs}, headers={"X-Own": "1"})
            stream = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
            await stream.prepare(http)
            await stream.write(b"data: one\n\n")
            if self.hold is not None:
                await self.hold.wait()
            if self.breaks and http.transport is not None:
                http.transport.abort()
                return stream
            await stream.write(b"data: [DONE]\n\n")
            return stream
        except asyncio.CancelledError:
            self.cancelled.set()
            raise


@dataclass
class Front:
    """A router that serves, and a client of it."""

    url: str
    router: Router
    cells: Cells
    servers: dict[str, CellServer]
    client: aiohttp.ClientSession

    async def post(self, body: dict[str, Any], path: str = "/v1/completions", **headers: str) -> Any:
        """Status, answer, headers."""
        async with self.client.post(self.url + path, json=body, headers=headers) as answer:
            return answer.status, await answer.json(), answer.headers

    async def seen(self) -> None:
        """Wait until every server was asked anew, twice: the first answer may be under way."""
        before = {server.name: server.asked for server in self.servers.values()}
        async with asyncio.timeout(30):
            while any(server.asked < before[server.name] + 2 for server in self.servers.values()):  # noqa: ASYNC110
                await asyncio.sleep(0.005)

    async def until(self, name: str, *, usable: bool) -> None:
        async with asyncio.timeout(30):
            while self.cells.cells[name].usable is not usable:  # noqa: ASYNC110
                await asyncio.sleep(0.005)


@asynccontextmanager
async def routed(
    *servers: CellServer, tenants: Path | None = None, region: str = "", links: tuple[str, ...] = ()
) -> AsyncIterator[Front]:
    """A router in front of ``servers``; those with one name are conductors of one cell."""
    for server in servers:
        await server.start()
    urls: dict[tuple[str, str], list[str]] = {}
    for server in servers:
        urls.setdefault((server.name, server.region), []).append(server.url)
    entries = [CellEntry(name, tuple(of_it), where) for (name, where), of_it in urls.items()]
    cells = Cells(entries, "", RegionLinks.parse(links))
    with mock.patch.object(watch, "_ASK_EVERY_S", 0.02):
        async with aiohttp.ClientSession() as session, aiohttp.ClientSession() as client:
            gate = Gate.load(str(tenants)) if tenants else Gate.open()
            router = Router(cells, session, ConductorOptions(), gate, region)
            runner = web.AppRunner(
                create_app(router, 1 << 20), handler_cancellation=True, shutdown_timeout=0.1
            )
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            cells.start(session)
            front = Front(
                f"http://127.0.0.1:{runner.addresses[0][1]}",
                router,
                cells,
                {server.name: server for server in servers},
                client,
            )
            try:
                await front.seen()
                yield front
            finally:
                await runner.cleanup()
                await cells.close()
                for server in servers:
                    await server.stop()
    assert all(one.num_open == 0 for doors in cells.doors.values() for one in doors)

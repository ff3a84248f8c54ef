"""``python -m moonpool.conductor.cells``: a router in front of several clusters, its cells."""

from __future__ import annotations

import argparse
import asyncio
import sys

import aiohttp

from moonpool.conductor.access.gate import Gate
from moonpool.conductor.cells.router import Router
from moonpool.conductor.cells.server import create_app
from moonpool.conductor.cells.spreading import Spreading
from moonpool.conductor.cells.watch import CellEntry, Cells
from moonpool.conductor.costs.regions import RegionLinks
from moonpool.runtime.config.options import Config
from moonpool.runtime.network.http_connections import BoundedRunner
from moonpool.runtime.network.http_listening import listen, reachable
from moonpool.runtime.network.sockets import host_port
from moonpool.runtime.security.https import client_context
from moonpool.runtime.service.lifecycle import ServiceContext, run_service

_CONNECT_S = 5.0


async def main(config: Config, service: ServiceContext) -> None:
    """Serve until asked to stop, then drain: running requests have ``node.drain_s`` to end."""
    options = config.conductor
    entries = [CellEntry.parse(text) for text in (*config.router.cells, *service.arguments.cell)]
    cells = Cells(entries, config.router.read_key, RegionLinks.parse(options.region_links))
    spreading = Spreading(cells)
    gate = Gate.load(options.tenants_path)
    encrypted = any(url.startswith("https:") for entry in entries for url in entry.urls)
    session = aiohttp.ClientSession(
        # Requests are bounded by the quota of connections of clients.
        connector=aiohttp.TCPConnector(
            limit=0, ssl=client_context(config.security.ca) if encrypted else True
        ),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S),
        auto_decompress=False,
        skip_auto_headers=("Accept-Encoding", "Content-Type", "User-Agent"),
        cookie_jar=aiohttp.DummyCookieJar(),
    )
    async with session:
        router = Router(cells, session, options, gate, config.node.region)
        runner = BoundedRunner(
            create_app(router, options.max_body_nbytes),
            handler_cancellation=True,
            access_log=None,
            shutdown_timeout=config.node.drain_s,
        )
        site, scheme = await listen(runner, options)
        try:
            cells.start(session)
            spreading.start()
            url = f"{scheme}://{host_port(reachable(options.host), runner.addresses[0][1])}"
            service.ready(url=url, metrics_url=f"{url}/metrics")
            await service.draining.wait()
            router.leaving = True
            await asyncio.sleep(options.leave_s)
            router.is_draining = True
            await site.stop()
        finally:
            await runner.cleanup()  # waits for running requests
            await spreading.close()
            await cells.close()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="moonpool router", allow_abbrev=False)
    parser.add_argument(
        "--cell",
        action="append",
        default=[],
        metavar="NAME=URL[,URL…][,region=REGION]",
        help="a cell, beside those of router.cells: the conductors of one cluster; repeatable",
    )
    return parser


if __name__ == "__main__":
    sys.exit(run_service(main, role="router", parser=_parser()))

"""Redis servers of our own that tests kill, stop and start again."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from pathlib import Path

from moonpool.kvstore.index.redis.client import connect
from moonpool.local.redis_server import find_redis
from moonpool.runtime.service.tied_command import tied_command


class Server:
    """A redis-server of our own that can be killed, stopped and started again. ``within``: the words before
    its command."""

    def __init__(self, directory: Path, *options: str, within: Sequence[str] = ()) -> None:
        self.path = directory / "redis.sock"
        self.url = f"unix://{self.path}"
        self._command = [
            *within,
            *(str(find_redis().path), "--port", "0", "--unixsocket", str(self.path), "--save", ""),
            *("--dir", str(directory), *options),
        ]
        self.process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        self.path.unlink(missing_ok=True)
        self.process = await asyncio.create_subprocess_exec(
            *tied_command(self._command), stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL
        )
        client = connect(self.url)
        while True:
            try:
                await client.ping()
                break
            except Exception:
                assert self.process.returncode is None, "redis-server ended"
                await asyncio.sleep(0.005)
        await client.aclose()

    async def kill(self) -> None:
        if self.process is not None and self.process.returncode is None:
            self.process.kill()
            await self.process.wait()


def free_ports(count: int) -> list[int]:
    """Free now, and those of their cluster bus (+10000) too."""
    sockets: list[socket.socket] = []
    ports: list[int] = []
    while len(ports) < count:
        probe, bus = socket.socket(), socket.socket()
        sockets += [probe, bus]
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        with suppress(OSError, OverflowError):  # another process has that one, or there is no such port
            bus.bind(("127.0.0.1", port + 10_000))
            ports.append(port)
    for each in sockets:
        each.close()
    return ports


async def until(condition: Callable[[], Awaitable[object]]) -> None:
    """Returns when the world has got there; the test's own timeout ends the wait."""
    while not await condition():  # noqa: ASYNC110 (another process decides)
        await asyncio.sleep(0.001)

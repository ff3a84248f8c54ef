"""Mooncake Store as a peer: its master, a node that lends memory, a client that lends none."""

from __future__ import annotations

import asyncio
import json
import socket
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Self

from moonpool.bench.harness.peer_environment import PeerFailed, python_of
from moonpool.runtime.service.child import tied_command

_PACKAGES = ("mooncake-transfer-engine-non-cuda==0.3.13.post1", "numpy")
# Without verbs it still asks for their libraries.
_ALSO = "apt install libibverbs1 librdmacm1 libnuma1"
_CHILD = Path(__file__).parent / "mooncake_store_child.py"
_START_S = 30.0


class MooncakeStore:
    """Costs nothing while it is others' turn: its processes wait."""

    def __init__(self, client: Process) -> None:
        self._client = client

    @classmethod
    @asynccontextmanager
    async def start(cls, nbytes: int) -> AsyncIterator[Self]:
        """Run it around the block. Raises ``PeerAbsent``, ``PeerFailed``."""
        python = python_of("mooncake", _PACKAGES, _ALSO)
        port = str(_free_port())
        processes: list[Process] = []
        try:
            master = python.parent / "mooncake_master"
            processes.append(await _spawn(str(master), "--rpc_port", port))
            await _until_listening(int(port))
            for role in ("node", "client"):
                child = await _spawn(str(python), str(_CHILD), role, port, str(nbytes))
                processes.append(child)
                await _answer(child, _START_S)
            yield cls(processes[-1])
        finally:
            for process in reversed(processes):
                process.kill()
                await process.wait()

    async def prepare(self, count: int, nbytes: int) -> None:
        """Objects to move, put once."""
        await self._ask({"prepare": {"count": count, "nbytes": nbytes}})

    async def move(self, way: str, seconds: float) -> list[float]:
        """All of them, again and again for so long; the seconds each time took."""
        answer = await self._ask({"move": way, "seconds": seconds})
        taken: list[float] = answer["seconds"]
        return taken

    async def _ask(self, question: dict[str, Any]) -> dict[str, Any]:
        assert self._client.stdin is not None
        self._client.stdin.write(json.dumps(question).encode() + b"\n")
        return await _answer(self._client, 60.0)


async def _spawn(*command: str) -> Process:
    return await asyncio.create_subprocess_exec(
        *tied_command(command), stdin=PIPE, stdout=PIPE, stderr=DEVNULL, limit=1 << 24
    )


async def _answer(process: Process, timeout_s: float) -> dict[str, Any]:
    assert process.stdout is not None
    try:
        async with asyncio.timeout(timeout_s):
            line = await process.stdout.readline()
    except TimeoutError:
        raise PeerFailed(f"mooncake store did not answer within {timeout_s:g} s") from None
    if not line:
        raise PeerFailed(f"mooncake store ended with code {await process.wait()}")
    answer: dict[str, Any] = json.loads(line)
    return answer


async def _until_listening(port: int) -> None:
    try:
        async with asyncio.timeout(_START_S):
            while True:
                try:
                    _, writer = await asyncio.open_connection("127.0.0.1", port)
                except OSError:
                    await asyncio.sleep(0.05)
                else:
                    writer.close()
                    return
    except TimeoutError:
        raise PeerFailed(f"mooncake_master did not listen within {_START_S:g} s") from None


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port

"""A rank's process, as its leader sees it."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from asyncio.subprocess import PIPE, Process
from base64 import b64decode
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from engine.errors import RankLost
from engine.parallel.assignment import Assignment
from engine.parallel.rank_reader import RankRead
from runtime.child import tied_command
from runtime.load_progress import Progress
from runtime.options import TransferOptions
from transfer import TransferError

_MAX_LINE_NBYTES = 64 << 20


class RankProcess:
    """Started tied to us; its log goes where ours goes. ``on_end`` hears how it ended, unless we ended it."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.on_end: Callable[[RankLost], None] | None = None
        self._process: Process | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._loaded: asyncio.Future[dict[str, str]] | None = None
        self._ended: asyncio.Future[None] | None = None
        self._progress: Progress | None = None
        self._agent: asyncio.Future[tuple[bytes, int]] | None = None
        self._reads: dict[int, asyncio.Future[str]] = {}
        self._num_reads = 0
        self._failure = ""
        self._closing = False

    @property
    def pid(self) -> int:
        assert self._process is not None, "not started"
        return self._process.pid

    async def start(self, threads: int) -> None:
        """Returns as soon as the process is there; it may still be importing."""
        environment = {
            **os.environ,
            "MOONPOOL_RANK": str(self.rank),
            # Idle OpenMP threads that spin take the cores from the other ranks.
            "OMP_NUM_THREADS": str(threads),
            "OMP_WAIT_POLICY": "PASSIVE",
        }
        self._process = await asyncio.create_subprocess_exec(
            *tied_command([sys.executable, "-m", "engine.parallel.rank"]),
            stdin=PIPE,
            stdout=PIPE,
            env=environment,
            limit=_MAX_LINE_NBYTES,
            # Ctrl-C in the terminal reaches the leader only, which ends its ranks.
            start_new_session=True,
        )
        self._tasks = [asyncio.create_task(self._read(), name=f"rank {self.rank}")]

    async def load(self, assignment: Assignment, progress: Progress | None = None) -> dict[str, str]:
        """Assign it a part; its identity, when it has loaded that. Raises RankLost where it failed."""
        loop = asyncio.get_running_loop()
        self._progress = progress
        self._loaded, self._ended = loop.create_future(), loop.create_future()
        if self._failure:
            raise RankLost(self.rank, self._failure)
        self._send({"load": assignment.pack()})
        return await self._loaded

    async def start_agent(
        self, options: TransferOptions, agent_id: str, epoch: int, pool: str
    ) -> tuple[bytes, int]:
        """Have it start a transfer agent of its own; the agent's descriptor, and the region of its pool.

        Raises RankLost.
        """
        self._agent = asyncio.get_running_loop().create_future()
        self._send(
            {"agent": {"options": asdict(options), "agent_id": agent_id, "epoch": epoch, "pool": pool}}
        )
        return await self._agent

    async def read(self, request: RankRead) -> str:
        """See ``RankReader``; raises RankLost too. Cancelled, it first lets the read end."""
        self._num_reads = number = self._num_reads + 1
        done = self._reads[number] = asyncio.get_running_loop().create_future()
        self._send({"read": number, "request": request.pack()})
        try:
            return await asyncio.shield(done)
        except asyncio.CancelledError:
            self._send({"cancel": number})
            await asyncio.wait((done,))
            done.exception()  # seen
            raise

    async def ended(self) -> None:
        """When it has left the steps it was assigned to. Raises RankLost when it is gone instead."""
        if self._ended is not None:
            await self._ended

    def kill(self) -> None:
        """End it; that is no news to ``on_end`` then. SIGTERM would not end a stopped process."""
        self._closing = True
        if self._process is not None and self._process.returncode is None:
            self._process.kill()

    async def close(self) -> None:
        """Kill it and wait until it is gone. Idempotent."""
        self.kill()
        if self._process is not None:
            await self._process.wait()
        for task in self._tasks:
            await asyncio.wait((task,))

    def _send(self, command: dict[str, object]) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command).encode() + b"\n")

    async def _read(self) -> None:
        process = self._process
        assert process is not None
        assert process.stdout is not None
        async for line in process.stdout:
            message: dict[str, Any] = json.loads(line)
            match message["kind"]:
                case "progress":
                    if self._progress is not None:
                        self._progress(message["done"], message["total"], message["name"])
                case "loaded":
                    # Nobody waits any more where it came too late.
                    if self._loaded is not None and not self._loaded.done():
                        self._loaded.set_result(message["identity"])
                case "ended":
                    assert self._ended is not None
                    self._ended.set_result(None)
                case "agent":
                    assert self._agent is not None
                    self._agent.set_result((b64decode(message["descriptor"]), message["region"]))
                case "read":
                    read = self._reads.pop(message["number"])
                    if "error" in message:
                        read.set_exception(TransferError(f"rank {self.rank}: {message['error']}"))
                    else:
                        read.set_result(message["transport"])
                case "failed":
                    self._failure = message["error"]
        code = await process.wait()
        how = f"it ended by signal {-code}" if code < 0 else f"it ended with code {code}"
        self._failure = f"{how}: {self._failure}" if self._failure else how
        error = RankLost(self.rank, self._failure)
        waiting: list[asyncio.Future[Any] | None] = [self._loaded, self._ended, self._agent]
        for future in [*waiting, *self._reads.values()]:
            if future is not None and not future.done():
                future.set_exception(error)
                future.exception()  # seen, should nobody wait any more
        if not self._closing and self.on_end is not None:
            self.on_end(error)

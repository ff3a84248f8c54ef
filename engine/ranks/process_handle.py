"""A rank's process, as its leader sees it."""

from __future__ import annotations

import asyncio
import json
from base64 import b64decode
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from moonpool.engine.errors import RankLost
from moonpool.engine.ranks.assignment import Assignment
from moonpool.engine.ranks.hosts.channel import RankChannel
from moonpool.kvstore.remote.rank_reader import RankRead
from moonpool.runtime.config.options import TransferOptions
from moonpool.runtime.service.load_progress import Progress
from moonpool.transfer import TransferError


class RankProcess:
    """``on_end`` hears how it ended, unless we ended it."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.on_end: Callable[[RankLost], None] | None = None
        self._channel: RankChannel | None = None
        self._reading: asyncio.Task[None] | None = None
        self._loaded: asyncio.Future[dict[str, str]] | None = None
        self._ended: asyncio.Future[None] | None = None
        self._progress: Progress | None = None
        self._agent: asyncio.Future[tuple[bytes, int]] | None = None
        self._reads: dict[int, asyncio.Future[str]] = {}
        self._num_reads = 0
        self._expert_load: asyncio.Future[list[list[int]]] | None = None
        self._failure = ""
        self._closing = False

    @property
    def channel(self) -> RankChannel:
        assert self._channel is not None, "not started"
        return self._channel

    @property
    def pid(self) -> int:
        """On the machine it runs on."""
        return self.channel.pid

    @property
    def where(self) -> str:
        """For messages: the machine it runs on, nothing where that is ours."""
        return f" on {self.channel.where}" if self.channel.where else ""

    def start(self, channel: RankChannel) -> None:
        """``channel``: to the process that was started for this rank; it may still be importing."""
        self._channel = channel
        self._reading = asyncio.create_task(self._read(channel), name=f"rank {self.rank}")

    async def load(self, assignment: Assignment, progress: Progress | None = None) -> dict[str, str]:
        """Assign it a part; its identity, when it has loaded that. Raises RankLost where it failed."""
        loop = asyncio.get_running_loop()
        self._progress = progress
        self._loaded, self._ended = loop.create_future(), loop.create_future()
        self._raise_if_lost()
        self._send({"load": assignment.pack()})
        return await self._loaded

    async def start_agent(self, options: TransferOptions, agent_id: str, epoch: int) -> tuple[bytes, int]:
        """Have it start a transfer agent of its own; the agent's descriptor, and the region of its pool.

        Raises RankLost.
        """
        self._raise_if_lost()
        self._agent = asyncio.get_running_loop().create_future()
        self._send({"agent": {"options": asdict(options), "agent_id": agent_id, "epoch": epoch}})
        return await self._agent

    async def expert_load(self) -> list[list[int]]:
        """The rank's table, see ``ExpertLoad``. A model must be open. Raises RankLost."""
        self._raise_if_lost()
        if self._expert_load is None or self._expert_load.done():
            self._expert_load = asyncio.get_running_loop().create_future()
            self._send({"expert_load": True})
        return await asyncio.shield(self._expert_load)

    async def read(self, request: RankRead) -> str:
        """See ``RankReader``; raises RankLost too. Cancelled, it first lets the read end."""
        self._raise_if_lost()
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
        """End it; that is no news to ``on_end`` then."""
        self._closing = True
        if self._channel is not None:
            self._channel.kill()

    async def close(self) -> None:
        """Kill it and wait until it is gone. Idempotent."""
        self.kill()
        if self._reading is not None:
            await asyncio.wait((self._reading,))

    def _raise_if_lost(self) -> None:
        """Nobody would answer."""
        if self._failure:
            raise RankLost(self.rank, self._failure)

    def _send(self, command: dict[str, object]) -> None:
        self.channel.send(json.dumps(command).encode() + b"\n")

    async def _read(self, channel: RankChannel) -> None:
        async for line in channel.lines():
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
                case "expert_load":
                    assert self._expert_load is not None
                    self._expert_load.set_result(message["table"])
                case "read":
                    read = self._reads.pop(message["number"])
                    if "error" in message:
                        read.set_exception(TransferError(f"rank {self.rank}: {message['error']}"))
                    else:
                        read.set_result(message["transport"])
                case "failed":
                    self._failure = message["error"]
        how = await channel.wait() + self.where
        self._failure = f"{how}: {self._failure}" if self._failure else how
        error = RankLost(self.rank, self._failure)
        waiting: list[asyncio.Future[Any] | None] = [self._loaded, self._ended, self._agent]
        for future in [*waiting, self._expert_load, *self._reads.values()]:
            if future is not None and not future.done():
                future.set_exception(error)
                future.exception()  # seen, should nobody wait any more
        if not self._closing and self.on_end is not None:
            self.on_end(error)

"""The leader's handle of a rank's process: commands, reports, its end."""

from __future__ import annotations

import asyncio
import json
import logging
from base64 import b64decode
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from moonpool.engine.errors import AdapterRefused, ExpertsRefused, RankLost
from moonpool.engine.ranks.assignment import Assignment
from moonpool.engine.ranks.channel import RankChannel
from moonpool.engine.sharding.expert_placement import Holders
from moonpool.kvstore.remote.rank_reader import RankRead
from moonpool.runtime.cancellation import outlast
from moonpool.runtime.config.options import TransferOptions
from moonpool.runtime.security import process
from moonpool.runtime.service.load_progress import Progress
from moonpool.runtime.service.vital import vital
from moonpool.transfer import TransferError

log = logging.getLogger(__name__)

_SHOWN_NBYTES = 200


class RankProcess:
    """``on_end`` is called with the error when the process ends, unless ``kill`` or ``close`` ended it."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.on_end: Callable[[RankLost], None] | None = None
        self._channel: RankChannel | None = None
        self._reading: asyncio.Task[None] | None = None
        self._progress: Progress | None = None
        # Open requests by the kind of the report that answers them, reads also by number.
        self._waiting: dict[tuple[str, int], asyncio.Future[dict[str, Any]]] = {}
        self._num_reads = 0
        self._failure = ""
        self._closing = False

    @property
    def channel(self) -> RankChannel:
        assert self._channel is not None, "not started"
        return self._channel

    @property
    def pid(self) -> int:
        """The process id, on its machine."""
        return self.channel.pid

    @property
    def where(self) -> str:
        """ " on MACHINE", for messages; empty on this machine."""
        return f" on {self.channel.where}" if self.channel.where else ""

    def start(self, channel: RankChannel) -> None:
        """``channel``: to the started process, which may still be importing."""
        self._channel = channel
        self._reading = vital(self._read(channel), f"reports of rank {self.rank}")

    async def load(self, assignment: Assignment, progress: Progress | None = None) -> dict[str, str]:
        """Load the assigned part and return the rank's identity. Raises RankLost."""
        self._progress = progress
        if assignment.num_blocks is None:
            self._expect("fits")
        loaded = self._ask("loaded", {"load": assignment.pack()})
        self._expect("ended")
        identity: dict[str, str] = (await loaded)["identity"]
        return identity

    async def create_memory(self, **shape: object) -> tuple[str, str]:
        """Have the first rank of another machine create a board and exchange memory: see ``LeaderCall``.
        Return their paths. Raises RankLost."""
        found = await self._ask("memory", {"memory": shape})
        return found["board"], found["exchange"]

    async def fitting_blocks(self) -> int:
        """Wait until a rank that loads without a number of blocks has its weights; return how many blocks
        fit beside them. It then waits for ``set_num_blocks``. Raises RankLost."""
        found: int = (await self._waiting["fits", 0])["num_blocks"]
        return found

    def set_num_blocks(self, num_blocks: int) -> None:
        self._send({"num_blocks": num_blocks})

    def serve(self) -> None:
        """See ``Link.serve``."""
        self._send({"serve": True})

    async def start_agent(self, options: TransferOptions, agent_id: str, epoch: int) -> tuple[bytes, int]:
        """Start a transfer agent in the rank. Return its descriptor and the region of the pool. Raises
        RankLost."""
        command = {"options": asdict(options), "agent_id": agent_id, "epoch": epoch}
        if not self.where:  # other machines have their own, and the key does not leave this one
            command["security"] = asdict(process.current().options)
        found = await self._ask("agent", {"agent": command})
        return b64decode(found["descriptor"]), found["region"]

    async def grant(self) -> int:
        """Return a new grant to write the rank's pool; no write under the former one lands any more. One call
        at a time. Raises RankLost."""
        grant: int = (await self._ask("grant", {"grant": True}))["grant"]
        return grant

    async def expert_load(self) -> list[list[int]]:
        """Return the rank's table, see ``ExpertLoad``. A model must be open. Raises RankLost."""
        answer = self._waiting.get(("expert_load", 0)) or self._ask("expert_load", {"expert_load": True})
        table: list[list[int]] = (await asyncio.shield(answer))["table"]
        return table

    async def prepare_experts(self, number: int, layer: int, holders: Holders) -> None:
        """See ``ExpertSwitches.prepare``. Raises ExpertsRefused or RankLost."""
        command = {"experts": number, "layer": layer, "holders": holders}
        found = await self._ask("experts", command)
        if "error" in found:
            raise ExpertsRefused(layer, f"rank {self.rank}{self.where}: {found['error']}")

    async def read(self, request: RankRead) -> str:
        """See ``RankReader``. Raises RankLost, too. A cancellation waits for the end of the read."""
        self._num_reads = number = self._num_reads + 1
        done = self._ask("read", {"read": number, "request": request.pack()}, number)
        found = await outlast(done, lambda: self._send({"cancel": number}))
        if "error" in found:
            raise TransferError.of_facts(found["error"], f"rank {self.rank}: ")
        transport: str = found["transport"]
        return transport

    async def load_adapter(
        self, ranks: list[int], number: int, block_ids: Sequence[int], files: tuple[Path, str] | None
    ) -> None:
        """Know an adapter that is in the rank's blocks, see ``AdapterPages.place``, or load it from its files
        before: their path and digest. Raises AdapterRefused, RankLost."""
        command: dict[str, object] = {"ranks": ranks, "blocks": list(block_ids)}
        if files is not None:
            command |= {"path": str(files[0]), "digest": files[1]}
        found = await self._ask("adapter", {"adapter": number, **command}, number)
        if "error" in found:
            raise AdapterRefused(Path(found["path"]), found["error"] + self.where)

    async def ended(self) -> None:
        """Wait until the rank has left its step loop. Raises RankLost when the process ends instead."""
        if (ended := self._waiting.get(("ended", 0))) is not None:
            await ended

    def kill(self) -> None:
        """End the process without a call of ``on_end``."""
        self._closing = True
        if self._channel is not None:
            self._channel.kill()

    async def close(self) -> None:
        """Kill the process and wait for its end. Idempotent."""
        self.kill()
        if self._reading is not None:
            await asyncio.wait((self._reading,))

    def _ask(self, kind: str, command: dict[str, object], number: int = 0) -> asyncio.Future[dict[str, Any]]:
        """Send a command. The result is the report ``kind``. Raises RankLost when the process has ended."""
        if self._failure:
            raise RankLost(self.rank, self._failure)
        answer = self._expect(kind, number)
        self._send(command)
        return answer

    def _expect(self, kind: str, number: int = 0) -> asyncio.Future[dict[str, Any]]:
        answer: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._waiting[kind, number] = answer
        return answer

    def _send(self, command: dict[str, object]) -> None:
        self.channel.send(json.dumps(command).encode() + b"\n")

    async def _read(self, channel: RankChannel) -> None:
        async for line in channel.lines():
            try:
                report: dict[str, Any] = json.loads(line)
                kind = report["kind"]
            except (ValueError, TypeError, KeyError):
                # Libraries print on stdout while they are imported.
                if text := line[:_SHOWN_NBYTES].decode(errors="replace").strip():
                    log.warning("rank %d%s printed: %s", self.rank, self.where, text)
                continue
            match kind:
                case "progress":
                    if self._progress is not None:
                        self._progress(report["done"], report["total"], report["name"])
                case "failed":
                    self._failure = report["error"]
                case _:
                    answer = self._waiting.pop((kind, report.get("number", 0)))
                    if not answer.done():  # a late load has been cancelled
                        answer.set_result(report)
        how = await channel.wait() + self.where
        self._failure = f"{how}: {self._failure}" if self._failure else how
        error = RankLost(self.rank, self._failure)
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(error)
                answer.exception()  # mark it as retrieved, in case no caller waits
        if not self._closing and self.on_end is not None:
            self.on_end(error)

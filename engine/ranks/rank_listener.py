"""The leader's side of ranks on other machines: they join by a call, which lasts as long as they do."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator
from queue import SimpleQueue
from threading import Event, Lock, Thread
from urllib.parse import unquote

import grpc
import numpy as np
import numpy.typing as npt

from moonpool.engine.collectives.board import SharedBoard, StepWord
from moonpool.engine.errors import JoinRefused, RankLost, RankUnfit
from moonpool.protos import node_pb2, node_pb2_grpc
from moonpool.runtime import rpc
from moonpool.runtime.config.options import ParallelOptions
from moonpool.runtime.errors import ConfigError
from moonpool.runtime.machine.description import own_version
from moonpool.runtime.message_checks import check_message
from moonpool.runtime.network.sockets import loopback_only
from moonpool.runtime.security import process

log = logging.getLogger(__name__)

_REMINDER_S = 30.0
# Of callers that are refused, beside those of the ranks.
_MORE_CALLS = 16
# For the reason to reach the ranks.
_GRACE_S = 1.0


class RankListener(node_pb2_grpc.RanksServicer):
    """Listens from ``open`` to ``close`` and takes each rank of the other machines once."""

    def __init__(self, options: ParallelOptions, name: str) -> None:
        """``name``: of the leader, a node id."""
        self.options = options
        self._name = name
        self._security = process.current()
        self._server: grpc.Server | None = None
        self._stopped: Event | None = None
        self.port = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._lock = Lock()
        self._ranks: dict[int, FarRank] = {}
        self._joined = asyncio.Event()
        self._refused: set[str] = set()

    @classmethod
    def from_options(cls, options: ParallelOptions, name: str) -> RankListener | None:
        """Return None if all ranks are on this machine."""
        return None if options.hosts == 1 else cls(options, name)

    def open(self) -> None:
        """Listen. Raises PortInUse, or ConfigError for an address of another machine, for one that others
        reach without a key or certificates, and for a network that is not trusted."""
        host, _, port = self.options.listen.rpartition(":")
        host = host.strip("[]")
        if not loopback_only(host):
            if not self.options.trusted_network:
                raise ConfigError(
                    "ranks on several machines exchange tensors over the network of engine.parallel.listen="
                    f"{self.options.listen}, and torch.distributed neither encrypts nor authenticates them: "
                    "on a network that strangers do not reach set engine.parallel.trusted_network=true",
                    "engine.parallel.trusted_network",
                )
            log.warning(
                "tensors between the machines of the ranks are neither encrypted nor authenticated: "
                "engine.parallel.trusted_network says that strangers do not reach their network"
            )
        self._loop = asyncio.get_running_loop()
        self._server, self.port = rpc.serve_threaded(
            node_pb2_grpc.add_RanksServicer_to_server,
            self,
            host or "0.0.0.0",
            int(port),
            option="engine.parallel.listen",
            max_calls=self.options.world_size + _MORE_CALLS,
        )

    async def gather(self) -> dict[int, FarRank]:
        """Wait for all ranks of other machines. Raises RankLost: one has not joined within
        ``start_timeout_s``."""
        limit_s, began_s = self.options.start_timeout_s, time.monotonic()
        while missing := self._missing():
            names = ", ".join(map(str, missing))
            if time.monotonic() - began_s >= limit_s:
                reason = f"it has not joined within {limit_s:g} s (engine.parallel.start_timeout_s)"
                raise RankLost(missing[0], f"{reason}; missing: {names}")
            log.info("waiting at port %d for ranks of other machines to join: %s", self.port, names)
            self._joined.clear()
            left_s = began_s + limit_s - time.monotonic()
            try:
                await asyncio.wait_for(self._joined.wait(), min(_REMINDER_S, max(left_s, 0.0)))
            except TimeoutError:
                continue
        return dict(self._ranks)

    def _missing(self) -> list[int]:
        return [
            rank
            for rank in range(self.options.ranks_per_host, self.options.world_size)
            if rank not in self._ranks
        ]

    def close(self, reason: str) -> None:
        """Stop listening and end all calls. Idempotent."""
        for rank in list(self._ranks.values()):
            rank.end(reason)
        if self._server is not None:
            self._stopped = self._server.stop(_GRACE_S)
            self._server = None

    async def wait_closed(self) -> None:
        """After ``close``: wait until the port is free."""
        if self._stopped is not None:
            await asyncio.to_thread(self._stopped.wait)

    def Join(
        self, request_iterator: Iterator[node_pb2.RankReport], context: grpc.ServicerContext
    ) -> Iterator[node_pb2.RankCommand]:
        """Serve one rank, in a thread of its own."""
        rpc.admit(self._security, "Ranks/Join", context)
        first = next(request_iterator, node_pb2.RankReport())
        check_message(first)
        try:
            far = self._take(first.join, _address_of(context.peer()))
        except JoinRefused as error:
            if str(error) not in self._refused:  # it, or its launcher, tries again
                self._refused.add(str(error))
                log.warning("%s", error)
            context.abort(grpc.StatusCode[error.code], str(error))
        Thread(target=far.receive, args=(request_iterator,), name="rank in", daemon=True).start()
        yield node_pb2.RankCommand(node_id=self._name)
        yield from far.commands()
        context.set_code(grpc.StatusCode.ABORTED)
        context.set_details(far.reason)

    def _take(self, join: node_pb2.RankJoin, address: str) -> FarRank:
        options = self.options
        rank = options.ranks_per_host + join.rank
        what = f"rank {rank} on {join.name} ({address}) is refused by node {self._name}"
        found = join.world_size, join.local_world_size
        wanted = options.world_size - options.ranks_per_host, options.ranks_per_host
        if join.version != own_version():
            raise RankUnfit(
                f"{what}: it has Moonpool {join.version}, the node {own_version()}: install the same version "
                "on both"
            )
        if found != wanted or join.rank >= wanted[0]:
            raise RankUnfit(
                f"{what}: its launcher started {found[0]} ranks, {found[1]} a machine, and the node needs "
                f"{wanted[0]} on {options.hosts - 1} other machines, {wanted[1]} on each (engine.parallel)"
            )
        with self._lock:
            if (other := self._ranks.get(rank)) is not None:
                raise JoinRefused(f"{what}: this rank has joined already, from {other.where}")
            assert self._loop is not None
            self._ranks[rank] = far = FarRank(join, address, self._loop)
        log.info("rank %d has joined from %s", rank, far.where)
        self._loop.call_soon_threadsafe(self._joined.set)
        far.on_end = lambda: self._left(rank)
        return far

    def _left(self, rank: int) -> None:
        log.info("rank %d has left: %s", rank, self._ranks.pop(rank).reason)


class FarRank:
    """See ``RankChannel``: a rank of another machine. ``board``: its view of the leader's, while a model is
    open; its words are written there by the thread that receives."""

    def __init__(self, join: node_pb2.RankJoin, address: str, loop: asyncio.AbstractEventLoop) -> None:
        self.where = f"{join.name} ({address})"
        self.pid = join.pid
        self.address, self.leader_address = address, join.leader_address
        self.board: SharedBoard | None = None
        self.reason = ""
        self.on_end: Callable[[], None] = lambda: None
        self._loop = loop
        self._commands: SimpleQueue[node_pb2.RankCommand | None] = SimpleQueue()
        self._lines: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._ended = asyncio.Event()
        self._ending = Lock()

    def send(self, line: bytes) -> None:
        self._commands.put(node_pb2.RankCommand(line=line))

    def publish(self, number: int, batch: npt.NDArray[np.uint8]) -> None:
        """Send a published step."""
        step = node_pb2.RankStep(number=number, batch=batch.tobytes())
        self._commands.put(node_pb2.RankCommand(step=step))

    def beat(self) -> None:
        """Send a heartbeat of rank 0."""
        self._commands.put(node_pb2.RankCommand())

    async def lines(self) -> AsyncIterator[bytes]:
        while (line := await self._lines.get()) is not None:
            yield line

    async def wait(self) -> str:
        await self._ended.wait()
        return self.reason

    def kill(self) -> None:
        """End its call: it ends itself then, a stopped process once it runs again."""
        self.end("the leader ended its group")

    def commands(self) -> Iterator[node_pb2.RankCommand]:
        """Yield what is sent to it, until its end."""
        while (command := self._commands.get()) is not None:
            yield command

    def receive(self, reports: Iterator[node_pb2.RankReport]) -> None:
        """Process what it reports until the end of its call."""
        reason = "its call has ended, so its process has, or its network"
        try:
            for report in reports:
                check_message(report)
                self._process(report)
        except grpc.RpcError:
            pass  # the same, as gRPC tells it at other times
        except Exception as error:
            log.exception("a report of a rank could not be processed")
            reason = f"{type(error).__name__}: {error}"
        self.end(reason)

    def _process(self, report: node_pb2.RankReport) -> None:
        kind, board = report.WhichOneof("kind"), self.board
        if kind == "line":
            self._post(self._lines.put_nowait, report.line)
        elif board is None:
            return
        elif kind == "done":
            for word, value in zip(StepWord, report.done.words, strict=True):
                board.post_of_step(report.done.step, word, value)
            board.post_done(report.done.step)
        else:
            board.beat()

    def end(self, reason: str) -> None:
        """End its call. From any thread; only the first one counts."""
        with self._ending:
            if self.reason:
                return
            self.reason = reason
        self._commands.put(None)
        self._post(self._finish)

    def _finish(self) -> None:
        self.on_end()
        self._ended.set()
        self._lines.put_nowait(None)

    def _post(self, call: Callable[..., None], *words: object) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(call, *words)


def _address_of(peer: str) -> str:
    """The host of gRPC's name of a peer, such as ipv4:10.0.0.3:5000 or ipv6:%5B::1%5D:5000."""
    return unquote(peer).partition(":")[2].rpartition(":")[0].strip("[]")

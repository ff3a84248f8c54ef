"""The transfer agent of a process: its regions, its listening sockets and its peers."""

from __future__ import annotations

import asyncio
import math
import os
import socket
from collections.abc import Coroutine, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from moonpool.runtime.config.options import TransferOptions
from moonpool.runtime.security import process
from moonpool.runtime.security.posture import check_listening
from moonpool.transfer import metrics
from moonpool.transfer.agent_memory import AgentMemory
from moonpool.transfer.connections.control import Control
from moonpool.transfer.connections.descriptor import AgentDescriptor, announced_host, boot_id, check_agent_id
from moonpool.transfer.connections.handshake import Authenticated, Identity
from moonpool.transfer.connections.link import AGENTS, LocalAgent
from moonpool.transfer.connections.listener import Listener
from moonpool.transfer.connections.notification import Notification, Notifications
from moonpool.transfer.connections.wire import Kind, RegionInfo
from moonpool.transfer.copying.pool import CopyPool
from moonpool.transfer.errors import AgentClosed
from moonpool.transfer.memory.adoption import SupportsCuda, SupportsDLPack
from moonpool.transfer.memory.checksum import Checksums
from moonpool.transfer.memory.lifeline import INCARNATION_NBYTES
from moonpool.transfer.memory.region import Region, RegionTable
from moonpool.transfer.memory.span import Span, Spans
from moonpool.transfer.memory.write_grants import WriteGrant, WriteGrants
from moonpool.transfer.paths.tcp.stream_server import StreamServer
from moonpool.transfer.peers.dialer import Dialer
from moonpool.transfer.peers.peer import Peer
from moonpool.transfer.peers.table import PeerTable

if TYPE_CHECKING:
    from typing_extensions import Buffer

_COPY_THREADS = 2


class TransferAgent:
    """Registers memory and connects to other agents. All methods belong to the event loop that started it.

    Use ``async with await TransferAgent.start(...) as agent``, or ``close`` it. Everything it owns is freed
    when the process ends, however it ends: nothing is left in /dev/shm or on disk.
    """

    def __init__(self, options: TransferOptions, agent_id: str, epoch: int) -> None:
        """Use ``start`` instead."""
        self.options = options
        self.agent_id = check_agent_id(agent_id)
        self.epoch = epoch
        self.incarnation = os.urandom(INCARNATION_NBYTES)
        self._security = process.current()
        self._controls: set[Control] = set()
        self.memory = AgentMemory(options, self.incarnation, self._controls, self._region_closed)
        self.identity = Identity(agent_id, epoch, self.incarnation, self.memory.lifeline.address)
        self.notes = Notifications()
        loop = asyncio.get_running_loop()
        self.grants = WriteGrants(loop, self.memory.ledger)
        self._local = LocalAgent(self.identity, loop, self.regions, self.grants, self.region_info, self.notes)
        self._pool = CopyPool(min(_COPY_THREADS, os.cpu_count() or 1))
        self._server = StreamServer(
            *(self.regions, self.grants, options.tcp.slice_nbytes, self._fetch, self.memory.ledger)
        )
        dialer = Dialer(options, self._security, self._pool, self.memory, self._local, self)
        self._peers = PeerTable(dialer, self.memory, self._controls, options.deadline_s)
        self._listener = Listener(
            *(self.identity, self._security, self._admit, self._num_connections, self._end_idle)
        )
        self._unix_name = ""
        self._tcp_host, self._tcp_port = "", 0
        self._tcp_rails: tuple[str, ...] = ()
        self._closed = False

    @classmethod
    async def start(cls, options: TransferOptions, *, agent_id: str, epoch: int) -> TransferAgent:
        """Start listening. Raises OSError when an address is not available, ConfigError when other machines
        reach it and security is not set up; nothing is left then."""
        agent = cls(options, agent_id, epoch)
        try:
            agent._listen()
        except BaseException:
            await agent.close()
            raise
        AGENTS[agent._local.key] = agent._local
        return agent

    def _listen(self) -> None:
        if {"shm", "cuda-ipc"}.intersection(self.options.transports):
            self._unix_name = f"moonpool-{self.incarnation.hex()}"
            self._listener.listen_unix(self._unix_name)
        if "tcp" in self.options.transports or self.memory.ucx is not None:
            # UCX needs TCP: for its control connection, and for writes.
            host = self.options.tcp.host
            for address in (host, *self.options.tcp.rails):
                check_listening(self._security, address, "transfer.tcp.host")
            listen = self._listener.listen_tcp
            self._tcp_host, self._tcp_port = announced_host(host), listen(host)
            self._tcp_rails = tuple(f"{rail}:{listen(rail)}" for rail in self.options.tcp.rails)

    # ------------------------------------------------------------------ memory

    def allocate(self, nbytes: int, name: str, *, mapped: bool = True) -> Region:
        """Allocate a region of zeroed, resident memory. Raises MemoryError when there is not enough.

        mapped: False: a page may be mapped only when it is touched first, or by ``map_pages``.
        """
        self._raise_if_closed()
        return self.memory.allocate(nbytes, name, mapped)

    async def map_pages(self) -> None:
        """Map in the background what was allocated without ``mapped``, while it may be in use."""
        await self.memory.map_pages()

    def register(
        self,
        buffer: Buffer | SupportsDLPack | SupportsCuda,
        *,
        name: str = "",
        writable: bool = True,
        checksums: Checksums | None = None,
    ) -> Region:
        """Make a region of the caller's contiguous memory, without a copy.

        buffer: host memory by the buffer protocol or DLPack, such as a numpy array or a torch tensor; or CUDA
        device memory by DLPack or ``__cuda_array_interface__``.

        The region keeps the buffer alive until it is closed; device memory also until peers have unmapped it.
        The caller's CUDA streams are not waited for: bytes on a device must be final before a peer is told of
        them, and kernels must be done with old bytes before a read replaces them. Kernels launched after a
        batch has ended see its bytes.

        checksums: computes ``checksum`` of device memory there, from any thread; None: bytes are copied to
        the host for that.

        Raises ValueError when the buffer is not contiguous, is empty, or is read-only but ``writable`` is
        true; CudaUnavailable when there is no CUDA runtime.
        """
        self._raise_if_closed()
        return self.memory.register(buffer, name, writable, checksums)

    def register_shared(self, fd: int, name: str) -> Region:
        """Make a region of a memfd that other processes share. Peers on this host map it. ``fd`` stays open.

        Raises ValueError when its size is not sealed, OSError when it is not a memfd.
        """
        self._raise_if_closed()
        return self.memory.register_shared(fd, name)

    @property
    def regions(self) -> RegionTable:
        return self.memory.regions

    def grant_writes(self, spans: Sequence[Span] | Spans, *, lasts_s: float = math.inf) -> WriteGrant:
        """Let a peer that is told the grant's id write these bytes of our regions, for ``lasts_s``.

        Peers may read every region, and write only what was granted. Before the memory serves another
        purpose, ``revoke`` the grant and wait for its ``then``.
        """
        return self.grants.add(Spans.of(spans), lasts_s)

    def allow_writes(self, region: Region) -> None:
        """Let every peer write all of ``region``, until it is closed."""
        self.grants.allow(region)

    # ------------------------------------------------------------------ peers

    def describe(self) -> AgentDescriptor:
        """What a peer needs to connect. It does not change during the agent's life."""
        return AgentDescriptor(
            agent_id=self.agent_id,
            epoch=self.epoch,
            incarnation=self.incarnation,
            transports=tuple(n for n in self.options.transports if n != "ucx" or self.memory.ucx is not None),
            boot_id=boot_id(),
            unix_name=self._unix_name,
            tcp_host=self._tcp_host,
            tcp_port=self._tcp_port,
            tcp_rails=self._tcp_rails,
        )

    async def connect(self, descriptor: AgentDescriptor, *, deadline_s: float | None = None) -> Peer:
        """The peer with this descriptor; always the same object while it lives.

        deadline_s: ``transfer.deadline_s`` by default.

        Raises PeerLost, StaleEpoch (another incarnation answers), AccessDenied, DeadlineExceeded.
        """
        self._raise_if_closed()
        limit_s = self.options.deadline_s if deadline_s is None else deadline_s
        return await self._peers.connect(descriptor, limit_s)

    def shares_memory_with(self, descriptor: AgentDescriptor) -> bool:
        """Whether the agent is on this host, and either side reads the other's memory without a network."""
        shared = "shm" in descriptor.transports and "shm" in self.options.transports
        return shared and bool(descriptor.unix_name) and descriptor.boot_id == boot_id()

    def reader_of(self, incarnation: bytes) -> Peer:
        """A peer to read from an agent of this host that has connected to us: one that we may not connect to.

        Raises PeerLost: it has not; PathFailed: its memory cannot be read from here.
        """
        self._raise_if_closed()
        return self._peers.reader(incarnation)

    def bandwidth(self) -> dict[str, float]:
        """Measured bytes/s by agent id, of the connected peers."""
        return self._peers.bandwidth()

    def notifications(self) -> Notifications:
        """Notes from peers: ``async for note in agent.notifications()``. One reader at a time."""
        return self.notes

    # ------------------------------------------------------------------ connections made by peers

    def _num_connections(self, incarnation: bytes) -> tuple[int, int, int]:
        """All but those that ``_end_idle`` can end, those for control, and those of one agent."""
        controls = [control.remote.identity.incarnation for control in list(self._controls)]
        served = self._server.incarnations()
        num_kept = len(controls) + len(served) - self._server.num_idle()
        num_of_agent = controls.count(incarnation) + served.count(incarnation)
        return num_kept, len(controls), num_of_agent

    def _end_idle(self, most: int) -> None:
        """End idle data connections while more than ``most`` connections are open."""
        self._server.end_idle(most - len(self._controls))

    def _admit(self, sock: socket.socket, remote: Authenticated) -> None:
        if remote.kind is Kind.CONTROL:
            self._controls.add(Control(sock, remote, self))
        elif remote.kind is Kind.DATA:
            self._server.serve(sock, remote)
        else:
            self.memory.send_memfd(sock, remote.argument)

    def _fetch(
        self, client: Authenticated, spans: Spans, sources: Spans, seconds: float, grant: int
    ) -> Future[object]:
        """Read what a client writes. From any thread."""
        return _Fetch(self._local.loop, self._read_from(client, spans, sources, seconds, grant))

    async def _read_from(
        self, client: Authenticated, spans: Spans, sources: Spans, seconds: float, grant: int
    ) -> object:
        task = asyncio.current_task()
        assert task is not None
        use = self.grants.use(grant, spans, lambda _: self._local.loop.call_soon_threadsafe(task.cancel))
        try:
            seconds = min(seconds, use.seconds_left())
            return await self._peers.writer(client.identity).read(spans, sources, deadline_s=seconds)
        finally:
            use.release()

    def _region_closed(self, region_id: int) -> None:
        """A region of ours was closed: tell all peers."""
        for control in list(self._controls):
            control.region_closed(region_id)
        for link in list(self._local.links):
            link.region_closed(region_id)

    # ------------------------------------------------------------------ a ``ControlOwner``

    def region_info(self, region_id: int) -> RegionInfo:
        return self.memory.info(region_id)

    def note_received(self, control: Control, payload: bytes) -> None:
        identity = control.remote.identity
        self.notes.put(Notification(identity.agent_id, identity.epoch, payload))
        metrics.NOTES.labels("received").inc()
        if self.notes.full:
            control.pause()
            self.notes.when_drained(control.resume)

    def peer_region_closed(self, control: Control, region_id: int) -> None:
        self._server.forget(control.remote.identity.incarnation, region_id)

    def region_released(self, control: Control, region_id: int) -> None:
        self.memory.closed_regions.release(control, region_id)

    def control_lost(self, control: Control, reason: str) -> None:
        self._controls.discard(control)
        self.memory.closed_regions.forget_reader(control)
        self._peers.link_lost(control, reason)

    # ------------------------------------------------------------------ closing

    async def close(self) -> None:
        """End all batches with AgentClosed, and free everything. Idempotent.

        When it returns, no thread of the agent is left and nothing touches any region.
        """
        if self._closed:
            return
        self._closed = True
        AGENTS.pop(self._local.key, None)
        await self._listener.close()
        await self._peers.close(AgentClosed(self.agent_id))
        for control in list(self._controls):
            control.close()
        for link in list(self._local.links):
            link.lost()
        # Its threads wait for reads on this loop.
        await asyncio.to_thread(self._server.close)
        self._pool.close()
        self.memory.close()
        self.notes.close()

    def _raise_if_closed(self) -> None:
        if self._closed:
            raise AgentClosed(self.agent_id)

    async def __aenter__(self) -> TransferAgent:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


class _Fetch(Future[object]):
    """A read on the event loop. If cancelled it is done once the read has ended: bytes arrive until then."""

    def __init__(self, loop: asyncio.AbstractEventLoop, reading: Coroutine[Any, Any, object]) -> None:
        super().__init__()
        self._loop = loop
        self._task: asyncio.Task[object] | None = None
        loop.call_soon_threadsafe(self._begin, reading)

    def _begin(self, reading: Coroutine[Any, Any, object]) -> None:
        self._task = self._loop.create_task(reading)
        self._task.add_done_callback(self._ended)

    def cancel(self) -> bool:
        self._loop.call_soon_threadsafe(self._stop)
        return True

    def _stop(self) -> None:
        assert self._task is not None, "it begins first"
        self._task.cancel()

    def _ended(self, task: asyncio.Task[object]) -> None:
        if task.cancelled():
            super().cancel()
        elif (error := task.exception()) is not None:
            self.set_exception(error)
        else:
            self.set_result(task.result())

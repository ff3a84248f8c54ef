"""The transfer agent of a process: its regions, its door, and its peers."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from concurrent.futures import Future
from typing import TYPE_CHECKING

from moonpool.runtime.config.options import TransferOptions
from moonpool.runtime.network.sockets import loopback_only
from moonpool.runtime.network.tls import tls_contexts
from moonpool.transfer import metrics
from moonpool.transfer.agent_memory import AgentMemory
from moonpool.transfer.connections.control import Control
from moonpool.transfer.connections.descriptor import INCARNATION_NBYTES, AgentDescriptor, check_agent_id
from moonpool.transfer.connections.handshake import Identity, Met
from moonpool.transfer.connections.host import announced_host, boot_id
from moonpool.transfer.connections.listener import Listener
from moonpool.transfer.connections.local_link import AGENTS
from moonpool.transfer.connections.notification import Notification, Notifications
from moonpool.transfer.connections.wire import Kind, RegionInfo
from moonpool.transfer.copying.pool import CopyPool
from moonpool.transfer.errors import AgentClosed
from moonpool.transfer.memory.adoption import SupportsCuda, SupportsDLPack
from moonpool.transfer.memory.region import Region, RegionTable
from moonpool.transfer.memory.span import Spans
from moonpool.transfer.native import libc
from moonpool.transfer.paths.tcp.stream_server import StreamServer
from moonpool.transfer.peers.peer import Peer
from moonpool.transfer.peers.table import Peers

if TYPE_CHECKING:
    from typing_extensions import Buffer

_COPY_THREADS = 2

_log = logging.getLogger(__name__)


class TransferAgent:
    """Registers memory, describes itself, connects to others. All methods belong to the event loop it was
    started on.

    ``async with await TransferAgent.start(...) as agent``, or ``close`` it. Everything it owns goes with the
    process, however that ends: nothing is left in /dev/shm or on disk.
    """

    def __init__(self, options: TransferOptions, agent_id: str, epoch: int) -> None:
        """Not started; use ``start``."""
        self.options = options
        self.agent_id = check_agent_id(agent_id)
        self.tls = tls_contexts(options.tls)
        self.epoch = epoch
        self.loop = asyncio.get_running_loop()
        self.incarnation = os.urandom(INCARNATION_NBYTES)
        self._controls: set[Control] = set()
        self.memory = AgentMemory(options, self.incarnation, self._controls)
        self.identity = Identity(agent_id, epoch, self.incarnation, self.memory.lifeline.address)
        self.pool = CopyPool(min(_COPY_THREADS, os.cpu_count() or 1))
        self.notes = Notifications()
        self._server = StreamServer(self.regions, options.tcp.slice_nbytes, self._fetch)
        self.peers = Peers(self, self._controls)
        self._listener = Listener(
            self.identity,
            options.secret,
            self._admit,
            self._num_connections,
            None if self.tls is None else self.tls.server,
        )
        self._unix_name = ""
        self._tcp_host, self._tcp_port = "", 0
        self._tcp_rails: tuple[str, ...] = ()
        self._closed = False

    @classmethod
    async def start(cls, options: TransferOptions, *, agent_id: str, epoch: int) -> TransferAgent:
        """Listen as ``options`` say. Raises OSError when the address cannot be had; then nothing is left
        behind.
        """
        agent = cls(options, agent_id, epoch)
        try:
            agent._listen()
        except BaseException:
            await agent.close()
            raise
        AGENTS[os.getpid(), agent.incarnation] = agent
        return agent

    def _listen(self) -> None:
        if {"shm", "cuda-ipc"}.intersection(self.options.transports):
            # Where Yama lets only a parent read its children's memory, say that peers of the same user may
            # read ours.
            libc.allow_readers()
            self._unix_name = f"moonpool-{self.incarnation.hex()}"
            self._listener.listen_unix(self._unix_name)
        if "tcp" in self.options.transports or self.memory.ucx is not None:
            # UCX has no control connection of its own, and no way to refuse a write.
            host = self.options.tcp.host
            if not self.options.secret and not all(map(loopback_only, (host, *self.options.tcp.rails))):
                _log.warning("transfer.secret is empty: whoever reaches %s can read and write the pool", host)
            listen = self._listener.listen_tcp
            self._tcp_host, self._tcp_port = announced_host(host), listen(host)
            self._tcp_rails = tuple(f"{rail}:{listen(rail)}" for rail in self.options.tcp.rails)

    # ------------------------------------------------------------------ memory

    def allocate(self, nbytes: int, name: str) -> Region:
        """A region of ``nbytes`` zeroed bytes, every page of it present. Raises MemoryError when there is
        not as much.
        """
        self._raise_if_closed()
        return self.memory.allocate(nbytes, name)

    def register(
        self, buffer: Buffer | SupportsDLPack | SupportsCuda, *, name: str = "", writable: bool = True
    ) -> Region:
        """A region of memory the caller owns, without a copy: anything contiguous in host memory that has
        the buffer protocol or speaks DLPack, such as a numpy array or a torch tensor; or in the memory of a
        CUDA device, with DLPack or ``__cuda_array_interface__``.

        The region keeps the buffer alive until it is closed; memory of a device also until peers that have
        mapped it let it go. Nothing here waits for streams of the caller: bytes on a device must be final
        before a peer is told of them, and kernels must be done with old bytes before a read is asked to
        replace them. When a batch has ended, whatever is launched then sees its bytes.

        Raises ValueError when it is not contiguous, is empty, or read-only where ``writable`` is asked for;
        CudaUnavailable when there is no CUDA runtime.
        """
        self._raise_if_closed()
        return self.memory.register(buffer, name, writable)

    def register_shared(self, fd: int, name: str) -> Region:
        """A region of a memfd that other processes have too: peers on this host map it. The descriptor stays
        the caller's.

        Raises ValueError when it is not sealed at its size, OSError when it is no memfd.
        """
        self._raise_if_closed()
        return self.memory.register_shared(fd, name)

    @property
    def regions(self) -> RegionTable:
        return self.memory.regions

    def region_info(self, region_id: int) -> RegionInfo:
        """What peers are told of a region; of one that is not open, just that."""
        return self.memory.info(region_id)

    # ------------------------------------------------------------------ peers

    def describe(self) -> AgentDescriptor:
        """What a peer needs to connect. It does not change while the agent lives."""
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
        """The peer so described: the same object as long as it lives, however often and from where it is
        asked for.

        deadline_s: ``transfer.deadline_s`` unless given.

        Raises PeerLost, StaleEpoch (another incarnation is there), AccessDenied, DeadlineExceeded.
        """
        self._raise_if_closed()
        limit_s = self.options.deadline_s if deadline_s is None else deadline_s
        return await self.peers.connect(descriptor, limit_s)

    def bandwidth(self) -> dict[str, float]:
        """Bytes/s by agent id, of the peers there are now and with which something was measured."""
        return self.peers.bandwidth()

    def notifications(self) -> Notifications:
        """What peers send with ``notify``: ``async for note in agent.notifications()``. One reader at a
        time.
        """
        return self.notes

    # ------------------------------------------------------------------ the other ends of peers' connections

    def _num_connections(self) -> int:
        return len(self._controls) + len(self._server)

    def _admit(self, sock: socket.socket, met: Met) -> None:
        if met.kind is Kind.CONTROL:
            self._controls.add(Control(sock, met, self))
        elif met.kind is Kind.DATA:
            self._server.serve(sock, met)
        else:
            self.memory.share(sock, met.argument)

    def _fetch(self, client: Met, spans: Spans, sources: Spans, seconds: float) -> Future[object]:
        """Read what a client writes. From any thread."""
        return asyncio.run_coroutine_threadsafe(self._read_from(client, spans, sources, seconds), self.loop)

    async def _read_from(self, client: Met, spans: Spans, sources: Spans, seconds: float) -> object:
        return await self.peers.writer(client.identity).read(spans, sources, deadline_s=seconds)

    def note_received(self, control: Control, payload: bytes) -> None:
        identity = control.met.identity
        self.notes.put(Notification(identity.agent_id, identity.epoch, payload))
        metrics.NOTES.labels("received").inc()
        if self.notes.full:
            control.pause()
            self.notes.when_drained(control.resume)

    def region_gone(self, control: Control, region_id: int) -> None:
        self._server.forget(control.met.identity.incarnation, region_id)

    def region_let_go(self, control: Control, region_id: int) -> None:
        self.memory.let_go(control, region_id)

    def control_lost(self, control: Control, reason: str) -> None:
        self._controls.discard(control)
        self.memory.gone(control)
        self.peers.link_lost(control, reason)

    # ------------------------------------------------------------------ the end

    async def close(self) -> None:
        """End all batches, with AgentClosed, and let everything go. Idempotent.

        When it returns, no thread of the agent is left and nothing touches any region.
        """
        if self._closed:
            return
        self._closed = True
        AGENTS.pop((os.getpid(), self.incarnation), None)
        await self._listener.close()
        await self.peers.close()
        for control in list(self._controls):
            control.close()
        for link in list(self.memory.local_links):
            link.lost()
        self._server.close()
        self.pool.close()
        self.memory.close()
        self.notes.close()

    def _raise_if_closed(self) -> None:
        if self._closed:
            raise AgentClosed(self.agent_id)

    async def __aenter__(self) -> TransferAgent:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

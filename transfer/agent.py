"""The transfer agent of a process: its regions, its door, and its peers."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from concurrent.futures import Future
from typing import TYPE_CHECKING

from runtime.options import TransferOptions
from transfer import libc, metrics
from transfer.adopted import SupportsCuda, SupportsDLPack
from transfer.agent_memory import AgentMemory
from transfer.connecting import connect_peer, writer_of
from transfer.control import Control
from transfer.copy_pool import CopyPool
from transfer.descriptor import INCARNATION_NBYTES, AgentDescriptor, check_agent_id
from transfer.errors import AgentClosed, DeadlineExceeded, PeerLost
from transfer.handshake import Identity, Met
from transfer.host import announced_host, boot_id, loopback_only
from transfer.link import Link
from transfer.listener import Listener
from transfer.local_link import AGENTS
from transfer.notification import Notification, Notifications
from transfer.peer import Peer
from transfer.region import Region, RegionTable
from transfer.serving import StreamServer
from transfer.span import Spans
from transfer.tls import tls_contexts
from transfer.wire import Kind, RegionInfo

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
        self._peers: dict[bytes, asyncio.Task[Peer]] = {}
        self._links: dict[Link, Peer] = {}
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
        self._closing: set[asyncio.Task[None]] = set()
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
            name = f"moonpool-{self.incarnation.hex()}"
            unix = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            unix.bind(f"\0{name}")
            self._unix_name = name
            self._listener.listen(unix)
        if "tcp" in self.options.transports or self.memory.ucx is not None:
            # UCX has no control connection of its own, and no way to refuse a write.
            host = self.options.tcp.host
            if not self.options.secret and not all(map(loopback_only, (host, *self.options.tcp.rails))):
                _log.warning("transfer.secret is empty: whoever reaches %s can read and write the pool", host)
            self._tcp_host, self._tcp_port = announced_host(host), self._listen_tcp(host)
            self._tcp_rails = tuple(f"{rail}:{self._listen_tcp(rail)}" for rail in self.options.tcp.rails)

    def _listen_tcp(self, host: str) -> int:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        sock = socket.create_server((host, 0), family=family)
        self._listener.listen(sock)
        return int(sock.getsockname()[1])

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
        task = self._peers.get(descriptor.incarnation)
        if task is None:
            task = self.loop.create_task(self._connect(descriptor))
            # When all who waited have given up, nobody is left to look at how it ended.
            task.add_done_callback(lambda task: task.cancelled() or task.exception())
            self._peers[descriptor.incarnation] = task
        try:
            async with asyncio.timeout(limit_s):
                # Shielded: others may be waiting for the same peer.
                return await asyncio.shield(task)
        except TimeoutError:
            raise DeadlineExceeded(descriptor.agent_id, limit_s, "connecting") from None

    async def _connect(self, descriptor: AgentDescriptor) -> Peer:
        try:
            async with asyncio.timeout(self.options.deadline_s):
                peer = await connect_peer(self, descriptor)
        except BaseException as error:
            self._peers.pop(descriptor.incarnation, None)
            if isinstance(error, TimeoutError):
                raise DeadlineExceeded(descriptor.agent_id, self.options.deadline_s, "connecting") from None
            raise
        self._watch(peer)
        if not peer.link.open:
            # Lost before it was ours to be told of.
            gone = PeerLost(peer.agent_id, "it went away while we were connecting")
            self._peers.pop(descriptor.incarnation, None)
            peer.lose(gone)
            raise gone
        return peer

    def _watch(self, peer: Peer) -> None:
        self._links[peer.link] = peer
        peer.on_lost = self._forget
        if isinstance(peer.link, Control):
            # It may read from us, for a write; so it must hear of regions that are closed.
            self._controls.add(peer.link)

    def link_lost(self, link: Link, reason: str) -> None:
        """The process at the other end of a peer's link is gone."""
        peer = self._links.get(link)
        if peer is not None:
            peer.lose(PeerLost(peer.agent_id, reason))

    def _forget(self, peer: Peer) -> None:
        """``peer`` is lost: whoever asks for it connects anew."""
        self._links.pop(peer.link, None)
        if isinstance(peer.link, Control) and (peer.owns_link or not peer.link.open):
            self._controls.discard(peer.link)
            self.memory.gone(peer.link)
        for incarnation, task in list(self._peers.items()):
            if task.done() and not task.cancelled() and task.exception() is None and task.result() is peer:
                del self._peers[incarnation]
        closing = self.loop.create_task(peer.close())
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)

    def bandwidth(self) -> dict[str, float]:
        """Bytes/s by agent id, of the peers there are now and with which something was measured."""
        return {peer.agent_id: rate for peer in self._links.values() if (rate := peer.nbytes_per_s)}

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
        incarnation = client.identity.incarnation
        control = next((c for c in self._controls if c.met.identity.incarnation == incarnation), None)
        if control is None:
            raise PeerLost(client.identity.agent_id, "it has no control connection")
        writer = self._links.get(control)
        if writer is None:
            writer = writer_of(self, control)
            self._watch(writer)
        return await writer.read(spans, sources, deadline_s=seconds)

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
        self.link_lost(control, reason)

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
        connecting = [task for task in self._peers.values() if not task.done()]
        for task in connecting:
            task.cancel()
        if connecting:
            await asyncio.wait(connecting)
        for peer in list(self._links.values()):
            peer.lose(AgentClosed(self.agent_id))
        if self._closing:
            await asyncio.wait(list(self._closing))
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

"""The peers of an agent. Each is connected once, watched, and removed when it is lost."""

from __future__ import annotations

import asyncio

from moonpool.transfer.agent_memory import AgentMemory
from moonpool.transfer.connections.control import Control
from moonpool.transfer.connections.descriptor import AgentDescriptor
from moonpool.transfer.connections.handshake import Identity
from moonpool.transfer.connections.link import Link
from moonpool.transfer.errors import AgentClosed, DeadlineExceeded, PeerLost
from moonpool.transfer.peers.dialer import Dialer
from moonpool.transfer.peers.peer import Peer


class PeerTable:
    """Belongs to the event loop's thread."""

    def __init__(
        self, dialer: Dialer, memory: AgentMemory, controls: set[Control], deadline_s: float
    ) -> None:
        """controls: the agent's connections, in either direction; this table adds and removes its own."""
        self._dialer = dialer
        self._memory = memory
        self._controls = controls
        self._deadline_s = deadline_s
        self._connecting: dict[bytes, asyncio.Task[Peer]] = {}
        self._by_link: dict[Link, Peer] = {}
        self._readers: dict[Link, Peer] = {}  # by the connection that the other side made
        self._closing: set[asyncio.Task[None]] = set()

    async def connect(self, descriptor: AgentDescriptor, limit_s: float) -> Peer:
        """See ``TransferAgent.connect``."""
        task = self._connecting.get(descriptor.incarnation)
        if task is None:
            task = asyncio.create_task(self._connect(descriptor))
            # If all waiters have given up, the error would never be retrieved.
            task.add_done_callback(lambda task: task.cancelled() or task.exception())
            self._connecting[descriptor.incarnation] = task
        try:
            async with asyncio.timeout(limit_s):
                # Shielded, because other callers may wait for the same peer.
                return await asyncio.shield(task)
        except TimeoutError:
            raise DeadlineExceeded(descriptor.agent_id, limit_s, "connecting") from None

    async def _connect(self, descriptor: AgentDescriptor) -> Peer:
        try:
            async with asyncio.timeout(self._deadline_s):
                peer = await self._dialer.connect(descriptor, self.link_lost)
        except BaseException as error:
            self._connecting.pop(descriptor.incarnation, None)
            if isinstance(error, TimeoutError):
                raise DeadlineExceeded(descriptor.agent_id, self._deadline_s, "connecting") from None
            raise
        self._watch(peer)
        if not peer.link.open:
            # The link was lost before ``_watch``, so ``link_lost`` did not know the peer.
            gone = PeerLost(peer.agent_id, "it went away while we were connecting")
            self._connecting.pop(descriptor.incarnation, None)
            peer.lose(gone)
            raise gone
        return peer

    def writer(self, client: Identity) -> Peer:
        """The peer for reading what ``client`` writes to us. Raises PeerLost, PathFailed."""
        control = self._control_of(client.incarnation)
        writer = self._by_link.get(control)
        if writer is None:
            writer = self._dialer.connect_back(control)
            self._watch(writer)
        return writer

    def reader(self, incarnation: bytes) -> Peer:
        """See ``TransferAgent.reader_of``."""
        control = self._control_of(incarnation)
        reader = self._readers.get(control)
        if reader is None:
            reader = self._readers[control] = self._dialer.reader_of(control)
            reader.on_lost = self._forget
        return reader

    def _control_of(self, incarnation: bytes) -> Control:
        control = next((c for c in self._controls if c.remote.identity.incarnation == incarnation), None)
        if control is None:
            raise PeerLost(incarnation.hex(), "it has no control connection")
        return control

    def bandwidth(self) -> dict[str, float]:
        """See ``TransferAgent.bandwidth``."""
        return {peer.agent_id: rate for peer in self._by_link.values() if (rate := peer.nbytes_per_s)}

    def link_lost(self, link: Link, reason: str) -> None:
        """The process at the other end of a link is gone."""
        for peer in (self._by_link.get(link), self._readers.get(link)):
            if peer is not None:
                peer.lose(PeerLost(peer.agent_id, reason))

    def _watch(self, peer: Peer) -> None:
        self._by_link[peer.link] = peer
        peer.on_lost = self._forget
        if isinstance(peer.link, Control):
            # The peer may read from us, for a write, so it must be told of closed regions.
            self._controls.add(peer.link)

    def _forget(self, peer: Peer) -> None:
        """``peer`` is lost: the next ``connect`` makes a new one."""
        table = self._readers if self._readers.get(peer.link) is peer else self._by_link
        table.pop(peer.link, None)
        if isinstance(peer.link, Control) and (peer.owns_link or not peer.link.open):
            self._controls.discard(peer.link)
            self._memory.closed_regions.forget_reader(peer.link)
        for incarnation, task in list(self._connecting.items()):
            if task.done() and not task.cancelled() and task.exception() is None and task.result() is peer:
                del self._connecting[incarnation]
        closing = asyncio.create_task(peer.close())
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)

    async def close(self, error: AgentClosed) -> None:
        """End all peers with ``error``. Nothing of theirs is in progress when it returns."""
        connecting = [task for task in self._connecting.values() if not task.done()]
        for task in connecting:
            task.cancel()
        if connecting:
            await asyncio.wait(connecting)
        peers = [*self._by_link.values(), *self._readers.values()]
        for peer in peers:
            peer.end(error)
        # Needs the connections, to tell the peers.
        await self._memory.withdraw()
        for peer in peers:
            if peer in (self._by_link.get(peer.link), self._readers.get(peer.link)):
                self._forget(peer)
        if self._closing:
            await asyncio.wait(list(self._closing))

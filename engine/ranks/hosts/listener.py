"""The door of a leader whose ranks are on several machines: their rank hosts come in here."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket

from moonpool.engine.errors import HostRefused
from moonpool.engine.ranks.hosts.connection import RelayConnection
from moonpool.engine.ranks.hosts.handshake import HANDSHAKE_S, Welcome, meet_rank_host
from moonpool.engine.ranks.hosts.remote_host import RemoteHost
from moonpool.runtime.config.options import ParallelOptions, TransferOptions
from moonpool.runtime.errors import ConfigError, PortInUse
from moonpool.runtime.network.sockets import loopback_only, prepare
from moonpool.runtime.network.tls import secure, tls_contexts

log = logging.getLogger(__name__)

_WAITING_S = 30.0
_MAX_STRANGERS = 64


class HostListener:
    """Listens from ``open`` until it is ``shut``; ``num_hosts`` may be here at a time."""

    def __init__(
        self, num_hosts: int, listen: str, name: str, timeout_s: float, transfer: TransferOptions
    ) -> None:
        """``listen``: host:port; ``name``: what the leader is called there. Raises ConfigError: its
        certificates cannot be used."""
        self.num_hosts = num_hosts
        host, _, port = listen.rpartition(":")
        self._host, self._port = host.strip("[]"), int(port)
        self._welcome = Welcome(name, timeout_s)
        self._secret = transfer.secret
        self._tls = tls_contexts(transfer.tls)
        self._listening: socket.socket | None = None
        self._meeting: set[asyncio.Task[None]] = set()
        self._here: list[RemoteHost] = []
        self._succeeded = asyncio.Event()
        self._told: set[tuple[str, str]] = set()

    @classmethod
    def from_options(
        cls, options: ParallelOptions, name: str, transfer: TransferOptions
    ) -> HostListener | None:
        """None: all ranks are on this machine."""
        if options.hosts == 1:
            return None
        return cls(options.hosts - 1, options.listen, name, options.timeout_s, transfer)

    @property
    def port(self) -> int:
        """Where it listens."""
        assert self._listening is not None, "not open"
        return int(self._listening.getsockname()[1])

    def open(self) -> None:
        """Raises PortInUse, ConfigError: the address is not this machine's."""
        if not self._secret and not loopback_only(self._host):
            log.warning("transfer.secret is empty: whoever reaches %s can run ranks of ours", self._host)
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        try:
            self._listening = socket.create_server((self._host, self._port), family=family)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise PortInUse(self._host, self._port, "engine.parallel.listen") from error
            raise ConfigError(
                f"engine.parallel.listen is {self._host}:{self._port}, where this machine cannot listen: "
                f"{error.strerror or error}",
                "engine.parallel.listen",
            ) from error
        self._listening.setblocking(False)
        self._listening.listen(_MAX_STRANGERS)
        asyncio.get_running_loop().add_reader(self._listening.fileno(), self._accept, self._listening)

    async def gather(self) -> list[RemoteHost]:
        """When all are here: who they are. Waits for them as long as it takes."""
        while len(self._here) < self.num_hosts:
            missing = self.num_hosts - len(self._here)
            log.info(
                "waiting for %d of %d rank hosts at port %d: there run `moonpool ranks --leader %s:%d`",
                missing,
                self.num_hosts,
                self.port,
                self._host,
                self.port,
            )
            self._succeeded.clear()
            try:
                await asyncio.wait_for(self._succeeded.wait(), _WAITING_S)
            except TimeoutError:
                continue
        return list(self._here)

    def close(self, reason: str) -> None:
        """Nobody comes in any more, and who is here ends its ranks. Idempotent."""
        self.shut()
        for host in self._here:
            host.close(reason)

    def shut(self) -> None:
        """Nobody comes in any more. Idempotent."""
        for task in self._meeting:
            task.cancel()
        if self._listening is not None:
            asyncio.get_running_loop().remove_reader(self._listening.fileno())
            self._listening.close()
            self._listening = None

    def _accept(self, listening: socket.socket) -> None:
        try:
            sock, _ = listening.accept()
        except OSError as error:
            log.debug("a rank host could not be accepted: %s", error)
            return
        prepare(sock)
        if len(self._meeting) >= _MAX_STRANGERS:
            sock.close()
            return
        task = asyncio.create_task(self._meet(sock), name="rank host")
        self._meeting.add(task)
        task.add_done_callback(self._meeting.discard)

    async def _meet(self, sock: socket.socket) -> None:
        peer = str(sock.getpeername()[0])
        try:
            async with asyncio.timeout(HANDSHAKE_S):
                if self._tls is not None:
                    sock = await secure(sock, self._tls.server, server=True)
                name = await meet_rank_host(sock, self._welcome, self._secret, self._refuse)
        except (OSError, HostRefused, TimeoutError) as error:
            sock.close()
            # It comes again and again: once is enough.
            if (peer, str(error)) not in self._told:
                self._told.add((peer, str(error)))
                log.warning("%s is not taken in as a rank host: %s", peer, error or "it said nothing")
        except BaseException:
            sock.close()
            raise
        else:
            self._admit(name, sock)

    def _refuse(self, name: str) -> str:
        if len(self._here) < self.num_hosts:
            return ""
        names = ", ".join(host.name for host in self._here)
        return f"node {self._welcome.leader} has its {self.num_hosts} rank hosts: {names}"

    def _admit(self, name: str, sock: socket.socket) -> None:
        host = RemoteHost(name, RelayConnection(sock, self._welcome.timeout_s))
        if refused := self._refuse(name):
            # Two have proved themselves at once.
            host.close(refused)
            return
        log.info("rank host %s is here", host.name)
        self._here.append(host)
        host.ended.add_done_callback(lambda ended: self._left(host, ended.result()))
        self._succeeded.set()

    def _left(self, host: RemoteHost, reason: str) -> None:
        log.info("rank host %s is gone: %s", host.name, reason)
        if host in self._here:
            self._here.remove(host)

"""The listener of a leader with ranks on several machines: rank hosts connect here."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket

from moonpool.engine.errors import HostRefused
from moonpool.engine.ranks.hosts.connection import RelayConnection
from moonpool.engine.ranks.hosts.handshake import HANDSHAKE_S, Welcome, meet_rank_host, rank_host_key
from moonpool.engine.ranks.hosts.remote_host import RemoteHost
from moonpool.runtime.config.options import ParallelOptions
from moonpool.runtime.errors import ConfigError, PortInUse
from moonpool.runtime.network.sockets import prepare
from moonpool.runtime.security import process
from moonpool.runtime.security.posture import check_listening
from moonpool.runtime.security.roles import NODE
from moonpool.runtime.security.tls import owner_of_socket, secure

log = logging.getLogger(__name__)

_REMINDER_S = 30.0
_MAX_HANDSHAKES = 64


class HostListener:
    """Listens from ``open`` to ``close`` and accepts ``num_hosts`` rank hosts at a time."""

    def __init__(self, num_hosts: int, listen: str, name: str, timeout_s: float) -> None:
        """``listen``: host:port; ``name``: of the leader."""
        self.num_hosts = num_hosts
        host, _, port = listen.rpartition(":")
        self._host, self._port = host.strip("[]"), int(port)
        self._welcome = Welcome(name, timeout_s)
        self._security = process.current()
        self._listening: socket.socket | None = None
        self._meeting: set[asyncio.Task[None]] = set()
        self._hosts: list[RemoteHost] = []
        self._joined = asyncio.Event()
        self._logged: set[tuple[str, str]] = set()

    @classmethod
    def from_options(cls, options: ParallelOptions, name: str) -> HostListener | None:
        """Return None if all ranks are on this machine."""
        if options.hosts == 1:
            return None
        return cls(options.hosts - 1, options.listen, name, options.timeout_s)

    @property
    def port(self) -> int:
        """The port it listens on."""
        assert self._listening is not None, "not open"
        return int(self._listening.getsockname()[1])

    def open(self) -> None:
        """Listen. Raises PortInUse, or ConfigError for an address of another machine, or for one that others
        reach without a key or certificates."""
        check_listening(self._security, self._host, "engine.parallel.listen")
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        try:
            self._listening = socket.create_server((self._host, self._port), family=family)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise PortInUse(self._host, self._port, "engine.parallel.listen") from error
            raise ConfigError(
                f"engine.parallel.listen is {self._host}:{self._port}, but this machine cannot listen there: "
                f"{error.strerror or error}",
                "engine.parallel.listen",
            ) from error
        self._listening.setblocking(False)
        self._listening.listen(_MAX_HANDSHAKES)
        asyncio.get_running_loop().add_reader(self._listening.fileno(), self._accept, self._listening)

    async def gather(self) -> list[RemoteHost]:
        """Wait for all rank hosts, without a time limit, and return them."""
        while len(self._hosts) < self.num_hosts:
            missing = self.num_hosts - len(self._hosts)
            log.info(
                "waiting for %d of %d rank hosts at port %d: run `moonpool ranks --leader %s:%d` on them",
                missing,
                self.num_hosts,
                self.port,
                self._host,
                self.port,
            )
            self._joined.clear()
            try:
                await asyncio.wait_for(self._joined.wait(), _REMINDER_S)
            except TimeoutError:
                continue
        return list(self._hosts)

    def close(self, reason: str) -> None:
        """Stop listening and end all connections. Idempotent."""
        for host in self._hosts:
            host.close(reason)
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
        if len(self._meeting) >= _MAX_HANDSHAKES:
            sock.close()
            return
        task = asyncio.create_task(self._meet(sock), name="rank host")
        self._meeting.add(task)
        task.add_done_callback(self._meeting.discard)

    async def _meet(self, sock: socket.socket) -> None:
        peer = str(sock.getpeername()[0])
        try:
            async with asyncio.timeout(HANDSHAKE_S):
                if (tls := self._security.tls) is not None:
                    sock = secured = await secure(sock, tls, server=True)
                    if (owner := owner_of_socket(secured)).role != NODE:
                        raise HostRefused(f"its certificate is of {owner.role} {owner.name}, not of a node")
                key = rank_host_key(self._security)
                name = await meet_rank_host(sock, self._welcome, key, self._refuse)
        except (OSError, HostRefused, TimeoutError) as error:
            sock.close()
            # It retries; log each reason once.
            if (peer, str(error)) not in self._logged:
                self._logged.add((peer, str(error)))
                log.warning("rank host at %s is refused: %s", peer, error or "it sent nothing")
        except BaseException:
            sock.close()
            raise
        else:
            self._admit(name, sock)

    def _refuse(self, name: str) -> str:
        if len(self._hosts) < self.num_hosts:
            return ""
        names = ", ".join(host.name for host in self._hosts)
        return f"node {self._welcome.leader} already has its {self.num_hosts} rank hosts: {names}"

    def _admit(self, name: str, sock: socket.socket) -> None:
        host = RemoteHost(name, RelayConnection(sock, self._welcome.timeout_s))
        if refused := self._refuse(name):
            # Two handshakes ended at once.
            host.close(refused)
            return
        log.info("rank host %s has joined", host.name)
        self._hosts.append(host)
        host.ended.add_done_callback(lambda ended: self._left(host, ended.result()))
        self._joined.set()

    def _left(self, host: RemoteHost, reason: str) -> None:
        log.info("rank host %s has left: %s", host.name, reason)
        if host in self._hosts:
            self._hosts.remove(host)

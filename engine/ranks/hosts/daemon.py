"""``moonpool ranks --leader HOST:PORT``: runs ranks for a node on another machine.

It has no model and no engine options: the leader sends all assignments.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import socket
import sys
from collections.abc import Sequence

from moonpool.engine.errors import HostRefused
from moonpool.engine.ranks.hosts.connection import RelayConnection
from moonpool.engine.ranks.hosts.daemon_session import DaemonSession
from moonpool.engine.ranks.hosts.handshake import HANDSHAKE_S, Welcome, meet_leader, rank_host_key
from moonpool.runtime.config.options import Config
from moonpool.runtime.errors import ConfigError
from moonpool.runtime.network.sockets import prepare
from moonpool.runtime.security import process
from moonpool.runtime.security.tls import secure
from moonpool.runtime.service.lifecycle import ServiceContext, run_service
from moonpool.runtime.service.vital import cancel_and_wait

log = logging.getLogger(__name__)

_FIRST_PAUSE_S = 0.1
_MAX_PAUSE_S = 3.0


class RankHost:
    """Connects to its leader, serves it, and connects again: a leader that lost its group starts another."""

    def __init__(self, config: Config, leader: str) -> None:
        """``leader``: host:port, its ``engine.parallel.listen``. Raises ConfigError."""
        host, _, port = leader.rpartition(":")
        if not host or not port.isdigit():
            raise ConfigError(
                f"--leader must be HOST:PORT, where the node listens (engine.parallel.listen), got {leader!r}"
            )
        self._leader = leader
        self._host, self._port = host.strip("[]"), int(port)
        self._name = config.node.id or socket.gethostname()
        self._transfer = config.transfer
        self._security = process.current()
        self._last_message = ""

    async def run(self, context: ServiceContext) -> None:
        """Run until drained. All ranks have ended then."""
        serving = asyncio.create_task(self._serve(context))
        draining = asyncio.create_task(context.draining.wait())
        try:
            await asyncio.wait((serving, draining), return_when=asyncio.FIRST_COMPLETED)
            if serving.done():
                serving.result()
        finally:
            await cancel_and_wait(serving, draining)

    async def _serve(self, context: ServiceContext) -> None:
        pause_s = 0.0
        while True:
            await asyncio.sleep(pause_s)
            try:
                connection, welcome = await self._meet()
            except (OSError, HostRefused, TimeoutError) as error:
                self._log_once(f"no leader at {self._leader} yet: {error or 'it does not answer'}")
                pause_s = min(max(_FIRST_PAUSE_S, 2 * pause_s), _MAX_PAUSE_S)
                continue
            pause_s = _FIRST_PAUSE_S
            ranks = DaemonSession(connection, self._transfer)
            self._log_once(f"running ranks for node {welcome.leader} at {self._leader}")
            context.ready(leader=self._leader, node_id=welcome.leader, name=self._name)
            self._log_once(f"node {welcome.leader} ended its group here: {await ranks.run()}")

    async def _meet(self) -> tuple[RelayConnection, Welcome]:
        """Raises OSError, HostRefused, TimeoutError."""
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(HANDSHAKE_S):
            found = await loop.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)
            family, kind, protocol, _, address = found[0]
            sock = socket.socket(family, kind, protocol)
            try:
                prepare(sock)
                await loop.sock_connect(sock, address)
                if (tls := self._security.tls) is not None:
                    sock = await secure(sock, tls, server=False)
                welcome = await meet_leader(sock, self._name, rank_host_key(self._security))
            except BaseException:
                sock.close()
                raise
        return RelayConnection(sock, welcome.timeout_s), welcome

    def _log_once(self, message: str) -> None:
        """Log a message once, also over many retries."""
        if message != self._last_message:
            self._last_message = message
            log.info("%s", message)


async def _main(config: Config, context: ServiceContext) -> None:
    await RankHost(config, context.arguments.leader).run(context)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="moonpool ranks", allow_abbrev=False)
    parser.add_argument(
        "--leader",
        required=True,
        metavar="HOST:PORT",
        help="where the node listens for the machines of its ranks: its engine.parallel.listen",
    )
    return run_service(_main, argv, role="ranks", parser=parser)


if __name__ == "__main__":
    sys.exit(main())

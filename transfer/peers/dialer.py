"""Connecting to peers: which paths lead to a peer in this process, on this host or over the network."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import ipaddress
import os
import socket
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from moonpool.runtime.config.options import TransferOptions
from moonpool.runtime.network.sockets import prepare
from moonpool.runtime.security.process import Security
from moonpool.runtime.security.tls import secure
from moonpool.transfer.agent_memory import AgentMemory
from moonpool.transfer.connections.control import Control, ControlOwner
from moonpool.transfer.connections.descriptor import AgentDescriptor, boot_id
from moonpool.transfer.connections.handshake import (
    Authenticated,
    Identity,
    handshake_as_client,
    receive_descriptor,
)
from moonpool.transfer.connections.link import AGENTS, Link, LocalAgent, LocalLink
from moonpool.transfer.connections.wire import Kind, Op, WireError
from moonpool.transfer.copying.peer_memory import LIFELINE_ID, MappedMemory, PeerMemory, ProcessMemory
from moonpool.transfer.copying.pool import CopyPool
from moonpool.transfer.errors import PathFailed, PeerLost
from moonpool.transfer.memory.allocation import map_shared
from moonpool.transfer.memory.device_regions import CudaRegions
from moonpool.transfer.memory.lifeline import LIFELINE_NBYTES, living_process, name_reader
from moonpool.transfer.paths.base import Path
from moonpool.transfer.paths.cuda_ipc import CudaIpcPath, IpcMemory
from moonpool.transfer.paths.local import LocalPath
from moonpool.transfer.paths.shm import ShmPath
from moonpool.transfer.paths.tcp.stream_path import StreamPath
from moonpool.transfer.paths.ucx.rma_path import UcxPath
from moonpool.transfer.peers.batch import LoopTurn
from moonpool.transfer.peers.peer import Peer

# Time limit of connecting to one of several addresses; the others need time too.
_RAIL_S = 1.0

Address = tuple[str, int] | None
"""(host, port); None: the peer's Unix socket."""


class Dialer:
    """Makes the connections of one agent. Belongs to the event loop's thread."""

    def __init__(
        self,
        options: TransferOptions,
        security: Security,
        pool: CopyPool,
        memory: AgentMemory,
        local: LocalAgent,
        owner: ControlOwner,
    ) -> None:
        """local, memory, pool: of the agent. owner: of its control connections."""
        self._options = options
        self._security = security
        self._pool = pool
        self._memory = memory
        self._local = local
        self._owner = owner
        self._turn = LoopTurn()

    async def connect(self, target: AgentDescriptor, on_lost: Callable[[Link, str], None]) -> Peer:
        """Connect to ``target``. on_lost: called when an agent of this process is closed.

        Raises StaleEpoch, AccessDenied, or PeerLost, which lists what was tried.
        """
        names = [name for name in self._options.transports if name in target.transports]
        there = AGENTS.get((os.getpid(), target.incarnation))
        if "local" in names and there is not None:
            link = LocalLink(self._local, there, on_lost)
            return self._peer(target, link, [LocalPath(self._pool, there.regions, there.grants)])

        failures: list[str] = []
        if {"shm", "cuda-ipc"}.intersection(names) and target.unix_name and target.boot_id == boot_id():
            # Only a process of this host can be reached by a name in our network namespace.
            try:
                control = await self._connect_control(target, None)
                try:
                    return self._peer(target, control, await self._same_host_paths(target, control, names))
                except BaseException:
                    control.close()
                    raise
            except (OSError, WireError, PathFailed) as error:
                failures.append(f"shm: {error}")
        if target.tcp_port and ("tcp" in names or "ucx" in names):
            for address in target.tcp_addresses:
                last = address == target.tcp_addresses[-1]
                try:
                    async with asyncio.timeout(None if last else _RAIL_S):
                        control = await self._connect_control(target, address)
                except (OSError, WireError) as error:
                    failures.append(f"tcp: {str(error) or f'{address[0]} does not answer'}")
                else:
                    return self._peer(target, control, self._network_paths(target, control, names))
        if not failures:
            failures.append(f"none of its transports ({', '.join(target.transports)}) can be used from here")
        raise PeerLost(target.agent_id, "; ".join(failures))

    def connect_back(self, control: Control) -> Peer:
        """A peer for reading from the agent that made ``control`` to us. Raises PathFailed."""
        paths: list[Path] = []
        memory = ProcessMemory.of(control.remote)
        if "cuda-ipc" in self._options.transports and memory is not None:
            paths.append(self._cuda_ipc_path(control, memory, None))
        if self._memory.ucx is not None:
            paths.append(self._ucx_path(control, None))
        if not paths:
            raise PathFailed("fetch", "the memory of the writing process cannot be reached")
        return self._peer(control.remote.identity, control, paths, owns_link=False)

    def reader_of(self, control: Control) -> Peer:
        """See ``TransferAgent.reader_of``. Raises PathFailed."""
        memory = ProcessMemory.of(control.remote) if "shm" in self._options.transports else None
        if memory is None:
            raise PathFailed("shm", "the memory of the other process cannot be read from here")
        identity = control.remote.identity
        path = ShmPath(self._pool, identity, memory, control.known_region, None)
        control.on_region_closed(path.forget)
        return self._peer(identity, control, [path], owns_link=False)

    def _peer(
        self, target: AgentDescriptor | Identity, link: Link, paths: Sequence[Path], *, owns_link: bool = True
    ) -> Peer:
        return Peer(
            *(target.agent_id, target.epoch, link, paths, self._memory.regions),
            verify=self._options.checksum,
            turn=self._turn,
            owns_link=owns_link,
        )

    # ------------------------------------------------------------------ paths

    async def _same_host_paths(
        self, target: AgentDescriptor, control: Control, names: list[str]
    ) -> list[Path]:
        identity, pid = control.remote.identity, control.remote.pid
        memory: PeerMemory | None = ProcessMemory.of(control.remote)
        if memory is None:
            map_region = functools.partial(self._map_region, target)
            lifeline = await map_region(LIFELINE_ID, LIFELINE_NBYTES)
            memory = MappedMemory(lifeline, map_region, living_process(pid))
        paths: list[Path] = []
        for name in names:
            if name == "cuda-ipc":
                writes = self._streams("cuda-ipc", target, [None], 1, device_write_op=Op.FETCH)
                paths.append(self._cuda_ipc_path(control, memory, writes))
            elif name == "shm":
                # If it cannot read our memory after all, it says so, and the bytes are sent.
                write_op = Op.PULL if pid else Op.WRITE
                streams = self._streams("shm", target, [None], 1, write_op=write_op)
                shm = ShmPath(self._pool, identity, memory, control.known_region, streams)
                control.on_region_closed(shm.forget)
                paths.append(shm)
        return [*paths, *self._network_paths(target, control, names)]

    def _network_paths(self, target: AgentDescriptor, control: Control, names: list[str]) -> list[Path]:
        """In the order of ``transfer.transports``."""
        paths: list[Path] = []
        tcp_streams = self._options.tcp.streams
        for name in names:
            if name == "ucx" and self._memory.ucx is not None:
                writes = self._streams("tcp", target, target.tcp_addresses, tcp_streams, write_op=Op.FETCH)
                paths.append(self._ucx_path(control, writes))
            elif name == "tcp" and target.tcp_port:
                paths.append(self._streams("tcp", target, target.tcp_addresses, tcp_streams))
        return paths

    def _cuda_ipc_path(self, control: Control, memory: PeerMemory, writes: StreamPath | None) -> CudaIpcPath:
        def cuda() -> CudaRegions | None:
            return self._memory.cuda

        identity, mapped = control.remote.identity, IpcMemory(memory, cuda)
        path = CudaIpcPath(self._pool, identity, mapped, control.known_region, writes, cuda)
        control.on_region_closed(path.forget)
        return path

    def _ucx_path(self, control: Control, writes: StreamPath | None) -> UcxPath:
        assert self._memory.ucx is not None
        path = UcxPath(
            self._memory.ucx.worker, control.remote.identity, control.region, control.known_region, writes
        )
        control.on_region_closed(path.forget)
        return path

    def _streams(
        self,
        name: str,
        target: AgentDescriptor,
        addresses: Sequence[Address],
        streams: int,
        *,
        write_op: Op = Op.WRITE,
        device_write_op: Op = Op.WRITE,
    ) -> StreamPath:
        return StreamPath(
            name,
            [functools.partial(self._connect_data, target, address) for address in addresses],
            streams=streams,
            slice_nbytes=self._options.tcp.slice_nbytes,
            write_op=write_op,
            device_write_op=device_write_op,
        )

    # ------------------------------------------------------------------ connections

    async def _connect_control(self, target: AgentDescriptor, address: Address) -> Control:
        sock, remote = await self._connect(target, address, Kind.CONTROL, 0)
        # It will read what we write to it.
        name_reader(remote.pid)
        return Control(sock, remote, self._owner)

    async def _connect_data(self, target: AgentDescriptor, address: Address, number: int) -> socket.socket:
        return (await self._connect(target, address, Kind.DATA, number))[0]

    async def _map_region(
        self, target: AgentDescriptor, region_id: int, nbytes: int
    ) -> npt.NDArray[np.uint8]:
        """Map the memfd of a peer's region read-only. Raises PathFailed."""
        try:
            sock, _ = await self._connect(target, None, Kind.MEMFD, region_id)
            with sock:
                fd = await receive_descriptor(sock)
            try:
                return map_shared(fd, nbytes)
            finally:
                os.close(fd)
        except (OSError, WireError) as error:
            raise PathFailed("shm", f"cannot map region {region_id}: {error}") from error

    async def _connect(
        self, target: AgentDescriptor, address: Address, kind: Kind, argument: int
    ) -> tuple[socket.socket, Authenticated]:
        """A connected, non-blocking socket after the handshake. Raises OSError and the handshake's errors."""
        where: Any = f"\0{target.unix_name}"
        family = socket.AF_UNIX
        if address is not None:
            family, where = await _resolve(*address)
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            prepare(sock)
            await asyncio.get_running_loop().sock_connect(sock, where)
            if address is not None and (tls := self._security.tls) is not None:
                sock = await secure(sock, tls, server=False)
            remote = await handshake_as_client(
                sock, target, self._local.identity, self._security, kind, argument
            )
        except BaseException:
            sock.close()
            raise
        return sock, remote


async def _resolve(host: str, port: int) -> tuple[socket.AddressFamily, Any]:
    with contextlib.suppress(ValueError):
        # An IP address, as usual, needs no resolver and its thread.
        version = ipaddress.ip_address(host).version
        return (socket.AF_INET6 if version == 6 else socket.AF_INET), (host, port)
    resolved = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return resolved[0][0], resolved[0][4]

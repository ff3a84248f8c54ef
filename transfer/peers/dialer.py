"""Finding the ways to a peer: in this process, on this host, over the network."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import ipaddress
import logging
import os
import socket
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from moonpool.runtime.network.sockets import prepare
from moonpool.runtime.network.tls import secure
from moonpool.transfer.connections.control import Control
from moonpool.transfer.connections.descriptor import AgentDescriptor
from moonpool.transfer.connections.handshake import meet_server, receive_descriptor
from moonpool.transfer.connections.host import boot_id
from moonpool.transfer.connections.local_link import AGENTS, LocalLink
from moonpool.transfer.connections.wire import Kind, Op, WireError
from moonpool.transfer.copying.peer_memory import LIFELINE_ID, MappedMemory, PeerMemory, ProcessMemory
from moonpool.transfer.errors import PathFailed, PeerLost
from moonpool.transfer.memory.allocation import map_shared
from moonpool.transfer.memory.device_regions import CudaRegions
from moonpool.transfer.memory.lifeline import LIFELINE_NBYTES, living_process, readable_process
from moonpool.transfer.paths.base import Path
from moonpool.transfer.paths.cuda_ipc import CudaIpcPath, IpcMemory
from moonpool.transfer.paths.local import LocalPath
from moonpool.transfer.paths.shm import ShmPath
from moonpool.transfer.paths.tcp.stream_path import StreamPath
from moonpool.transfer.paths.ucx.rma_path import UcxPath
from moonpool.transfer.peers.peer import Peer

if TYPE_CHECKING:
    from moonpool.transfer.agent import TransferAgent

_log = logging.getLogger(__name__)

# How long the control connection is tried at one of several addresses.
_RAIL_S = 1.0


async def connect_peer(agent: TransferAgent, target: AgentDescriptor) -> Peer:
    """Raises StaleEpoch, AccessDenied, or PeerLost with what was tried."""
    names = [name for name in agent.options.transports if name in target.transports]
    peer = functools.partial(
        Peer, target.agent_id, target.epoch, regions=agent.regions, verify=agent.options.checksum
    )
    there = AGENTS.get((os.getpid(), target.incarnation))
    if "local" in names and there is not None:
        link = LocalLink(agent, there, lambda link: agent.peers.link_lost(link, "its agent was closed"))
        return peer(link=link, paths=[LocalPath(agent.pool, there.regions)])

    failures: list[str] = []
    if {"shm", "cuda-ipc"}.intersection(names) and target.unix_name and target.boot_id == boot_id():
        # Being reachable under a name of this network namespace is the proof that it is this host.
        try:
            control = await _connect_control(agent, target)
            try:
                return peer(link=control, paths=await _same_host_paths(agent, target, control, names))
            except BaseException:
                control.close()
                raise
        except (OSError, WireError, PathFailed) as error:
            failures.append(f"shm: {error}")
    if target.tcp_port and ("tcp" in names or "ucx" in names):
        for address in target.tcp_addresses:
            last = address == target.tcp_addresses[-1]
            try:
                # One that does not answer must leave time for the others.
                async with asyncio.timeout(None if last else _RAIL_S):
                    control = await _connect_control(agent, target, address)
            except (OSError, WireError) as error:
                failures.append(f"tcp: {str(error) or f'{address[0]} does not answer'}")
            else:
                return peer(link=control, paths=_network_paths(agent, target, control, names))
    if not failures:
        failures.append(f"of its transports ({', '.join(target.transports)}) none leads there from here")
    raise PeerLost(target.agent_id, "; ".join(failures))


async def _connect_control(
    agent: TransferAgent, target: AgentDescriptor, address: tuple[str, int] | None = None
) -> Control:
    sock = await _connect(agent, target, address)
    try:
        met = await meet_server(sock, target, agent.identity, agent.options.secret, Kind.CONTROL)
        return Control(sock, met, agent)
    except BaseException:
        sock.close()
        raise


async def _same_host_paths(
    agent: TransferAgent, target: AgentDescriptor, control: Control, names: list[str]
) -> list[Path]:
    identity, pid = control.met.identity, control.met.pid
    memory: PeerMemory
    process = readable_process(pid, identity.lifeline, identity.incarnation)
    if process is not None:
        memory = ProcessMemory(process, identity)
    else:
        map_region = functools.partial(_map_region, agent, target)
        memory = MappedMemory(await map_region(LIFELINE_ID, LIFELINE_NBYTES), map_region, living_process(pid))
    streams = functools.partial(
        StreamPath,
        connects=[functools.partial(_connect_data, agent, target, None)],
        streams=1,
        slice_nbytes=agent.options.tcp.slice_nbytes,
    )
    paths: list[Path] = []
    for name in names:
        if name == "cuda-ipc":
            writes = streams("cuda-ipc", device_write_op=Op.FETCH)
            paths.append(_cuda_ipc_path(agent, control, memory, writes))
        elif name == "shm":
            # Who may read the peer's memory is most likely readable by it, too; it says so if not.
            reads_us = Op.PULL if process is not None else Op.WRITE
            shm = ShmPath(
                agent.pool, identity, memory, control.known_region, streams("shm", write_op=reads_us)
            )
            control.on_region_closed(shm.forget)
            paths.append(shm)
    return [*paths, *_network_paths(agent, target, control, names)]


def _cuda_ipc_path(
    agent: TransferAgent, control: Control, memory: PeerMemory, writes: StreamPath | None
) -> CudaIpcPath:
    def cuda() -> CudaRegions | None:
        return agent.memory.cuda

    identity, mapped = control.met.identity, IpcMemory(memory, cuda)
    path = CudaIpcPath(agent.pool, identity, mapped, control.known_region, writes, cuda)
    control.on_region_closed(path.forget)
    return path


async def _map_region(
    agent: TransferAgent, target: AgentDescriptor, region_id: int, nbytes: int
) -> npt.NDArray[np.uint8]:
    """The memfd of a region of the peer, mapped read-only. Raises PathFailed."""
    try:
        sock = await _connect(agent, target, None)
        with sock:
            await meet_server(sock, target, agent.identity, agent.options.secret, Kind.SHARE, region_id)
            fd = await receive_descriptor(sock)
        try:
            return map_shared(fd, nbytes)
        finally:
            os.close(fd)
    except (OSError, WireError) as error:
        raise PathFailed("shm", f"cannot map region {region_id}: {error}") from error


def _network_paths(
    agent: TransferAgent, target: AgentDescriptor, control: Control, names: list[str]
) -> list[Path]:
    """In the order of ``transfer.transports``: whoever names ucx first wants it first."""
    paths: list[Path] = []
    for name in names:
        if name == "ucx" and agent.memory.ucx is not None:
            streams = _tcp_path(agent, target, Op.FETCH)
            peer = (target.agent_id, target.incarnation)
            ucx = UcxPath(agent.memory.ucx.worker, peer, control.region, control.known_region, streams)
            control.on_region_closed(ucx.forget)
            paths.append(ucx)
        elif name == "tcp" and target.tcp_port:
            paths.append(_tcp_path(agent, target))
    return paths


def writer_of(agent: TransferAgent, control: Control) -> Peer:
    """The other side of a connection it made to us, to read from what it writes. Raises PathFailed."""
    identity = control.met.identity
    paths: list[Path] = []
    process = readable_process(control.met.pid, identity.lifeline, identity.incarnation)
    if "cuda-ipc" in agent.options.transports and process is not None:
        paths.append(_cuda_ipc_path(agent, control, ProcessMemory(process, identity), None))
    if agent.memory.ucx is not None:
        peer = (identity.agent_id, identity.incarnation)
        ucx = UcxPath(agent.memory.ucx.worker, peer, control.region, control.known_region, None)
        control.on_region_closed(ucx.forget)
        paths.append(ucx)
    if not paths:
        raise PathFailed("fetch", "the memory of the writing process cannot be reached")
    return Peer(
        identity.agent_id,
        identity.epoch,
        link=control,
        paths=paths,
        regions=agent.regions,
        verify=False,
        owns_link=False,
    )


def _tcp_path(agent: TransferAgent, target: AgentDescriptor, write_op: Op = Op.WRITE) -> StreamPath:
    tcp = agent.options.tcp
    connects = [functools.partial(_connect_data, agent, target, address) for address in target.tcp_addresses]
    return StreamPath("tcp", connects, streams=tcp.streams, slice_nbytes=tcp.slice_nbytes, write_op=write_op)


async def _connect_data(
    agent: TransferAgent, target: AgentDescriptor, address: tuple[str, int] | None, number: int
) -> socket.socket:
    sock = await _connect(agent, target, address)
    try:
        await meet_server(sock, target, agent.identity, agent.options.secret, Kind.DATA, number)
    except BaseException:
        sock.close()
        raise
    return sock


async def _connect(
    agent: TransferAgent, target: AgentDescriptor, address: tuple[str, int] | None
) -> socket.socket:
    """A connected, non-blocking socket: over TCP to ``address``, else on this host. Raises OSError."""
    loop = asyncio.get_running_loop()
    where: Any
    if address is None:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        where = f"\0{target.unix_name}"
    else:
        family, where = await _resolve(*address)
        sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        prepare(sock)
        await loop.sock_connect(sock, where)
    except BaseException:
        sock.close()
        raise
    if agent.tls is not None and address is not None:
        return await secure(sock, agent.tls.client, server=False)
    return sock


async def _resolve(host: str, port: int) -> tuple[int, Any]:
    with contextlib.suppress(ValueError):
        # Numbers, as usual: no need for a resolver and its thread.
        version = ipaddress.ip_address(host).version
        return (socket.AF_INET6 if version == 6 else socket.AF_INET), (host, port)
    resolved = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return resolved[0][0], resolved[0][4]

"""Memory of a peer on this host: mapped on first use, unmapped when closed, never read past its end."""

from __future__ import annotations

import asyncio
import fcntl
import mmap
import os
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moonpool.runtime.config.options import TransferOptions
from moonpool.runtime.security import process
from moonpool.transfer import JointRead, Region, Span, TransferAgent, checksum
from moonpool.transfer.connections.byte_stream import byte_stream
from moonpool.transfer.connections.control import Control
from moonpool.transfer.connections.handshake import handshake_as_client, receive_descriptor
from moonpool.transfer.connections.wire import (
    REPLY_NBYTES,
    Kind,
    Op,
    Reply,
    Request,
    Status,
    pack_sources,
    pack_spans,
)
from moonpool.transfer.copying import peer_memory
from moonpool.transfer.copying.peer_memory import MappedMemory
from moonpool.transfer.errors import RegionError
from moonpool.transfer.memory import lifeline
from moonpool.transfer.memory.allocation import map_shared
from moonpool.transfer.memory.span import Spans
from moonpool.transfer.native import libc
from moonpool.transfer.native.compiled_copy import compiled_copy
from moonpool.transfer.paths.tcp import stream_server
from moonpool.transfer.paths.tcp.stream_server import ServerConnection
from tests.transfer.conftest import StartPeer
from tests.transfer.peer_process import pattern

NBYTES = 3 << 20

pytestmark = pytest.mark.skipif(compiled_copy() is None, reason="there is no compiler")


async def start(agent_id: str) -> TransferAgent:
    return await TransferAgent.start(TransferOptions(transports=("shm",)), agent_id=agent_id, epoch=1)


def mapped(pid: int, name: str) -> int:
    """How many memfds of agents' regions of that name a process has mapped."""
    return Path(f"/proc/{pid}/maps").read_text().count(f"memfd:moonpool-{name}")


async def until_released(pid: int, name: str) -> None:
    async with asyncio.timeout(60):
        while mapped(pid, name):  # noqa: ASYNC110 (the other process cannot set an event)
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("direction", ["read", "write"])
async def test_whoever_copies_maps_the_other_side(start_peer: StartPeer, direction: str) -> None:
    theirs = start_peer("shm")
    async with await start("here") as agent:
        region = agent.allocate(NBYTES, "ours")
        remote = (await theirs.do("allocate", nbytes=NBYTES, seed=1))["region"]
        peer = await agent.connect(theirs.descriptor)
        here, there = [Span(region.id, 0, NBYTES)], [Span(remote, 0, NBYTES)]
        await getattr(peer, direction)(here, there, deadline_s=30)
        if direction == "read":
            assert mapped(os.getpid(), "peer") == 1
            await theirs.do("close_regions")
            await until_released(os.getpid(), "peer")
        else:
            assert mapped(theirs.process.pid, "ours") == 1
            region.close()
            await until_released(theirs.process.pid, "ours")


@pytest.fixture
async def writer() -> AsyncIterator[tuple[TransferAgent, TransferAgent, Region]]:
    """(server, client, a region of the client)."""
    async with await start("server") as server, await start("client") as client:
        yield server, client, client.allocate(NBYTES, "source")


@pytest.mark.parametrize("op", [Op.PULL, Op.PULL_CHECKED])
@pytest.mark.parametrize(
    ("source", "status"),
    [
        ((0, 8), Status.OK),
        ((NBYTES - 8, 8), Status.OK),
        ((NBYTES - 7, 8), Status.BAD_SPAN),
        (((1 << 64) - 4, 8), Status.BAD_SPAN),
    ],
)
async def test_a_writer_cannot_make_us_read_past_its_memory(
    writer: tuple[TransferAgent, TransferAgent, Region], op: Op, source: tuple[int, int], status: Status
) -> None:
    server, _, region = writer
    target = server.allocate(4096, "target")
    server.allow_writes(target)
    offset, nbytes = source
    assert await ask(writer, op, Span(target.id, 0, nbytes), Span(region.id, offset, nbytes)) is status


async def test_what_a_writer_has_closed_is_not_read(
    writer: tuple[TransferAgent, TransferAgent, Region],
) -> None:
    server, _, region = writer
    target = server.allocate(4096, "target")
    server.allow_writes(target)
    to, source = Span(target.id, 0, 8), Span(region.id, 0, 8)
    assert await ask(writer, Op.PULL, to, source) is Status.OK
    region.close()
    assert await ask(writer, Op.PULL, to, source) is Status.FAILED


async def ask(writer: tuple[TransferAgent, TransferAgent, Region], op: Op, to: Span, source: Span) -> Status:
    """The answer to a request of ``op``, sent as the client."""
    server, client, _ = writer
    descriptor, loop = server.describe(), asyncio.get_running_loop()
    with socket.socket(socket.AF_UNIX) as sock:
        sock.setblocking(False)
        await loop.sock_connect(sock, f"\0{descriptor.unix_name}")
        await handshake_as_client(sock, descriptor, client.identity, process.current(), Kind.DATA)
        request = Request(op, 1, 1000, to.nbytes).pack()
        await loop.sock_sendall(sock, request + pack_spans(Spans.of([to])) + pack_sources(Spans.of([source])))
        reply = b""
        while len(reply) < REPLY_NBYTES:
            part = await loop.sock_recv(sock, REPLY_NBYTES - len(reply))
            assert part, "it hung up"
            reply += part
        return Reply.unpack(reply).status


@pytest.mark.parametrize("during", ["the look", "the ledger's entry"])
async def test_what_a_writer_closes_while_it_is_mapped_does_not_stay_mapped(
    writer: tuple[TransferAgent, TransferAgent, Region], monkeypatch: pytest.MonkeyPatch, during: str
) -> None:
    server, client, region = writer
    target, link = server.allocate(4096, "target"), (await server.connect(client.describe())).link
    assert isinstance(link, Control)
    ours, theirs = socket.socketpair()
    module, name = (peer_memory, "map_shared") if during == "the look" else (stream_server, "MappedRegion")
    make = getattr(module, name)
    with theirs:
        served = ServerConnection(byte_stream(ours, 1 << 20), link.remote, server._server)

        def make_and_close(*args: object) -> object:
            made = make(*args)
            region.close()
            served.forget(region.id)
            return made

        hold = server.regions.hold([target.id], lambda error: None)
        with monkeypatch.context() as patch:
            patch.setattr(module, name, make_and_close)
            served._locate(Spans.of([Span(region.id, 0, 8)]), hold)
        hold.release()
        assert region.id not in served._mapped
        assert served._memory is not None
        assert served._memory.mapping(region.id) is None
        served._memory.close()
        served.stream.close()


async def test_what_a_peer_closes_while_it_sends_the_descriptor_does_not_stay_mapped(
    writer: tuple[TransferAgent, TransferAgent, Region],
) -> None:
    _, client, region = writer

    async def map_and_close(region_id: int, nbytes: int) -> Any:
        fd = await memfd_of(client, region)
        array = map_shared(fd, nbytes)
        os.close(fd)
        region.close()
        memory.forget(region_id)
        return array

    memory = MappedMemory(client.memory.lifeline._memory.array, map_and_close, None)
    with pytest.raises(RegionError, match="closed"):
        await memory.reach(client.region_info(region.id))
    assert memory.mapping(region.id) is None


@pytest.mark.parametrize("joint", [False, True])
async def test_a_region_out_of_reach_leaves_the_reads_of_others_verified(
    monkeypatch: pytest.MonkeyPatch, joint: bool
) -> None:
    """Where processes may not read each other, plain memory passes through sockets and pools are mapped."""
    monkeypatch.setattr(peer_memory.ProcessMemory, "of", classmethod(lambda *_: None))
    async with await start("here") as here, await start("there") as there:
        plain, count, nbytes = there.register(np.zeros(4096, np.uint8)), 8, 512 << 10
        pool, ours = there.allocate(count * nbytes, "pool"), here.allocate(count * nbytes, "ours")
        pool.array[:] = pattern(count * nbytes, 1)
        sums = [checksum(block) for block in pool.array.reshape(count, nbytes)]
        offsets = [at * nbytes for at in range(count)]
        local, remote = ([Span(region.id, at, nbytes) for at in offsets] for region in (ours, pool))
        peer = await here.connect(there.describe())
        await peer.read([Span(ours.id, 0, 4096)], [Span(plain.id, 0, 4096)], deadline_s=30)
        if joint:
            read = JointRead(ours, offsets, nbytes, sums, 1)
            await peer.read(local, remote, deadline_s=30, joint=read)
            assert read.verified
        else:
            await peer.read(local, remote, deadline_s=30, checksums=sums)
        assert np.array_equal(ours.array, pool.array)


async def memfd_of(agent: TransferAgent, region: Region) -> int:
    """The descriptor that an authenticated peer receives."""
    descriptor = agent.describe()
    sock = socket.socket(socket.AF_UNIX)
    sock.setblocking(False)
    await asyncio.get_running_loop().sock_connect(sock, f"\0{descriptor.unix_name}")
    with sock:
        await handshake_as_client(sock, descriptor, agent.identity, process.current(), Kind.MEMFD, region.id)
        return await receive_descriptor(sock)


def attempts(fd: int, nbytes: int) -> Iterator[Callable[[], object]]:
    """Ways to change the bytes behind a descriptor."""
    yield lambda: mmap.mmap(fd, nbytes, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    yield lambda: os.pwrite(fd, b"x", 0)
    yield lambda: os.ftruncate(fd, 0)
    yield lambda: os.posix_fallocate(fd, nbytes, 4096)


@pytest.mark.parametrize("shared", [False, True], ids=["allocated", "shared"])
async def test_a_peer_with_the_descriptor_of_a_pool_cannot_write_it(shared: bool) -> None:
    async with await start("here") as agent:
        region = pool = agent.allocate(NBYTES, "pool")
        if shared:
            theirs = os.memfd_create("ranks", os.MFD_ALLOW_SEALING)
            os.truncate(theirs, NBYTES)
            fcntl.fcntl(theirs, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
            region = agent.register_shared(theirs, "pool")
            os.close(theirs)
        fd = await memfd_of(agent, region)
        ways = list(attempts(fd, NBYTES))
        if not shared:
            again = os.open(f"/proc/self/fd/{fd}", os.O_RDWR)
            ways += attempts(again, NBYTES)
        for way in ways:
            with pytest.raises(OSError):
                way()
        assert mmap.mmap(fd, NBYTES, prot=mmap.PROT_READ)[:4] == bytes(4)
        assert not pool.array.any()
        os.close(fd)


async def test_only_a_peer_that_proved_itself_is_named_to_yama(
    start_peer: StartPeer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Yama is not here. Where it is, a process names at most one reader, and never all."""
    named: list[int] = []

    def prctl(option: int, argument: int, *_: int) -> int:
        if option == libc.PR_SET_PTRACER:
            named.append(argument)
            return 0
        return 1  # dumpable

    monkeypatch.setattr(libc, "_prctl", prctl)
    monkeypatch.setattr(lifeline, "_reader", None)
    async with await start("here") as agent:
        assert named == []
        first, second = start_peer("shm"), start_peer("shm")
        for theirs in (first, second):
            await agent.connect(theirs.descriptor)
        assert named == [first.process.pid]
        first.process.kill()
        first.process.wait()
        async with await start("other") as other:
            await other.connect(second.descriptor)
        assert named == [first.process.pid, second.process.pid]


async def test_under_yama_pools_are_memfds_and_nobody_is_asked_to_trace(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lifeline, "yama_scope", lambda: 1)
    async with await start("here") as agent:
        assert agent.allocate(NBYTES, "pool").backing == "memfd"
    assert not lifeline.readable_by_peers()

"""What every transport must do alike: one suite, run over each of them against a real peer."""

from __future__ import annotations

import asyncio
import random
import socket
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from moonpool.runtime.config.options import TcpOptions, TransferOptions
from moonpool.runtime.security import process
from moonpool.transfer import (
    Batch,
    ChecksumMismatch,
    Peer,
    RegionError,
    Span,
    SpanError,
    Spans,
    TransferAgent,
    TransferReport,
    agent_memory,
    checksum,
)
from moonpool.transfer.connections import byte_stream
from moonpool.transfer.connections import wire as wire_format
from moonpool.transfer.copying import peer_memory
from moonpool.transfer.native.compiled_copy import compiled_copy
from moonpool.transfer.native.ucx import load_ucx
from moonpool.transfer.paths.tcp import stream, stream_path, stream_server
from moonpool.transfer.paths.tcp.stream_path import StreamPath
from tests.transfer.conftest import StartPeer
from tests.transfer.device import DeviceRegion, use_gpu, use_stand_in
from tests.transfer.faults import settled
from tests.transfer.peer_process import PeerProcess, forbid_process_vm_readv, pattern, use_security

# shm-mapped and shm-stream are what is left of shm where process_vm_readv is forbidden: for memory that is a
# memfd, and for memory that is not. ucx picks its own transport, shared memory here; ucx-tcp is made to use
# TCP.
TRANSPORTS = ("local", "shm", "shm-plain", "shm-mapped", "shm-stream", "tcp", "tcp-tls", "ucx", "ucx-tcp")
# Memory of a device on both sides, or only ours, or only theirs; of the stand-in (cuda), or a real one (gpu).
DEVICES = ("local+{}", "cuda-ipc+{}", "tcp+{}", "shm+{}-ours", "shm+{}-theirs")
WIRES = [
    *TRANSPORTS,
    *(name.format("cuda") for name in DEVICES),
    *(pytest.param(name.format("gpu"), marks=pytest.mark.gpu) for name in DEVICES),
]
NBYTES = 8 << 20
SEED = 7
DEADLINE_S = 20.0


@dataclass
class Wire:
    """An agent here, a peer with one region of ``pattern(NBYTES, SEED)``, and memory of ours."""

    agent: TransferAgent
    peer: Peer
    remote: int
    memory: Any  # Region or DeviceRegion
    theirs: Any  # RemotePeer or LocalPeer
    on_device: bool
    theirs_on_device: bool

    def allocate(self, nbytes: int, name: str) -> Any:
        """Memory of ours like ``memory``."""
        return DeviceRegion(self.agent, nbytes) if self.on_device else self.agent.allocate(nbytes, name)

    async def allocate_theirs(self, nbytes: int, seed: int, writable: bool = True) -> int:
        command = "allocate_on_device" if self.theirs_on_device else "allocate" if writable else "register"
        answer = await self.theirs.do(command, nbytes=nbytes, seed=seed, writable=writable)
        return int(answer["region"])

    async def remote_bytes(self) -> bytes:
        """The peer's whole region, read the way that is under test."""
        with self.allocate(NBYTES, "copy") as copy:
            await self.read_all(copy)
            return copy.array.tobytes()  # type: ignore[no-any-return]

    def read_all(self, region: Any) -> Batch:
        return self.peer.read(
            [Span(region.id, 0, NBYTES)], [Span(self.remote, 0, NBYTES)], deadline_s=DEADLINE_S
        )


class LocalPeer:
    """What ``RemotePeer`` is, in this process."""

    def __init__(self, agent: TransferAgent) -> None:
        self._peer = PeerProcess(agent)
        self.descriptor = agent.describe()

    async def do(self, command: str, **arguments: Any) -> dict[str, Any]:
        return await getattr(self._peer, command)(**arguments)  # type: ignore[no-any-return]


@pytest.fixture(params=WIRES)
async def wire(
    request: pytest.FixtureRequest,
    shared_peer: StartPeer,
    monkeypatch: pytest.MonkeyPatch,
    fresh_compiled_copy: None,
) -> AsyncIterator[Wire]:
    path, _, where = request.param.partition("+")
    runtime, _, side = where.partition("-")
    transport, variant = (path, "") if path == "cuda-ipc" else path.partition("-")[::2]
    for module, name in (
        (peer_memory, "readable_process"), (agent_memory, "readable_by_peers")
    ):  # fmt: skip
        monkeypatch.setattr(module, name, getattr(module, name))
    environment = {
        "tcp": {"UCX_TLS": "tcp,self"},
        "plain": {"MOONPOOL_TRANSFER": "plain"},
    }.get(variant, {})
    if variant == "tls":
        # Only here: its certificates need a package that a GPU machine has not got.
        environment = {"TLS_DIR": str(request.getfixturevalue("tls_directory"))}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    compiled_copy.cache_clear()
    if runtime:
        environment |= use_stand_in(monkeypatch) if runtime == "cuda" else use_gpu()
    if transport == "ucx" and load_ucx() is None:
        pytest.skip("there is no libucp: pip install moonpool[ucx]")
    if variant in ("mapped", "stream"):
        forbid_process_vm_readv()
    monkeypatch.setattr(process, "_current", process._current)
    use_security("")
    options = TransferOptions(transports=(transport,))
    async with await TransferAgent.start(options, agent_id="here", epoch=1) as agent:
        if transport == "local":
            other = await TransferAgent.start(options, agent_id="peer", epoch=1)
            theirs: Any = LocalPeer(other)
        else:
            other = None
            theirs = shared_peer(transport, forbid=variant in ("mapped", "stream"), **environment)
        peer = await agent.connect(theirs.descriptor)
        wire = Wire(
            agent, peer, 0, None, theirs, runtime != "" and side != "theirs", runtime != "" and side != "ours"
        )
        wire.memory = wire.allocate(NBYTES, "memory")
        if variant == "stream":
            wire.remote = (await theirs.do("register", nbytes=NBYTES, seed=SEED))["region"]
        else:
            wire.remote = await wire.allocate_theirs(NBYTES, SEED)
        yield wire
        await theirs.do("close_regions")
        await theirs.do("check")
        agent.regions.check_integrity()
        if other is not None:
            await other.close()


def scattered(count: int, seed: int) -> tuple[list[tuple[int, int, int]], int]:
    """(offset here, offset there, nbytes) of disjoint spans of mixed sizes, in random order."""
    rng = random.Random(seed)
    here = there = 0
    spans = []
    for _ in range(count):
        nbytes = rng.choice((1, 3, 100, 4096, 5000, 65536))
        gap_here, gap_there = rng.choice((0, 0, 1, 64)), rng.choice((0, 0, 1, 64))
        spans.append((here + gap_here, there + gap_there, nbytes))
        here, there = here + gap_here + nbytes, there + gap_there + nbytes
    assert max(here, there) <= NBYTES
    rng.shuffle(spans)
    return spans, here


async def test_a_read_brings_exactly_the_bytes_named(wire: Wire) -> None:
    source, expected = pattern(NBYTES, SEED), np.zeros(NBYTES, np.uint8)
    spans, _ = scattered(300, seed=1)
    local = [Span(wire.memory.id, here, nbytes) for here, _, nbytes in spans]
    remote = [Span(wire.remote, there, nbytes) for _, there, nbytes in spans]
    for here, there, nbytes in spans:
        expected[here : here + nbytes] = source[there : there + nbytes]
    report = await wire.peer.read(local, remote, deadline_s=DEADLINE_S)
    assert report.nbytes == sum(nbytes for _, _, nbytes in spans)
    assert report.transport == wire.peer.paths.ranked()[0].name
    assert np.array_equal(wire.memory.array, expected)


async def test_a_write_changes_exactly_the_bytes_named(wire: Wire) -> None:
    wire.memory.array[:] = pattern(NBYTES, 2)
    expected = pattern(NBYTES, SEED)
    spans, _ = scattered(300, seed=3)
    for here, there, nbytes in spans:
        expected[there : there + nbytes] = wire.memory.array[here : here + nbytes]
    await wire.peer.write(
        [Span(wire.memory.id, here, nbytes) for here, _, nbytes in spans],
        [Span(wire.remote, there, nbytes) for _, there, nbytes in spans],
        deadline_s=DEADLINE_S,
    )
    assert await wire.remote_bytes() == expected.tobytes()


async def test_thousands_of_small_spans_and_one_large(wire: Wire) -> None:
    source = pattern(NBYTES, SEED)
    order = np.random.default_rng(4).permutation(8192)
    local = Spans.blocks(wire.memory.id, np.arange(8192) * 256, 256)
    remote = Spans.blocks(wire.remote, order * 256, 256)
    await wire.peer.read(local, remote, deadline_s=DEADLINE_S)
    expected = source[: 8192 * 256].reshape(8192, 256)[order].reshape(-1)
    assert np.array_equal(wire.memory.array[: 8192 * 256], expected)
    whole = [Span(wire.memory.id, 0, NBYTES)], [Span(wire.remote, 0, NBYTES)]
    await wire.peer.read(*whole, deadline_s=DEADLINE_S)
    assert np.array_equal(wire.memory.array, source)


async def test_batches_at_the_same_time_do_not_mix(wire: Wire) -> None:
    source = pattern(NBYTES, SEED)
    nbytes = NBYTES // 8
    batches = [
        wire.peer.read(
            [Span(wire.memory.id, i * nbytes, nbytes)],
            [Span(wire.remote, (7 - i) * nbytes, nbytes)],
            deadline_s=DEADLINE_S,
        )
        for i in range(8)
    ]
    await asyncio.gather(*batches)
    assert np.array_equal(wire.memory.array, source.reshape(8, nbytes)[::-1].reshape(-1))


@pytest.mark.parametrize("first", ["read", "write"])
async def test_a_large_read_and_a_large_write_share_a_connection(
    monkeypatch: pytest.MonkeyPatch, first: str
) -> None:
    """Neither fits the buffers of the sockets, and the second is queued before the first is answered."""
    queued = threading.Event()
    queued.set()
    real_stream, next_task = byte_stream.byte_stream, StreamPath.next_task

    def small(sock: socket.socket, slice_nbytes: int) -> byte_stream.ByteStream:
        for buffer in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            sock.setsockopt(socket.SOL_SOCKET, buffer, 64 << 10)
        return real_stream(sock, slice_nbytes)

    def next_queued(path: StreamPath, block: bool) -> stream.Task | None:
        if not block:
            queued.wait(DEADLINE_S)
        return next_task(path, block)

    monkeypatch.setattr(stream_path, "byte_stream", small)
    monkeypatch.setattr(stream_server, "byte_stream", small)
    monkeypatch.setattr(StreamPath, "next_task", next_queued)
    options = TransferOptions(transports=("tcp",), checksum=False, tcp=TcpOptions(streams=1))
    async with (
        await TransferAgent.start(options, agent_id="here", epoch=1) as agent,
        await TransferAgent.start(options, agent_id="peer", epoch=1) as theirs,
    ):
        nbytes = 32 << 20
        here, there = agent.allocate(2 * nbytes, "ours"), theirs.allocate(2 * nbytes, "theirs")
        theirs.allow_writes(there)
        there.array[:nbytes], here.array[nbytes:] = pattern(nbytes, 1), pattern(nbytes, 2)
        peer = await agent.connect(theirs.describe())
        await peer.read([Span(here.id, 0, 1 << 20)], [Span(there.id, 0, 1 << 20)], deadline_s=DEADLINE_S)
        (path,) = peer.paths
        assert isinstance(path, StreamPath)
        queued.clear()
        num_put = path._num_put
        offsets = {"read": 0, "write": nbytes}
        batches = [
            getattr(peer, direction)(
                *([Span(each.id, offsets[direction], nbytes)] for each in (here, there)),
                deadline_s=DEADLINE_S,
            )
            for direction in sorted(offsets, key=lambda direction: direction != first)
        ]
        while path._num_put < num_put + 2:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        queued.set()
        await asyncio.gather(*batches)
        assert np.array_equal(here.array, there.array)


async def test_right_checksums_pass_and_wrong_ones_are_named(wire: Wire) -> None:
    source = pattern(NBYTES, SEED)
    local = [Span(wire.memory.id, i * 70_000, 70_000) for i in range(20)]
    remote = [Span(wire.remote, i * 70_000, 70_000) for i in range(20)]
    sums = [checksum(source[i * 70_000 : (i + 1) * 70_000]) for i in range(20)]
    await wire.peer.read(local, remote, deadline_s=DEADLINE_S, checksums=sums)
    await wire.peer.write(local, remote, deadline_s=DEADLINE_S, checksums=sums)
    sums[13] ^= 1
    for direction in (wire.peer.read, wire.peer.write):
        with pytest.raises(ChecksumMismatch) as caught:
            await direction(local, remote, deadline_s=DEADLINE_S, checksums=sums)
        assert caught.value.index == 13
        assert caught.value.expected == sums[13]


async def test_a_span_longer_than_any_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its checksum is asked for in one piece all the same."""
    monkeypatch.setattr(wire_format, "MAX_REQUEST_NBYTES", 1 << 20)
    monkeypatch.setattr(stream_path, "_MAX_CHUNK_NBYTES", 1 << 20)
    options = TransferOptions(transports=("tcp",))
    async with (
        await TransferAgent.start(options, agent_id="here", epoch=1) as agent,
        await TransferAgent.start(options, agent_id="peer", epoch=1) as theirs,
    ):
        ours, remote = agent.allocate(NBYTES, "ours"), theirs.allocate(NBYTES, "theirs")
        theirs.allow_writes(remote)
        ours.array[:] = pattern(NBYTES, 3)
        peer = await agent.connect(theirs.describe())
        spans = [Span(ours.id, 0, NBYTES)], [Span(remote.id, 0, NBYTES)]
        sums = [checksum(ours.buffer)]
        await peer.write(*spans, deadline_s=DEADLINE_S, checksums=sums)
        assert np.array_equal(ours.array, remote.array)
        with pytest.raises(ChecksumMismatch):
            await peer.write(*spans, deadline_s=DEADLINE_S, checksums=[sums[0] ^ 1])


async def test_checksums_can_be_turned_off() -> None:
    options = TransferOptions(transports=("tcp",), checksum=False)
    async with (
        await TransferAgent.start(options, agent_id="here", epoch=1) as agent,
        await TransferAgent.start(options, agent_id="peer", epoch=1) as theirs,
    ):
        ours, remote = agent.allocate(4096, "ours"), theirs.allocate(4096, "theirs")
        theirs.allow_writes(remote)
        peer = await agent.connect(theirs.describe())
        spans = [Span(ours.id, 0, 4096)], [Span(remote.id, 0, 4096)]
        remote.array[:] = pattern(4096, 1)
        await peer.read(*spans, deadline_s=DEADLINE_S, checksums=[1])
        assert np.array_equal(ours.array, pattern(4096, 1))
        ours.array[:] = pattern(4096, 2)
        await peer.write(*spans, deadline_s=DEADLINE_S, checksums=[1])
        assert np.array_equal(remote.array, pattern(4096, 2))


async def test_bytes_that_change_under_way_are_found(wire: Wire) -> None:
    source = pattern(NBYTES, SEED)
    sums = [checksum(source[i << 16 : (i + 1) << 16]) for i in range(16)]
    at = (5 << 16) + 77
    await wire.theirs.do("poke", region=wire.remote, offset=at, value=int(source[at]) ^ 255)
    with pytest.raises(ChecksumMismatch) as caught:
        await wire.peer.read(
            [Span(wire.memory.id, i << 16, 1 << 16) for i in range(16)],
            [Span(wire.remote, i << 16, 1 << 16) for i in range(16)],
            deadline_s=DEADLINE_S,
            checksums=sums,
        )
    assert caught.value.index == 5


async def test_bad_spans_raise_with_their_index_and_move_nothing(wire: Wire) -> None:
    wire.memory.array[:] = 1
    good = Span(wire.memory.id, 0, 8)
    closed = wire.allocate(8, "closed")
    closed.close()
    read_only = wire.agent.register(bytes(64), writable=False)
    cases: list[tuple[Span, Span, str]] = [
        (Span(wire.memory.id, NBYTES - 4, 8), Span(wire.remote, 0, 8), "outside"),
        (Span(wire.memory.id, (1 << 64) - 4, 8), Span(wire.remote, 0, 8), "outside"),
        (Span(wire.memory.id, 8, (1 << 64) - 4), Span(wire.remote, 0, (1 << 64) - 4), "outside"),
        (Span(wire.memory.id, 8, 0), Span(wire.remote, 0, 0), "zero bytes"),
        (Span(wire.memory.id, -8, 8), Span(wire.remote, 0, 8), "offset"),
        (Span(wire.memory.id, 8, 8.0), Span(wire.remote, 0, 8.0), "nbytes"),  # type: ignore[arg-type]
        (Span(wire.memory.id, 8, 8), Span(wire.remote, 0, 9), "9 remote"),
        (Span(wire.memory.id, 4, 8), Span(wire.remote, 8, 8), "overlaps span 0"),
        (Span(closed.id, 0, 8), Span(wire.remote, 8, 8), "not open"),
        (Span(999, 0, 8), Span(wire.remote, 8, 8), "not open"),
        (Span(read_only.id, 0, 8), Span(wire.remote, 8, 8), "read-only"),
        (Span(wire.memory.id, 8, 8), Span(wire.remote, NBYTES - 7, 8), "outside"),
        (Span(wire.memory.id, 8, 8), Span(wire.remote, (1 << 64) - 8, 8), "outside"),
    ]
    for local, remote, message in cases:
        with pytest.raises(SpanError, match=message) as caught:
            await wire.peer.read([good, local], [Span(wire.remote, 16, 8), remote], deadline_s=DEADLINE_S)
        assert caught.value.index == 1
    with pytest.raises(SpanError):
        await wire.peer.read([], [], deadline_s=DEADLINE_S)
    with pytest.raises(SpanError):
        await wire.peer.read([good, good], [Span(wire.remote, 0, 8)], deadline_s=DEADLINE_S)
    with pytest.raises(ValueError, match="deadline_s"):
        await wire.peer.read([good], [Span(wire.remote, 0, 8)], deadline_s=0)
    with pytest.raises(RegionError, match=r"999: is not open at peer peer \(span 1\)"):
        await wire.peer.read(
            [good, Span(wire.memory.id, 8, 8)],
            [Span(wire.remote, 0, 8), Span(999, 0, 8)],
            deadline_s=DEADLINE_S,
        )
    assert (wire.memory.array == 1).all()


async def test_a_bad_write_raises_before_anything_is_posted(wire: Wire) -> None:
    """Here and now, not from the batch: there is none."""
    here, there = [Span(wire.memory.id, 0, 8)] * 3, [Span(wire.remote, at, 8) for at in (0, 16, 9)]
    with pytest.raises(SpanError, match="span 2: overlaps span 1 of the same destination"):
        wire.peer.write(here, there, deadline_s=DEADLINE_S)
    with pytest.raises(SpanError, match="span 1: bytes"):
        wire.peer.write([here[0], Span(wire.memory.id, NBYTES, 8)], there[:2], deadline_s=DEADLINE_S)
    with pytest.raises(SpanError, match="span 1: region must be an integer"):
        wire.peer.write([here[0], wire.memory.array], there[:2], deadline_s=DEADLINE_S)  # type: ignore[list-item]
    with pytest.raises(SpanError, match="integers, not float64"):
        floats = Spans(np.array([1], np.uint32), np.array([0.5]), np.array([8], np.uint64))  # type: ignore[arg-type]
        wire.peer.write(floats, there[:1], deadline_s=DEADLINE_S)
    for bad in (1.5, -1, 1 << 64, "sum"):
        with pytest.raises(SpanError, match="span 1: a checksum"):
            wire.peer.write(here[:2], there[:2], deadline_s=DEADLINE_S, checksums=[0, bad])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="at most"):
        wire.peer.write(here[:1], there[:1], deadline_s=DEADLINE_S, notify=bytes(1 << 17))
    with pytest.raises(TypeError, match="a note is bytes, not str"):
        wire.peer.write(here[:1], there[:1], deadline_s=DEADLINE_S, notify="text")  # type: ignore[arg-type]
    found = await wire.theirs.do("checksum", region=wire.remote, offset=0, nbytes=NBYTES)
    assert found["checksum"] == checksum(pattern(NBYTES, SEED))


async def test_what_is_read_only_there_cannot_be_written(wire: Wire) -> None:
    region = await wire.allocate_theirs(4096, seed=1, writable=False)
    ours = [Span(wire.memory.id, 0, 4096)]
    with pytest.raises(SpanError, match="read-only"):
        await wire.peer.write(ours, [Span(region, 0, 4096)], deadline_s=DEADLINE_S)
    await wire.peer.read(ours, [Span(region, 0, 4096)], deadline_s=DEADLINE_S)
    assert np.array_equal(wire.memory.array[:4096], pattern(4096, 1))


async def test_a_closed_region_is_an_error_and_the_next_one_is_not_taken_for_it(wire: Wire) -> None:
    region = await wire.allocate_theirs(4096, seed=1)
    ours, spans = [Span(wire.memory.id, 0, 4096)], [Span(region, 0, 4096)]
    await wire.peer.read(ours, spans, deadline_s=DEADLINE_S)
    await wire.theirs.do("close_region", region=region)
    again = await wire.allocate_theirs(4096, seed=2)
    assert again != region
    for direction in (wire.peer.read, wire.peer.write):
        with pytest.raises(RegionError):
            await direction(ours, spans, deadline_s=DEADLINE_S)
    await wire.peer.read(ours, [Span(again, 0, 4096)], deadline_s=DEADLINE_S)
    assert np.array_equal(wire.memory.array[:4096], pattern(4096, 2))


async def test_closing_our_region_ends_its_batches(wire: Wire) -> None:
    for _ in range(10):
        region = wire.allocate(NBYTES, "short-lived")
        batch = wire.read_all(region)
        array = region.array
        while not array[:64].any() and not batch.done():  # noqa: ASYNC110
            await asyncio.sleep(0)
        region.close()
        # The last bytes to arrive, if any came late.
        array[-4096:] = 9
        (result,) = await asyncio.gather(batch, return_exceptions=True)
        # It may have been done before.
        assert isinstance(result, RegionError | SpanError | TransferReport)
        await settled(wire.agent)
        assert (array[-4096:] == 9).all()


async def test_cancelling_frees_the_spans(wire: Wire) -> None:
    num_cancelled = 0
    for turn in range(20):
        batch = wire.read_all(wire.memory)
        for _ in range(turn):
            await asyncio.sleep(0)
        waiting = asyncio.ensure_future(batch)
        await asyncio.sleep(0)
        waiting.cancel()
        result = await asyncio.gather(waiting, return_exceptions=True)
        wire.memory.array[:] = turn + 1
        num_cancelled += isinstance(result[0], asyncio.CancelledError)
        await settled(wire.agent)
        assert (wire.memory.array == turn + 1).all()
    assert num_cancelled
    assert await wire.remote_bytes() == pattern(NBYTES, SEED).tobytes()


async def test_a_note_follows_the_bytes_it_announces(wire: Wire) -> None:
    wire.memory.array[:] = 5
    span = [Span(wire.memory.id, 0, NBYTES)], [Span(wire.remote, 0, NBYTES)]
    await wire.peer.write(*span, deadline_s=DEADLINE_S, notify=b"layer 3")
    note = await wire.theirs.do("next_note")
    assert note == {"agent_id": "here", "payload": "layer 3"}
    there = await wire.theirs.do("checksum", region=wire.remote, offset=0, nbytes=NBYTES)
    assert there["checksum"] == checksum(wire.memory.buffer)


async def test_notes_arrive_in_order(wire: Wire) -> None:
    for i in range(200):
        wire.peer.notify(b"%d" % i + b"." * (i * 200))
    for i in range(200):
        assert int((await wire.theirs.do("next_note"))["payload"].rstrip(".")) == i
    with pytest.raises(ValueError, match="at most"):
        wire.peer.notify(bytes(70_000))

"""What a board says on one machine it says on the other, and nobody comes in who does not belong."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from moonpool.engine.collectives.board import BoardWord, SharedBoard
from moonpool.engine.errors import HostRefused, RankLost
from moonpool.engine.ranks.hosts import handshake as relay_handshake
from moonpool.engine.ranks.hosts.channel import PipeChannel
from moonpool.engine.ranks.hosts.daemon import RankHost
from moonpool.engine.ranks.hosts.daemon_session import DaemonSession
from moonpool.engine.ranks.hosts.frames import Frame, FrameError, FrameKind, FrameReader, heartbeat_frame
from moonpool.engine.ranks.hosts.listener import HostListener
from moonpool.engine.ranks.hosts.remote_host import RemoteHost
from moonpool.engine.ranks.process_handle import RankProcess
from moonpool.runtime.config.options import Config, NodeOptions, SecurityOptions, TransferOptions
from moonpool.runtime.security import certificates, process
from moonpool.runtime.security.roles import Caller
from tests.transfer.conftest import with_certificates
from tests.transfer.peer_process import security_options

TIMEOUT_S = 2.0
PLAIN = SecurityOptions(cluster_key="known to all of them")


@pytest.fixture(scope="module")
def encrypted(tmp_path_factory: pytest.TempPathFactory) -> SecurityOptions:
    return security_options(with_certificates(tmp_path_factory.mktemp("tls")), PLAIN.cluster_key)


def use(security: SecurityOptions) -> None:
    process.use(process.Security(security, Caller("node", "n")))


def listener(security: SecurityOptions) -> HostListener:
    use(security)
    door = HostListener(1, "127.0.0.1:0", "near", TIMEOUT_S)
    door.open()
    return door


def rank_host(door: HostListener, security: SecurityOptions, name: str = "far") -> RankHost:
    use(security)
    return RankHost(Config(node=NodeOptions(id=name)), f"127.0.0.1:{door.port}")


@pytest.fixture(autouse=True)
def identity() -> Iterator[None]:
    before = process.current()
    yield
    process.use(before)


@dataclass
class Relay:
    """Both ends of one, in this process: rank 0 is near, ranks 1 and 2 are far, programs that repeat what
    they are told."""

    near: RemoteHost
    far: DaemonSession
    running: asyncio.Task[str]
    board: SharedBoard

    def rank(self, rank: int) -> SharedBoard:
        """Its view, where it is."""
        assert self.far._board is not None
        return self.far._board.as_rank(rank)


@pytest.fixture
def repeating(monkeypatch: pytest.MonkeyPatch) -> None:
    async def start(rank: int, threads: int) -> PipeChannel:
        pipe = asyncio.subprocess.PIPE
        return PipeChannel(await asyncio.create_subprocess_exec("cat", stdin=pipe, stdout=pipe))

    monkeypatch.setattr("moonpool.engine.ranks.hosts.daemon_session.PipeChannel.start", start)


@asynccontextmanager
async def relayed(security: SecurityOptions) -> AsyncIterator[Relay]:
    door = listener(security)
    connection, welcome = await rank_host(door, security)._meet()
    assert (welcome.leader, welcome.timeout_s) == ("near", TIMEOUT_S)
    far = DaemonSession(connection, TransferOptions())
    running = asyncio.create_task(far.run())
    (near,) = await door.gather()
    board = SharedBoard.create(3, 1 << 16, TIMEOUT_S)
    board.remote_ranks, board.on_publish = range(1, 3), [near.publish]
    try:
        for rank in board.remote_ranks:
            near.start_rank(rank, 1)
        near.open(board, payload_nbytes=1 << 16, exchange_nbytes=64)
        async with asyncio.timeout(60):
            while far._board is None:  # noqa: ASYNC110  (what another machine does, nobody here is told)
                await asyncio.sleep(0.001)
        yield Relay(near, far, running, board)
    finally:
        door.close("the test is over")
        near.close("the test is over")
        await running
        board.close()


@pytest.mark.usefixtures("repeating")
@pytest.mark.parametrize("options", ["plain", "encrypted"])
async def test_steps_go_one_way_and_what_became_of_them_the_other(
    options: str, encrypted: SecurityOptions
) -> None:
    async with relayed(PLAIN if options == "plain" else encrypted) as relay:

        def lead() -> None:
            for step in range(1, 51):
                batch = np.frombuffer(os.urandom(1 + step * 1000), np.uint8)
                relay.board.payload[: len(batch)] = batch
                relay.board.publish(step, len(batch))
                for rank in (1, 2):
                    relay.board.wait_done(rank, step)
                    assert relay.board.count(rank, BoardWord.DIGEST) == rank * int(batch.sum())
                    assert relay.board.count(rank, BoardWord.BUBBLE_NS) == step

        def follow(rank: int) -> None:
            board = relay.rank(rank)
            for step in range(1, 51):
                assert board.wait_step(step - 1) == step
                board.post(BoardWord.DIGEST, rank * int(board.batch().sum()))
                board.post(BoardWord.BUBBLE_NS, step)
                board.post_done(step)

        async with asyncio.timeout(30):
            await asyncio.gather(asyncio.to_thread(lead), *(asyncio.to_thread(follow, r) for r in (1, 2)))


@pytest.mark.usefixtures("repeating")
async def test_lines_reach_a_rank_and_come_back_and_its_end_is_told() -> None:
    async with relayed(PLAIN) as relay:
        channel, other = relay.near._channels[1], relay.near._channels[2]
        sent = [b'{"number": %d, "text": "%s"}\n' % (i, b"x" * 1000 * i) for i in range(50)]
        for line in sent:
            channel.send(line)
        lines = channel.lines()
        assert [await anext(lines) for _ in sent] == sent
        os.kill(channel.pid, signal.SIGKILL)
        assert await channel.wait() == "it ended by signal 9"
        assert re.fullmatch(r"far \(127\.0\.0\.1\)", channel.where)
        other.kill()
        assert (await other.wait()).startswith("its rank host is gone")
        assert await relay.running == "the leader ended its group"
        assert not Path(f"/proc/{other.pid}").exists(), "a rank outlived its connection"


@pytest.mark.usefixtures("repeating")
async def test_heartbeats_travel_as_ages_and_silence_is_detected_on_both_sides() -> None:
    async with relayed(PLAIN) as relay:
        beaten = relay.rank(1)
        began_s = time.monotonic()
        async with asyncio.timeout(60):
            # Older than the timeout unless it is renewed. On a busy machine a heartbeat may be late.
            while time.monotonic() - began_s < 1.5 * TIMEOUT_S or relay.board.silent_s(1) > TIMEOUT_S / 2:
                beaten.beat()
                await asyncio.sleep(0.02)
        assert relay.board.silent_s(1) > 0
        assert relay.board.count(2, BoardWord.HEARTBEAT_NS) == 0, "it never beat"
        beaten.check()  # the leader is heard of too
        # A leader that is stopped says nothing: its ranks find out by their own board.
        relay.near.connection._break("stopped, for the test")
        await relay.running
        with pytest.raises(RankLost):
            beaten.check()


REFUSALS = {
    "version": "far has Moonpool 0.0.1, node near has .*: install the same version on both",
    "secret": "far does not know the security.cluster_key of node near: set the same one on both",
    "tls": "security.ca",
    "full": r"node near already has its 1 rank hosts: first \(127\.0\.0\.1\)",
}


@pytest.mark.parametrize("what", REFUSALS)
async def test_a_wrong_rank_host_is_refused_by_name_on_both_sides(
    what: str, encrypted: SecurityOptions, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    door = listener(encrypted if what == "tls" else PLAIN)
    security = replace(PLAIN, cluster_key="the key of another") if what == "secret" else PLAIN
    first = None
    if what == "full":
        first, _ = await rank_host(door, PLAIN, "first")._meet()
        first.start(lambda frame: False, lambda frame: None, lambda: heartbeat_frame({}))
        await door.gather()
    if what == "version":
        versions = iter(["0.0.1", "9.9.9"])
        monkeypatch.setattr(relay_handshake, "own_version", lambda: next(versions))
    host = rank_host(door, security)
    with pytest.raises((HostRefused, OSError), match=None if what == "tls" else REFUSALS[what]):
        await host._meet()
    async with asyncio.timeout(60):
        while "is refused" not in caplog.text:  # noqa: ASYNC110  (the other side's log)
            await asyncio.sleep(0.001)
    assert re.search(f"rank host at 127.0.0.1 is refused: .*{REFUSALS[what]}", caplog.text)
    assert PLAIN.cluster_key not in caplog.text
    door.close("the test is over")
    if first is not None:
        first.close("the test is over")


async def test_a_leader_that_does_not_know_the_secret_gets_no_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    door = listener(replace(PLAIN, cluster_key="it has been guessed"))
    # It takes whatever proof it is given, which is the first one that is looked at.
    takes, is_proof = iter([True]), relay_handshake._is_proof
    monkeypatch.setattr(relay_handshake, "_is_proof", lambda *words: next(takes, False) or is_proof(*words))
    with pytest.raises(HostRefused, match=r"it does not know our security\.cluster_key"):
        await rank_host(door, PLAIN)._meet()
    door.close("the test is over")


async def test_a_rank_host_needs_a_certificate_of_a_node(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Without a key, too: nothing else tells a client of the cluster from a node."""
    with_certificates(tmp_path)
    certificates.issue(tmp_path, Caller("client", "reader"), days=1)
    door = listener(security_options(tmp_path))
    with pytest.raises((HostRefused, OSError)):
        await rank_host(door, security_options(tmp_path, name="client-reader"))._meet()
    async with asyncio.timeout(60):
        while "is refused" not in caplog.text:  # noqa: ASYNC110  (the other side's log)
            await asyncio.sleep(0.001)
    assert "certificate is of client reader" in caplog.text
    connection, _ = await rank_host(door, security_options(tmp_path))._meet()
    connection.start(lambda frame: False, lambda frame: None, lambda: heartbeat_frame({}))
    await door.gather()
    connection.close("the test is over")
    door.close("the test is over")


@pytest.mark.parametrize("where", ["", "far (10.0.0.3)"])
async def test_the_key_goes_to_ranks_of_this_machine_only(where: str) -> None:
    class Channel:
        def __init__(self) -> None:
            self.where = where
            self.sent = b""

        def send(self, line: bytes) -> None:
            self.sent += line

    use(PLAIN)
    rank, channel = RankProcess(1), Channel()
    rank._channel = channel  # type: ignore[assignment]  # as much as it needs
    asking = asyncio.create_task(rank.start_agent(TransferOptions(), "n", 1))
    await asyncio.sleep(0)
    asking.cancel()
    assert b'"agent"' in channel.sent
    assert (PLAIN.cluster_key.encode() in channel.sent) == (not where)


def test_frames_come_out_of_a_stream_however_it_is_cut() -> None:
    frames = [Frame(FrameKind.LINE, 3, b"x" * n) for n in (0, 1, 70_000)] + [Frame(FrameKind.BYE, 0, b"why")]
    stream = b"".join(frame.pack() for frame in frames)
    for size in (1, 7, 8, 9, 1000, len(stream)):
        reader = FrameReader()
        found = [frame for at in range(0, len(stream), size) for frame in reader.feed(stream[at : at + size])]
        assert found == frames
    with pytest.raises(FrameError, match="kind 47"):
        list(FrameReader().feed(b"GET / HTTP/1.1\r\n\r\n"))

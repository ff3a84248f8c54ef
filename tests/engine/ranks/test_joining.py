"""What a board says on one machine it says on the other, and nobody joins who does not belong."""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from moonpool.engine.collectives.board import BoardWord, SharedBoard, SharedMemory, StepWord
from moonpool.engine.errors import RankLost
from moonpool.engine.ranks import leader_call
from moonpool.engine.ranks.leader_call import LeaderCall
from moonpool.engine.ranks.process_handle import RankProcess
from moonpool.engine.ranks.rank_listener import FarRank, RankListener
from moonpool.runtime.config.options import (
    Config,
    NodeOptions,
    ParallelOptions,
    SecurityOptions,
    TransferOptions,
)
from moonpool.runtime.errors import ConfigError
from moonpool.runtime.security import certificates, process
from moonpool.runtime.security.roles import Caller
from tests.transfer.conftest import with_certificates
from tests.transfer.peer_process import security_options

TIMEOUT_S = 2.0
PLAIN = SecurityOptions(cluster_key="known to all of them")
# Ranks 0 and 1 near, 2 and 3 far.
OPTIONS = ParallelOptions(tp=2, pp=2, hosts=2, listen="127.0.0.1:0", timeout_s=TIMEOUT_S)


@pytest.fixture(scope="module")
def encrypted(tmp_path_factory: pytest.TempPathFactory) -> SecurityOptions:
    return security_options(with_certificates(tmp_path_factory.mktemp("tls")), PLAIN.cluster_key)


def use(security: SecurityOptions) -> None:
    process.use(process.Security(security, Caller("node", "n")))


@asynccontextmanager
async def listening(
    security: SecurityOptions = PLAIN, options: ParallelOptions = OPTIONS
) -> AsyncIterator[RankListener]:
    use(security)
    listener = RankListener(options, "near")
    listener.open()
    try:
        yield listener
    finally:
        listener.close("the test is over")
        await listener.wait_closed()


def call_to(listener: RankListener, rank: int = 0, **variables: str) -> LeaderCall:
    launched = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", **variables}
    return LeaderCall(Config(node=NodeOptions(id="far")), f"127.0.0.1:{listener.port}", launched)


async def tries(call: LeaderCall, security: SecurityOptions) -> bool:
    use(security)
    return await asyncio.to_thread(call._try_to_join)


@dataclass
class Joined:
    """Ranks 2 and 3 of this process's other machine, as their leader has them and as they are themselves.
    ``lines``: what each was told."""

    board: SharedBoard
    far: dict[int, FarRank]
    calls: list[LeaderCall]
    views: list[SharedBoard]
    lines: list[list[bytes]]
    listening: list[asyncio.Task[None]]


@asynccontextmanager
async def joined(security: SecurityOptions = PLAIN, timeout_s: float = 60.0) -> AsyncIterator[Joined]:
    async with listening(security) as listener:
        calls = [call_to(listener, rank) for rank in range(2)]
        assert all(await asyncio.gather(*(tries(call, security) for call in calls)))
        far = await listener.gather()
        assert sorted(far) == [2, 3]
        board = SharedBoard.create(4, 1 << 16, timeout_s)
        shape = {"world_size": 4, "payload_nbytes": 1 << 16, "exchange_nbytes": 64, "timeout_s": timeout_s}
        path = calls[0].create_memory(**shape)["board"]  # type: ignore[arg-type]
        views = [SharedBoard(SharedMemory.open(path), rank, 4, timeout_s) for rank in (2, 3)]
        lines: list[list[bytes]] = [[], []]

        async def listen(call: LeaderCall, into: list[bytes]) -> None:
            async for line in call.lines():
                into.append(line)

        tasks = [asyncio.create_task(listen(*pair)) for pair in zip(calls, lines, strict=True)]
        for call, view in zip(calls, views, strict=True):
            call.attach(view)
        for rank, one in far.items():
            one.board = board.as_rank(rank)
        board.remote_ranks = range(2, 4)
        board.on_publish, board.on_beat = [far[2].publish], [far[2].beat]
        try:
            yield Joined(board, far, calls, views, lines, tasks)
        finally:
            for call in calls:
                call._reports.put(None)
            await asyncio.wait_for(asyncio.gather(*tasks), 60)
            board.close()


@pytest.mark.parametrize("options", ["plain", "encrypted"])
async def test_steps_go_one_way_and_what_became_of_them_the_other(
    options: str, encrypted: SecurityOptions
) -> None:
    async with joined(PLAIN if options == "plain" else encrypted) as relay:

        def lead() -> None:
            for step in range(1, 51):
                batch = np.frombuffer(os.urandom(1 + step * 1000), np.uint8)
                relay.board.payload(step)[: len(batch)] = batch
                relay.board.publish(step, len(batch))
                for rank in (2, 3):
                    relay.board.wait_done(rank, step)
                    assert relay.board.of_step(rank, step, StepWord.DIGEST) == rank * int(batch.sum())
                    assert relay.board.of_step(rank, step, StepWord.BUBBLE_NS) == step

        def follow(board: SharedBoard) -> None:
            for step in range(1, 51):
                assert board.wait_step(step - 1) == step
                board.post_of_step(step, StepWord.DIGEST, board.rank * int(board.batch(step).sum()))
                board.post_of_step(step, StepWord.BUBBLE_NS, step)
                board.post_done(step)

        relay.board.beat()
        async with asyncio.timeout(60):
            heart = relay.board.start_heartbeat()
            try:
                await asyncio.gather(
                    asyncio.to_thread(lead), *(asyncio.to_thread(follow, view) for view in relay.views)
                )
            finally:
                heart.stop()


async def test_lines_reach_a_rank_and_come_back_and_its_end_is_told() -> None:
    async with joined() as relay:
        channel, call = relay.far[2], relay.calls[0]
        sent = [b'{"number": %d, "text": "%s"}\n' % (i, b"x" * 1000 * i) for i in range(50)]
        for line in sent:
            channel.send(line)
            call.report(line)
        lines = channel.lines()
        assert [await anext(lines) for _ in sent] == sent
        call._reports.put(None)
        assert (await channel.wait()).startswith("its call has ended")
        assert channel.where == "far (127.0.0.1)"
        assert channel.pid == os.getpid()
        await relay.listening[0]
        assert relay.lines[0] == sent
        relay.far[3].kill()
        assert await relay.far[3].wait() == "the leader ended its group"
        await relay.listening[1]


async def test_heartbeats_go_both_ways_and_their_end_is_noticed() -> None:
    async with joined(timeout_s=TIMEOUT_S) as relay:
        beaten, other = relay.views
        began_s = time.monotonic()
        async with asyncio.timeout(60):
            # Older than the timeout unless it is renewed. On a busy machine a heartbeat may be late.
            while (
                time.monotonic() - began_s < 1.5 * TIMEOUT_S
                or relay.board.silent_s(2) > TIMEOUT_S / 2
                # The leader is heard of too, by all ranks of the machine.
                or beaten.silent_s(0) > TIMEOUT_S / 2
            ):
                beaten.beat()
                relay.board.beat()
                await asyncio.sleep(0.02)
        assert relay.board.silent_s(2) > 0
        assert relay.board.count(3, BoardWord.HEARTBEAT_NS) == 0, "it never beat"
        async with asyncio.timeout(60):
            while beaten.silent_s(0) <= TIMEOUT_S:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        with pytest.raises(RankLost, match="the leader has been silent"):
            other.check()


REFUSALS = {
    "version": "rank 2 on far .* is refused by node near: it has Moonpool 0.0.1, the node .*: install the",
    "key": "refused a call of .*another cluster key",
    "tls": "",
    "ranks": "its launcher started 3 ranks, 1 a machine, and the node needs 2 on 1 other machines, 2 on each",
    "twice": r"this rank has joined already, from far \(127\.0\.0\.1\)",
}


# The rank ends with the reason. Otherwise it asks again.
FOR_GOOD = ("version", "key", "ranks")


@pytest.mark.parametrize("what", REFUSALS)
async def test_a_wrong_rank_is_refused_by_name_on_both_sides(
    what: str, encrypted: SecurityOptions, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    async with listening(encrypted if what == "tls" else PLAIN) as listener:
        security = replace(PLAIN, cluster_key="the key of another") if what == "key" else PLAIN
        if what == "version":
            monkeypatch.setattr(leader_call, "own_version", lambda: "0.0.1")
        variables = {"WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "1"} if what == "ranks" else {}
        first = call_to(listener)
        assert what != "twice" or await tries(first, PLAIN)
        call, reason = call_to(listener, **variables), ""
        if what in FOR_GOOD:
            use(security)
            with pytest.raises(ConfigError, match=r"the leader at .* refuses it: ") as caught:
                await asyncio.wait_for(asyncio.to_thread(call.join), 30)
            reason = str(caught.value)
        else:
            assert not await tries(call, security)
        listener_says = [
            r.getMessage() for r in caplog.records if "rank_listener" in r.name or "server" in r.name
        ]
        rank_says = [r.getMessage() for r in caplog.records if "leader_call" in r.name]
        assert reason or any("no leader at" in line for line in rank_says)
        if what != "tls":  # gRPC's own handshake fails
            assert any(re.search(REFUSALS[what], line) for line in listener_says)
        if what != "tls":
            assert any(
                re.search(REFUSALS[what].removeprefix("refused a call of .*"), line)
                for line in [reason, *rank_says]
            )
        assert PLAIN.cluster_key not in caplog.text


async def test_a_rank_needs_a_certificate_of_a_node(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Without a key, too: nothing else tells a client of the cluster from a node."""
    with_certificates(tmp_path)
    certificates.issue(tmp_path, Caller("client", "reader"), days=1)
    async with listening(security_options(tmp_path)) as listener:
        with pytest.raises(ConfigError, match="Ranks/Join is not for the role client"):
            await tries(call_to(listener), security_options(tmp_path, name="client-reader"))
        assert "Ranks/Join is not for the role client" in caplog.text
        assert await tries(call_to(listener), security_options(tmp_path))


async def test_a_rank_that_never_joins_is_named() -> None:
    async with listening(options=replace(OPTIONS, start_timeout_s=1.0)) as listener:
        other = call_to(listener, 0)
        assert await tries(other, PLAIN)
        with pytest.raises(RankLost, match=r"rank 3 is lost: it has not joined within 1 s .*; missing: 3$"):
            await listener.gather()


async def test_tensors_cross_no_network_that_is_not_said_to_be_trusted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    use(PLAIN)
    everywhere = replace(OPTIONS, listen="0.0.0.0:0")
    with pytest.raises(ConfigError, match=r"neither encrypts nor authenticates them.*trusted_network=true"):
        RankListener(everywhere, "near").open()
    async with listening(options=replace(everywhere, trusted_network=True)):
        assert "neither encrypted nor authenticated" in caplog.text
    # Trust in the network is no proof of who calls.
    use(SecurityOptions())
    with pytest.raises(ConfigError, match="no caller would be authenticated"):
        RankListener(replace(everywhere, trusted_network=True), "near").open()


def test_a_rank_without_a_launcher_is_told_of_one() -> None:
    with pytest.raises(ConfigError, match=r"start the ranks of a machine with a launcher such as torchrun"):
        LeaderCall(Config(), "10.0.0.2:7400", {"RANK": "0", "WORLD_SIZE": "1"})


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

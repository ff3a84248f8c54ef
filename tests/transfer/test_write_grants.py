"""Peers write only what was granted to them, and never after the grant."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moonpool.runtime.config.options import TransferOptions
from moonpool.transfer import (
    GrantLapsed,
    Region,
    Span,
    SpanError,
    Spans,
    TransferAgent,
    TransferError,
)
from moonpool.transfer.memory.write_grants import GrantUse, WriteGrant, WriteGrants
from tests.transfer.conftest import StartPeer
from tests.transfer.faults import Proxy

NBYTES = 16 << 20
TRANSPORTS = ["local", "shm", "tcp"]


@dataclass
class Pair:
    """A writer's region ``ours``, and ``theirs``, which it writes to."""

    writer: TransferAgent
    target: TransferAgent
    ours: Region
    theirs: Region

    async def write(self, first: int, nbytes: int, grant: int, deadline_s: float = 30) -> None:
        peer = await self.writer.connect(self.target.describe())
        spans = [Span(self.ours.id, first, nbytes)], [Span(self.theirs.id, first, nbytes)]
        await peer.write(*spans, deadline_s=deadline_s, grant=grant)

    def granted(self, first: int, nbytes: int, lasts_s: float = 60) -> WriteGrant:
        return self.target.grant_writes([Span(self.theirs.id, first, nbytes)], lasts_s=lasts_s)


@pytest.fixture(params=TRANSPORTS)
async def pair(request: pytest.FixtureRequest) -> AsyncIterator[Pair]:
    options = TransferOptions(transports=(request.param,), checksum=False)
    async with (
        await TransferAgent.start(options, agent_id="writer", epoch=1) as writer,
        await TransferAgent.start(options, agent_id="target", epoch=1) as target,
    ):
        ours, theirs = writer.allocate(4096, "ours"), target.allocate(4096, "theirs")
        ours.array[:] = 1
        yield Pair(writer, target, ours, theirs)
        target.grants.check_integrity()


async def revoked(grant: WriteGrant) -> None:
    async with asyncio.timeout(60):
        await grant.end()


async def test_only_granted_bytes_are_written(pair: Pair) -> None:
    grant = pair.granted(1024, 1024)
    await pair.write(1024, 1024, grant.id)
    await pair.write(1500, 100, grant.id)
    for first, nbytes in ((0, 4096), (1023, 1), (2047, 2), (3000, 8)):
        with pytest.raises(SpanError, match="granted"):
            await pair.write(first, nbytes, grant.id)
    other = pair.granted(0, 8)
    for wrong in (0, 12345):
        with pytest.raises((GrantLapsed, SpanError)):
            await pair.write(1024, 8, wrong)
    with pytest.raises(SpanError):
        await pair.write(1024, 8, other.id)
    expected = np.zeros(4096, np.uint8)
    expected[1024:2048] = 1
    assert np.array_equal(pair.theirs.array, expected)


async def test_a_grant_ends_by_time_and_by_revocation(pair: Pair) -> None:
    short = pair.granted(0, 8, lasts_s=0.01)
    await asyncio.sleep(0.02)
    with pytest.raises(GrantLapsed, match="ended"):
        await pair.write(0, 8, short.id)
    grant = pair.granted(0, 8)
    await revoked(grant)
    with pytest.raises(GrantLapsed, match="ended"):
        await pair.write(0, 8, grant.id)
    await revoked(short)
    assert not pair.theirs.array.any()


async def test_a_region_may_be_opened_to_all_writes(pair: Pair) -> None:
    with pytest.raises(SpanError, match="not open"):
        await pair.write(0, 4096, 0)
    pair.target.allow_writes(pair.theirs)
    await pair.write(0, 4096, 0)
    assert pair.theirs.array.all()


def test_a_granted_span_may_lie_within_another() -> None:
    table = WriteGrants(NowLoop())  # type: ignore[arg-type]
    granted = Spans.of([Span(1, 10, 20), Span(1, 10, 5), Span(1, 12, 3), Span(1, 40, 5)])
    grant = table.add(granted)
    grant.check(Spans.of([Span(1, 10, 20), Span(1, 25, 5), Span(1, 40, 5)]))
    for first, nbytes in ((10, 21), (9, 2), (30, 1), (25, 16)):
        with pytest.raises(SpanError):
            grant.check(Spans.of([Span(1, first, nbytes)]))


@pytest.mark.parametrize("transport", ["shm", "tcp"])
async def test_a_writer_that_is_stopped_in_a_write_writes_no_more_after_the_grant(
    transport: str, start_peer: StartPeer
) -> None:
    writer = start_peer(transport)
    source = (await writer.do("register", nbytes=NBYTES, seed=1))["region"]
    options = TransferOptions(transports=(transport,), checksum=False)
    async with await TransferAgent.start(options, agent_id="target", epoch=1) as target:
        theirs = target.allocate(NBYTES, "theirs")
        grant = target.grant_writes([Span(theirs.id, 0, NBYTES)], lasts_s=60)
        descriptor = target.describe().pack().hex()
        writing = asyncio.create_task(
            writer.do(
                "move",
                descriptor=descriptor,
                direction="write",
                local=source,
                remote=theirs.id,
                nbytes=NBYTES,
                deadline_s=30,
                grant=grant.id,
            )
        )
        while not theirs.array[:: 1 << 20].any():  # noqa: ASYNC110
            await asyncio.sleep(0)
        writer.signal(signal.SIGSTOP)
        await revoked(grant)
        theirs.array[:] = 9  # it serves another purpose
        writer.signal(signal.SIGCONT)
        outcome = (await writing)["outcome"]
        assert (theirs.array == 9).all()
        assert outcome in ("GrantLapsed", "ChecksumMismatch", "done"), outcome


async def test_a_write_held_in_the_network_gets_no_more_time_than_its_grant() -> None:
    options = TransferOptions(transports=("tcp",), checksum=False)
    async with (
        await TransferAgent.start(options, agent_id="writer", epoch=1) as writer,
        await TransferAgent.start(options, agent_id="target", epoch=1) as target,
    ):
        ours, theirs = writer.allocate(1 << 20, "ours"), target.allocate(1 << 20, "theirs")
        ours.array[:] = 1
        cable = Proxy(target.describe().tcp_port)
        peer = await writer.connect(replace(target.describe(), tcp_port=cable.port))
        control = cable.forwarding()
        spans = [Span(ours.id, 0, 1 << 20)], [Span(theirs.id, 0, 1 << 20)]
        grant = target.grant_writes(spans[1], lasts_s=60)
        await peer.write(*spans, deadline_s=30, grant=grant.id)
        data = [thread for thread in cable.forwarding() if thread not in control]
        cable.hold()
        with pytest.raises(TransferError):
            await peer.write(*spans, deadline_s=0.2, grant=grant.id)
        await revoked(grant)
        theirs.array[:] = 9
        cable.release()
        again = target.grant_writes(spans[1], lasts_s=60)
        with pytest.raises(GrantLapsed):
            await (await writer.connect(target.describe())).write(*spans, deadline_s=30, grant=grant.id)
        await revoked(again)
        while all(thread.is_alive() for thread in data):  # noqa: ASYNC110
            await asyncio.sleep(0.001)  # the connection of the held write ends after what was held
        await target.close()
        assert (theirs.array == 9).all()
        cable.close()


# ------------------------------------------------------------------ the table against a model


@dataclass
class Model:
    """What ``WriteGrants`` must do, byte by byte."""

    table: WriteGrants
    granted: dict[WriteGrant, set[int]] = field(default_factory=dict)
    uses: dict[GrantUse, WriteGrant] = field(default_factory=dict)
    waiting: set[WriteGrant] = field(default_factory=set)
    over: set[WriteGrant] = field(default_factory=set)

    def check(self) -> None:
        used = set(self.uses.values())
        assert self.waiting & used == self.waiting, "a revoked grant without uses is not over"
        assert not self.over & used, "a grant is over while it is used"


class NowLoop:
    """Runs what is scheduled at once."""

    @staticmethod
    def call_soon_threadsafe(callback: Callable[[], None]) -> None:
        callback()


spans_of_grants = st.lists(st.tuples(st.integers(0, 30), st.integers(1, 4)), min_size=1, max_size=4)


def bytes_of(spans: list[tuple[int, int]]) -> set[int]:
    return {at for offset, nbytes in spans for at in range(offset, offset + nbytes)}


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_no_byte_is_written_outside_of_a_grant_in_effect(data: st.DataObject) -> None:
    model = Model(WriteGrants(NowLoop()))  # type: ignore[arg-type]
    for _ in range(data.draw(st.integers(1, 30))):
        step = data.draw(st.sampled_from(["grant", "use", "use", "release", "revoke"]))
        live = list(model.granted)
        if step == "grant":
            spans = data.draw(spans_of_grants)
            grant = model.table.add(Spans.of([Span(1, *span) for span in spans]))
            model.granted[grant] = bytes_of(spans)
        elif step == "use":
            spans = data.draw(spans_of_grants)
            grant = data.draw(st.sampled_from([*live, *model.over, *model.waiting, None]))
            grant_id = 77 if grant is None else grant.id
            wanted = Spans.of([Span(1, *span) for span in spans])
            if grant in model.granted and all(bytes_of([s]) <= model.granted[grant] for s in spans):
                model.uses[model.table.use(grant_id, wanted, lambda error: None)] = grant
            else:
                with pytest.raises((GrantLapsed, SpanError)):
                    model.table.use(grant_id, wanted, lambda error: None)
        elif step == "release" and model.uses:
            use = data.draw(st.sampled_from(list(model.uses)))
            grant = model.uses.pop(use)
            use.release()
            use.release()
        elif step == "revoke" and live:
            grant = data.draw(st.sampled_from(live))
            del model.granted[grant]
            model.waiting.add(grant)

            def over(grant: WriteGrant = grant) -> None:
                model.waiting.remove(grant)
                model.over.add(grant)

            grant.revoke(over)
        model.check()
    for use in model.uses:
        use.release()
    assert not model.waiting
    model.table.check_integrity()

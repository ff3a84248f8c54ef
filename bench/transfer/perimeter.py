"""What TLS costs a read over TCP, and what a cluster key costs one over shared memory."""

from __future__ import annotations

import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path

from moonpool.bench.harness.command import Run
from moonpool.bench.harness.perimeter import CERTIFICATES, KEY, NEITHER, security_of
from moonpool.bench.harness.sizes import KIB, MIB
from moonpool.bench.harness.turns import Call, compared, turns
from moonpool.bench.transfer.session import TURN_S, MoonpoolSide, Settings, target
from moonpool.bench.transfer.shapes import Shape
from moonpool.runtime.config.options import SecurityOptions, TransferOptions
from moonpool.runtime.reports.report import Row
from moonpool.runtime.security import process
from moonpool.runtime.security.roles import NODE, Caller
from moonpool.transfer import AgentDescriptor, TransferAgent

# Transport, shape, and the two forms: what is measured, and beside what.
_CASES = (
    ("tcp", Shape(MIB, 64), CERTIFICATES, NEITHER),
    ("tcp", Shape(64 * KIB, 1024), CERTIFICATES, NEITHER),
    ("shm", Shape(64 * KIB, 1024), KEY, NEITHER),
    ("shm", Shape(4 * KIB, 4096), KEY, NEITHER),
)


async def perimeter_rows(run: Run, settings: Settings) -> AsyncIterator[Row]:
    """Reads between two processes, with and without a perimeter in turn, verified by checksum.

    On one core: ``taskset -c 0 moonpool bench transfer --part perimeter``.
    """
    before = process.current()
    with tempfile.TemporaryDirectory(prefix="perimeter") as directory:
        try:
            for transport, shape, form, beside in _CASES:
                run.say(f"{transport}/{shape.name}, {form}")
                async with AsyncExitStack() as stack:
                    calls: dict[str, Call] = {}
                    for name in (form, beside):
                        security = security_of(name, Path(directory))
                        side = await _side(stack, transport, security, settings)
                        await side.prepare(shape)
                        calls[name] = partial(side.move, TURN_S)
                    seconds = await turns(calls, run.rounds, rotate=1)
                case = f"perimeter: {transport}/{shape.name}, {form}"
                for row in compared(case, "bandwidth", "GB/s", seconds, lambda s: shape.nbytes / s / 1e9):  # noqa: B023
                    yield row
        finally:
            process.use(before)


async def _side(
    stack: AsyncExitStack, transport: str, security: SecurityOptions, settings: Settings
) -> MoonpoolSide:
    """An agent with this perimeter, connected to one like it in another process."""
    process.use(process.Security(security, Caller(NODE, "bench")))
    options = TransferOptions(transports=(transport,), tcp=settings.tcp)
    agent = await stack.enter_async_context(await TransferAgent.start(options, agent_id="bench", epoch=1))
    other = await stack.enter_async_context(target(settings, transport, security=asdict(security)))
    peer = await agent.connect(AgentDescriptor.unpack(other.ready["descriptor"].encode()))
    pool = agent.allocate(settings.pool_nbytes, "pool")
    return MoonpoolSide(peer, pool, other.ready["region"], True, time.process_time)

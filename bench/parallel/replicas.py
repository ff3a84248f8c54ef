"""Replicas of a node that compute at the same time, each in a process with one thread, against one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack

from moonpool.bench.harness.child import Child
from moonpool.bench.harness.command import Run
from moonpool.bench.harness.turns import compared, turns
from moonpool.bench.parallel.stages import stages
from moonpool.bench.parallel.steps import BATCH, CONTEXT, Settings
from moonpool.runtime.reports.report import Row

NUM_REPLICAS = 2
_WARM_UP_STEPS = 10


async def _decode(replica: Child, num_steps: int) -> float:
    found = await replica.call("decode", batch=BATCH, context=CONTEXT, num_steps=num_steps)
    return float(found["rate"])


async def _prompts(replica: Child, num_tokens: int) -> float:
    return float(await replica.call("prompts", num_tokens=num_tokens))


async def replica_rows(run: Run, settings: Settings) -> AsyncIterator[Row]:
    """Tokens per second of all replicas at once, and of one of them, in turn."""
    async with AsyncExitStack() as stack:
        replicas = []
        for number in range(NUM_REPLICAS):
            device = "cpu" if settings.device == "cpu" else f"cuda:{number}"
            opened = stages(f"replica {number}", settings.model, device)
            replicas.append((await stack.enter_async_context(opened))[0])
        await asyncio.gather(*(_decode(replica, _WARM_UP_STEPS) for replica in replicas))
        measures: list[tuple[Callable[[Child, int], Awaitable[float]], str, int]] = [
            (_decode, f"decode, batch {BATCH} each, context {CONTEXT}", 2 * settings.num_steps),
            (_prompts, f"prompts of {settings.prompt_tokens}", settings.prompt_tokens),
        ]
        for measure, what, size in measures:

            async def rate(of: Sequence[Child]) -> float:
                return sum(await asyncio.gather(*(measure(replica, size) for replica in of)))  # noqa: B023

            contestants = {"all": lambda: rate(replicas), "one replica": lambda: rate(replicas[:1])}
            rates = await turns(contestants, run.rounds, warm_up=0)
            case = f"dp {NUM_REPLICAS}, {what}"
            (row,) = compared(case, "throughput", "tokens/s", rates, lambda median: median)
            yield row
            assert row.ratio is not None
            yield Row(case, "scaling efficiency", row.ratio / NUM_REPLICAS, "of one replica's")

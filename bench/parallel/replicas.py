"""Replicas of a node that compute at the same time, each in a process with one thread, against one."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from pathlib import Path

from moonpool.bench.engine.driver import Session
from moonpool.bench.harness.child import Child, served
from moonpool.bench.harness.command import Run
from moonpool.bench.harness.turns import compared, turns
from moonpool.bench.parallel.steps import BATCH, CONTEXT, Settings, running
from moonpool.runtime.config.options import ParallelOptions
from moonpool.runtime.reports.report import Row

NUM_REPLICAS = 2
_WARM_UP_STEPS = 10
_PROMPTS = 3


class Replica:
    """An engine in a child process. Its methods return tokens per second."""

    def __init__(self, model: str, device: str) -> None:
        self._stack = AsyncExitStack()
        self._running = running(Path(model), device, ParallelOptions())
        self._session: Session

    async def start(self) -> None:
        self._session = await self._stack.enter_async_context(self._running)
        await self._session.decode(BATCH, CONTEXT, _WARM_UP_STEPS)

    async def decode(self, num_steps: int) -> float:
        return BATCH / (await self._session.decode(BATCH, CONTEXT, num_steps)).step_s

    async def prompts(self, num_tokens: int) -> float:
        began_s = time.perf_counter()
        for _ in range(_PROMPTS):
            await self._session.first_token_s(num_tokens)
        return _PROMPTS * num_tokens / (time.perf_counter() - began_s)

    async def close(self) -> None:
        await self._stack.aclose()


async def replica_rows(run: Run, settings: Settings) -> AsyncIterator[Row]:
    """Tokens per second of all replicas at once, and of one of them, in turn."""
    # Idle OpenMP threads that spin would take the cores from the other replicas.
    environment = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    async with AsyncExitStack() as stack:
        replicas = [
            await stack.enter_async_context(
                served(
                    f"replica {r}",
                    "moonpool.bench.parallel.replicas",
                    "Replica",
                    environment=environment,
                    model=str(settings.model),
                    device="cpu" if settings.device == "cpu" else f"cuda:{r}",
                )
            )
            for r in range(NUM_REPLICAS)
        ]
        for method, what, count in (
            (
                "decode",
                f"decode, batch {BATCH} each, context {CONTEXT}",
                {"num_steps": 2 * settings.num_steps},
            ),
            ("prompts", f"prompts of {settings.prompt_tokens}", {"num_tokens": settings.prompt_tokens}),
        ):

            async def rate(of: Sequence[Child], method: str = method, count: dict[str, int] = count) -> float:
                rates = await asyncio.gather(*(replica.call(method, **count) for replica in of))
                return float(sum(rates))

            contestants = {"all": lambda: rate(replicas), "one replica": lambda: rate(replicas[:1])}
            rates = await turns(contestants, run.rounds, warm_up=0)
            case = f"dp {NUM_REPLICAS}, {what}"
            (row,) = compared(case, "throughput", "tokens/s", rates, lambda median: median)
            yield row
            assert row.ratio is not None
            yield Row(case, "scaling efficiency", row.ratio / NUM_REPLICAS, "of one replica's")

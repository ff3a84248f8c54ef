"""A pipeline in processes of its own, each of which may have a limit on its memory; replicas of a node."""

from __future__ import annotations

import asyncio
import os
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from moonpool.bench.engine.driver import Session
from moonpool.bench.harness.child import Child, served
from moonpool.bench.harness.command import Run
from moonpool.bench.harness.memory_group import MemoryGroup
from moonpool.bench.harness.turns import compared, turns
from moonpool.bench.parallel.steps import BATCH, CONTEXT, Settings, running
from moonpool.engine.ranks.group import RankGroup
from moonpool.engine.ranks.leader import StepTimes
from moonpool.runtime.config.options import ParallelOptions
from moonpool.runtime.reports.report import Row

# The last steps, in which sequences end.
_TAIL_STEPS = 4
_PROMPTS = 3


class Stages:
    """An engine with one thread a stage, in a child process: see ``child_main``.

    ready: the stages' processes. They run before the model is loaded, so that its memory can be limited.
    """

    def __init__(self, model: str, device: str, pp: int, micro_batches: int) -> None:
        self._model, self._device = Path(model), device
        self._options = ParallelOptions(pp=pp, micro_batches=micro_batches)
        self._ranks = RankGroup(pp, self._options.timeout_s) if pp > 1 else None
        self._times: list[StepTimes] = []
        self._stack = AsyncExitStack()
        self._session: Session

    @property
    def ready(self) -> list[int]:
        return [os.getpid(), *(rank.pid for rank in (self._ranks.ranks if self._ranks else ()))]

    async def start(self) -> None:
        if self._ranks is not None:
            self._stack.push_async_callback(self._ranks.close)
            await self._ranks.start(threads=1)

    async def load(self) -> list[int]:
        """Return the layers of each stage."""
        opened = running(self._model, self._device, self._options, self._ranks, threads=1)
        self._session = await self._stack.enter_async_context(opened)
        engine = self._session.engine
        if self._ranks is not None:
            engine.observe_steps(self._times.append)
        return list(engine.plan.stage_layers(engine.config))

    async def decode(self, batch: int, context: int, num_steps: int) -> dict[str, Any]:
        """Return tokens/s; of a pipeline the bubble, and each stage's median seconds of computing a
        micro-batch."""
        self._times.clear()
        steps = await self._session.decode(batch, context, num_steps)
        found: dict[str, Any] = {"rate": batch / steps.step_s}
        if self._times:
            count = self._session.engine.setup.steps_in_flight
            times = self._times[-(num_steps + _TAIL_STEPS) * count : -_TAIL_STEPS * count]
            computed_s = zip(*(step.compute_s for step in times), strict=True)
            found |= {"bubble": bubble(times), "compute_s": list(map(statistics.median, computed_s))}
        return found

    async def prompts(self, num_tokens: int) -> float:
        """Return tokens/s of prompts, one after the other."""
        began_s = time.perf_counter()
        for _ in range(_PROMPTS):
            await self._session.first_token_s(num_tokens)
        return _PROMPTS * num_tokens / (time.perf_counter() - began_s)

    async def close(self) -> None:
        await self._stack.aclose()


@asynccontextmanager
async def stages(
    name: str,
    model: Path,
    device: str,
    *,
    pp: int = 1,
    micro_batches: int = 1,
    limits: Sequence[MemoryGroup] = (),
) -> AsyncIterator[tuple[Child, list[int]]]:
    """``Stages`` and the layers of each one. ``limits``: one a stage.

    Raises PeerFailed, also where the kernel has killed a process for its limit.
    """
    # Idle OpenMP threads that spin would take the cores of other stages.
    environment = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    async with served(
        name,
        __name__,
        "Stages",
        environment=environment,
        model=str(model),
        device=device,
        pp=pp,
        micro_batches=micro_batches,
    ) as child:
        for group, pid in zip(limits, child.ready, strict=bool(limits)):
            group.add(pid)
        yield child, await child.call("load")


def bubble(times: Sequence[StepTimes]) -> float:
    """Return the fraction of the ranks' time in which they did not compute, from the first step's end on."""
    wall_s = sum(step.step_s for step in times)
    computed_s = sum(map(sum, (step.compute_s for step in times)))
    return 1.0 - computed_s / wall_s / len(times[0].compute_s)


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

"""What several replicas of a node compute beside each other, against one: each has a process and a thread."""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from moonpool.bench.parallel import steps
from moonpool.runtime.errors import ChildFailed
from moonpool.runtime.reports import report
from moonpool.runtime.reports.report import Row
from moonpool.runtime.service.child import tied_command

_JOBS = (("decode", 400), ("prompts", 3))


async def measure(model: Path, count: int, rounds: int, device: str) -> list[Row]:
    """Tokens a second of ``count`` replicas at once, and of one of them, in turn; medians of ``rounds``."""
    async with _replicas(model, count, device) as replicas:
        rows = []
        for what, size in _JOBS:
            case = f"dp {count}, " + (
                f"decode, batch {steps.BATCH} each, context {steps.CONTEXT}"
                if what == "decode"
                else f"prompts of {steps.PROMPT}"
            )
            one, all_ = [], []
            for _ in range(rounds):
                one.append(await _tokens_per_s(replicas[:1], what, size))
                all_.append(await _tokens_per_s(replicas, what, size))
            together, alone = statistics.median(all_), statistics.median(one)
            rows.append(report.versus(Row(case, "throughput", together, "tokens/s"), "one replica", alone))
            rows.append(Row(case, "scaling efficiency", together / alone / count, "of one replica's"))
        return rows


async def _tokens_per_s(replicas: Sequence[Process], what: str, count: int) -> float:
    """Of all together, who do the same at the same time."""
    for replica in replicas:
        assert replica.stdin is not None
        replica.stdin.write(json.dumps({"what": what, "count": count}).encode() + b"\n")
    answers = [json.loads(line) for line in await asyncio.gather(*map(_line, replicas))]
    return float(sum(answer["tokens"] / answer["seconds"] for answer in answers))


async def _line(replica: Process) -> bytes:
    assert replica.stdout is not None
    line = await replica.stdout.readline()
    if not line:
        code = await replica.wait()
        raise ChildFailed("a replica", f"ended with code {code}; its last lines above say why")
    return line


@asynccontextmanager
async def _replicas(model: Path, count: int, device: str) -> AsyncIterator[list[Process]]:
    command = [sys.executable, "-m", "moonpool.bench.parallel.replica_child", str(model)]
    # Idle OpenMP threads that spin take the cores from the other replicas.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    replicas: list[Process] = []
    try:
        for r in range(count):
            own = tied_command([*command, "cpu" if device == "cpu" else f"cuda:{r}"])
            replicas.append(
                await asyncio.create_subprocess_exec(*own, stdin=PIPE, stdout=PIPE, env=environment)
            )
        await asyncio.gather(*map(_line, replicas))
        yield replicas
    finally:
        for replica in replicas:
            replica.kill()
            await replica.wait()

"""One replica in a process of its own: does what it is told, and says how long that took.

    python -m moonpool.bench.parallel.replica_child MODEL DEVICE

It prints ``{}`` when it is ready. Each line it reads is a job, ``{"what": "decode", "count": n}`` for n steps
of a batch, or "prompts" for n prompts one after the other; it answers ``{"seconds": s, "tokens": t}``.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Any

from moonpool.bench.engine.driver import Session
from moonpool.bench.parallel import steps
from moonpool.engine.sharding.parallel_plan import ParallelPlan


async def serve(model: Path, device: str) -> None:
    async with steps.running(model, ParallelPlan(), device) as session:
        await session.decode(steps.BATCH, steps.CONTEXT, 10)
        answer({})
        while line := await asyncio.to_thread(sys.stdin.readline):
            answer(await work(session, **json.loads(line)))


async def work(session: Session, what: str, count: int) -> dict[str, Any]:
    if what == "decode":
        # Of its steps alone: prompts are the other job.
        step_s = (await session.decode(steps.BATCH, steps.CONTEXT, count)).step_s
        return {"seconds": count * step_s, "tokens": count * steps.BATCH}
    begun_s = time.perf_counter()
    for _ in range(count):
        await session.first_token_s(steps.PROMPT)
    return {"seconds": time.perf_counter() - begun_s, "tokens": count * steps.PROMPT}


def answer(content: dict[str, Any]) -> None:
    print(json.dumps(content), flush=True)


if __name__ == "__main__":
    asyncio.run(serve(Path(sys.argv[1]), sys.argv[2]))

"""Groups of ranks that serve one engine after another, so that processes are started once a plan."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from moonpool.engine.engine import Engine
from moonpool.engine.ranks.group import RankGroup
from moonpool.runtime.config.options import EngineOptions, ModelOptions, ParallelOptions
from tests.engine.conftest import Driver

# A rank that is silent for so long is lost, where that is not what a test is about: a busy machine may be.
TIMEOUT_S = 60.0


@asynccontextmanager
async def ranks(world_size: int, timeout_s: float = TIMEOUT_S) -> AsyncIterator[RankGroup]:
    group = RankGroup(world_size, timeout_s)
    await group.start(threads=1)
    try:
        yield group
    finally:
        await group.close()


@asynccontextmanager
async def serving(
    path: Path,
    group: RankGroup | None = None,
    *,
    num_blocks: int = 128,
    dtype: str = "auto",
    separate_pools: bool = False,
    **words: Any,
) -> AsyncIterator[Driver]:
    """Words are ParallelOptions' or EngineOptions'. ``num_blocks``: of all cp ranks.
    ``separate_pools``: see ``RankGroup``. Afterwards no block may be held."""
    given = {k: words.pop(k) for k in list(words) if k in ParallelOptions.__slots__}
    parallel = ParallelOptions(**{"timeout_s": TIMEOUT_S} | given)
    words = {"block_size": 8, "pool_nbytes": 1 << 30, "parallel": parallel, **words}
    model = ModelOptions(device="cpu", dtype=dtype)
    probe = Engine(path, EngineOptions(**words), model)
    nbytes = num_blocks * sum(layout.block_nbytes for layout in probe.rank_layouts)
    words["pool_nbytes"] = nbytes // parallel.cp
    engine = Engine(path, EngineOptions(**words), model, ranks=group, separate_pools=separate_pools)
    driver = Driver(engine)
    try:
        # Nobody asks these engines what a step costs.
        with patch("moonpool.engine.execution.cost_profile._BUDGET_S", 0.02):
            await engine.start()
        yield driver
    finally:
        await engine.close()
    engine.pool.check_integrity()
    if engine.ranks is None or engine.ranks.lost is None:
        assert engine.pool.num_used == 0

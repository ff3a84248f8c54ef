"""What a local cluster does about children that end."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from moonpool.local.cluster import LocalCluster
from moonpool.runtime.config.options import Config
from moonpool.runtime.service import crash_loop
from moonpool.runtime.service.child import Child


async def test_a_child_is_started_again_unless_it_fails_soon_after_each_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However often in its life; five times in a row, each soon after its start, is too often."""
    said: list[str] = []
    cluster = LocalCluster(Config(), directory=tmp_path, restart=True, report=said.append)
    program = "import os; print('{}', flush=True); os.read(0, 1) or os._exit(3)"
    child = Child("decode-0", [sys.executable, "-S", "-c", program], tmp_path / "log", sends_json=True)
    cluster.children["decode-0"] = child

    def num_starts() -> int:
        return sum("is ready" in sentence for sentence in said)

    monkeypatch.setattr(crash_loop, "MIN_UPTIME_S", 0.0)  # each life was long
    await cluster._start_child(child)
    cluster._start_watching("decode-0")
    async with asyncio.timeout(30):
        while num_starts() < 7:  # noqa: ASYNC110 (processes decide)
            await asyncio.sleep(0.01)
        monkeypatch.setattr(crash_loop, "MIN_UPTIME_S", 1e9)
        await cluster._watchers["decode-0"]
    assert "is not started again" in said[-1]
    assert num_starts() <= 7 + crash_loop.MAX_SHORT_RUNS + 1

"""A rank made slow on purpose is named, by the engine's metrics and in the record of its node."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
import time
from pathlib import Path

import pytest
from prometheus_client import generate_latest
from prometheus_client.core import REGISTRY

from moonpool.engine.collectives.board import BoardWord, SharedBoard
from moonpool.engine.node.metrics import observe_engine
from moonpool.engine.ranks.rank_times import Pace, RankTimes
from tests.engine.ranks.conftest import serving
from tests.engine.ranks.test_exact import SHAPE
from tests.processes import stop

EVEN = [0.01] * 4


def test_paces_are_of_the_window_and_need_several_steps() -> None:
    now_s = 0.0
    times = RankTimes([1], 4, lambda: now_s)
    step = [0.01, 0.01, 0.03, 0.02], EVEN, [0.03, 0.03, 0.01, 0.02], [0.0] * 4
    for _ in range(7):
        times.observe(*step)
    assert {pace.ratio for pace in times.paces()} == {1.0}
    times.observe(*step)
    assert [round(pace.ratio, 3) for pace in times.paces()] == [1.0, 1.0, 2.0, 1.5]
    assert [pace.is_slow for pace in times.paces()] == [False, False, True, True]
    assert "rank 2 of 4 is slow (compute): it takes 2.0 times as long as the median" in times.sentence()
    assert times.totals_s() == {
        "compute": pytest.approx([0.08, 0.08, 0.24, 0.16]),
        "exchange": pytest.approx([0.08] * 4),
        "wait": pytest.approx([0.16, 0.16, 0, 0.08], abs=1e-9),
        "bubble": [0] * 4,
    }
    now_s = 8.1
    assert not times.sentence()


def test_a_rank_that_takes_long_to_exchange_is_slow_by_exchange() -> None:
    times = RankTimes([1], 4)
    for _ in range(8):
        times.observe(EVEN, [0.01, 0.04, 0.01, 0.01], [0.04] * 4, [0.0] * 4)
    assert times.paces()[1] == Pace(1, pytest.approx(2.5), "exchange", 0, True)


def test_stages_of_unequal_work_are_not_compared() -> None:
    times = RankTimes([1, 1], 2)
    for _ in range(8):
        times.observe([0.01, 0.01, 0.03, 0.03], EVEN, EVEN, [0.0] * 4)
    assert not times.sentence()
    for _ in range(8):
        times.observe([0.01, 0.01, 0.03, 0.09], EVEN, EVEN, [0.0] * 4)
    assert "rank 3 of 4 is slow (compute)" in times.sentence()


def test_excesses_of_short_steps_are_no_matter() -> None:
    times = RankTimes([1], 2)
    for _ in range(100):
        times.observe([0.005, 0.0095], [0.0] * 2, [0.0] * 2, [0.0] * 2)
    assert times.paces()[1].ratio == pytest.approx(1.9)
    assert not times.sentence()


def test_two_stalls_make_a_rank_slow_that_is_as_fast_as_the_others_otherwise() -> None:
    times = RankTimes([1], 2)
    for step in range(400):
        stalled_s = 0.2 if step in (100, 300) else 0.0
        assert bool(times.sentence()) == (step > 300)
        times.observe([0.01, 0.01], [0.0, stalled_s], [0.2, 0.2], [0.0] * 2)
    pace = times.paces()[1]
    assert pace.ratio < 1.2
    assert (pace.num_stalls, pace.cause, pace.is_slow) == (2, "exchange", True)


WAITER = """
import sys, time
from moonpool.engine.collectives.board import BoardWord, SharedBoard, SharedMemory
board = SharedBoard(SharedMemory.open(sys.argv[1]), 1, 2, 60.0)
sleep = time.sleep
def told(seconds):
    # The wait has begun: it sleeps between two looks.
    print("waits", flush=True)
    time.sleep = sleep
time.sleep = told
began_ns = time.perf_counter_ns()
board.wait(0, BoardWord.EXCHANGED, 1)
print(time.perf_counter_ns() - began_ns, board.waited_ns, flush=True)
"""


async def test_time_in_which_a_waiting_rank_does_not_run_is_its_own() -> None:
    board = SharedBoard.create(2, 0, 60.0)
    waiter = await asyncio.create_subprocess_exec(
        sys.executable, "-c", WAITER, board.path, stdout=asyncio.subprocess.PIPE
    )
    assert waiter.stdout is not None
    try:
        assert await waiter.stdout.readline() == b"waits\n"
        await asyncio.sleep(0.3)
        stop(waiter.pid)
        board.advance(BoardWord.EXCHANGED, 1)
        await asyncio.sleep(0.5)
        os.kill(waiter.pid, signal.SIGCONT)
        took_s, waited_s = (int(word) / 1e9 for word in (await waiter.stdout.readline()).split())
    finally:
        waiter.kill()
        await waiter.wait()
        board.close()
    assert waited_s > 0.2
    assert took_s - waited_s > 0.4


@pytest.mark.alone  # beside others, another rank is slow, too
@pytest.mark.slow
@pytest.mark.parametrize("plan", [{"tp": 2}, {"pp": 2}], ids=["tp", "pp"])
async def test_a_rank_that_is_stopped_now_and_then_is_named_within_10_s(plan, make_checkpoint) -> None:
    path: Path = make_checkpoint("qwen2", **SHAPE).path
    async with serving(path, **plan, timeout_s=20.0) as driver:
        collector = observe_engine(driver.engine)
        (rank,) = driver.engine.ranks.ranks

        def causes() -> list[str]:
            """Of the slow rank 1, by the metrics."""
            page = generate_latest(REGISTRY).decode()
            found = re.findall(r'^moonpool_rank_straggler_ratio{cause="(.*)",rank="1"} ', page, re.MULTILINE)
            assert len(found) == 1
            return [cause for cause in found if cause != "none"]

        ended = False

        async def requests() -> None:
            while not ended:
                await driver.run(driver.sequence(range(1, 20), max_tokens=100, ignore_eos=True))

        load = asyncio.create_task(requests())
        try:
            began_s = time.monotonic()
            # Beside another one that was slow for a moment it is named later.
            while not causes() or not driver.engine.rank_times().sentence().startswith("rank 1 of 2 is slow"):
                assert time.monotonic() - began_s < 10, driver.engine.rank_times().paces()
                os.kill(rank.pid, signal.SIGSTOP)
                await asyncio.sleep(0.2)
                os.kill(rank.pid, signal.SIGCONT)
                await asyncio.sleep(0.8)
            print(f"named after {time.monotonic() - began_s:.1f} s: {driver.engine.rank_times().sentence()}")
        finally:
            REGISTRY.unregister(collector)
            # Python 3.11's wait_for may lose a cancellation, and then the requests would never end.
            ended = True
            await load

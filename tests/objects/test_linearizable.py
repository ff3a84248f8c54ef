"""Puts, gets and removes are linearizable, whatever the clients' clocks say and whatever goes wrong."""

from __future__ import annotations

import asyncio
import os
import random
import tempfile
from pathlib import Path

import pytest

from tests.objects.faults import Play, played
from tests.objects.linearizability import Operation, is_linearizable
from tests.transfer.cables import obstacle

# Of a defect once found, 2 of 1,000 showed it. As many take ten minutes: HISTORIES=1000.
HISTORIES = int(os.environ.get("HISTORIES", "250"))


def check(play: Play, count: int) -> None:
    assert not play.errors, play.errors[:5]
    assert len(play.histories) >= 0.9 * count, f"{len(play.histories)} of {count} histories say anything"
    wrong = {
        (number, key): sorted(operations, key=lambda each: each.called_s)
        for number, keys in play.histories.items()
        for key, operations in keys.items()
        if not is_linearizable(operations)
    }
    assert not wrong, f"{len(wrong)} violations, such as {in_words(*next(iter(wrong.items())))}"


def in_words(where: tuple[int, int], operations: list[Operation]) -> str:
    lines = (f"{each.called_s:.4f} … {each.ended_s:.4f} {each.kind} {each.value}" for each in operations)
    return f"history {where[0]} key {where[1]}:\n" + "\n".join(lines)


async def run(count: int, at_once: int, seed: int) -> Play:
    if reason := obstacle():
        pytest.skip(reason)
    with tempfile.TemporaryDirectory(prefix="li") as path:
        async with played(Path(path)) as play:
            tasks = [
                asyncio.create_task(play.trouble(random.Random(seed))),
                asyncio.create_task(play.play(count, at_once)),
            ]
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                task.cancel()
            for outcome in await asyncio.gather(*tasks, return_exceptions=True):
                if isinstance(outcome, Exception):
                    raise outcome
            assert any(each.startswith("cut") for each in play.faults)
            print(f"{count} histories, {len(play.faults)} faults: {', '.join(play.faults)}")
    return play


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_histories_are_linearizable() -> None:
    check(await run(HISTORIES, 12, seed=2), HISTORIES)

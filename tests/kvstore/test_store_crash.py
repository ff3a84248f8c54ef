"""A whole store that is killed at any moment of a put, an eviction or a promotion says only what is true when
it is opened again, and all of what it says can be used."""

from __future__ import annotations

import asyncio
import random
from asyncio.subprocess import PIPE
from pathlib import Path

import numpy as np
import pytest

from moonpool.kvstore.blocks.tier import Tier
from moonpool.kvstore.store import TieredStore
from moonpool.runtime.config.options import StoreOptions
from tests.forked_command import forked_command
from tests.kvstore.nodes import chain
from tests.kvstore.ssd_blocks import LAYOUT, check_every_block, open_tier, payload
from tests.kvstore.store_worker import NUM_SLOTS
from tests.kvstore.test_ssd_crash import Victim


async def kill_again_and_again(directory: Path, times: int) -> None:
    rng = random.Random(times)
    command = [*forked_command("tests.kvstore.store_worker"), str(directory)]
    victim = Victim(await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE))
    num_checked = number = 0
    # A machine that gets little done in so short lives is given more of them.
    while number < times or (num_checked <= 5 * times and number < 4 * times):
        await victim.work_and_be_killed(number, rng.expovariate(1 / 0.05))
        disk = await open_tier(directory)
        memory = np.zeros(NUM_SLOTS * LAYOUT.block_nbytes, np.uint8)
        store = TieredStore(LAYOUT, StoreOptions(), memory, ssd=disk)
        await store.start()
        num_checked += await check_every_block(disk)
        # Orphans there may be: what came before them was being removed.
        assert disk.stats.num_lost == disk.stats.num_corrupt == 0
        assert dict(store.blocks()) == dict.fromkeys(disk.keys(), Tier.SSD)
        await read_all(store)
        await store.close()
        number += 1
    await victim.end()
    assert num_checked > 5 * times, "hardly anything was there to be checked"


async def read_all(store: TieredStore) -> None:
    """Every chain, as far as it is held, through host memory."""
    num_held = 0
    for number in range(10):
        held = chain(20, number)[: len(store.match(chain(20, number)))]
        spans = [np.zeros(LAYOUT.block_nbytes, np.uint8) for _ in held]
        await store.get(held, spans)
        assert all(np.array_equal(span, payload(key)) for key, span in zip(held, spans, strict=True))
        num_held += len(held)
    assert num_held == len(list(store.blocks())), "a block that cannot be reached"
    store.check_integrity()


@pytest.mark.slow
async def test_every_block_is_exact_after_a_kill_at_any_moment(tmp_path: Path) -> None:
    await kill_again_and_again(tmp_path, 12)


@pytest.mark.slow
async def test_every_block_is_exact_after_a_hundred_kills(tmp_path: Path) -> None:
    await kill_again_and_again(tmp_path, 100)

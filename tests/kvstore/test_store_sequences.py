"""Laws of the store after any sequence of calls."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from moonpool.kvstore.blocks.tier import Tier
from moonpool.kvstore.errors import BlockMissing
from moonpool.runtime.config.options import HostTierOptions, SsdTierOptions, StoreOptions
from tests.kvstore.fake_pool import FakePool
from tests.kvstore.memory_disk import MemoryDisk
from tests.kvstore.nodes import chain, key
from tests.kvstore.small_store import (
    NBYTES,
    Listener,
    get,
    make,
    payload,
    put,
    settled,
)


class StoreMachine(RuleBasedStateMachine):
    """Pool, host memory and disk: what the store says it has is byte-exact, it holds prefixes, and the
    listener knows exactly what is held."""

    @initialize(
        write_policy=st.sampled_from(["write-back", "write-through", "selective"]),
        policy=st.sampled_from(["lru", "prefix"]),
        num_blocks=st.integers(2, 12),
        keep_until_written=st.booleans(),
    )
    def start(self, write_policy: str, policy: str, num_blocks: int, keep_until_written: bool) -> None:
        self.loop = asyncio.new_event_loop()
        self.heard = Listener()
        self.pool = FakePool()
        options = StoreOptions(
            write_policy=write_policy,
            host=HostTierOptions(policy=policy, watermark=0.7),
            ssd=SsdTierOptions(queue_nbytes=4 * NBYTES),
        )

        async def begin() -> None:
            self.disk = MemoryDisk(10)
            self.store = make(
                num_blocks,
                options,
                pool=self.pool,
                ssd=self.disk,
                on_change=self.heard,
                keep_until_written=keep_until_written,
            )
            await self.store.start()

        self.loop.run_until_complete(begin())
        self.pool.store = self.store
        self.leases: list[Any] = []
        self.removals: list[asyncio.Task[Any]] = []

    def run(self, work: Any) -> Any:
        return self.loop.run_until_complete(work)

    @rule(length=st.integers(1, 6), number=st.integers(0, 3))
    def put(self, length: int, number: int) -> None:
        self.store.use(chain(length, number))
        assert self.run(put(self.store, length, number)) <= length

    @rule(length=st.integers(1, 6), number=st.integers(0, 3))
    def compute(self, length: int, number: int) -> None:
        for i, name in enumerate(chain(length, number)):
            self.pool.seal(name, key(i - 1, number) if i else None, payload(name))
            self.heard(name, Tier.POOL)

    @rule(number=st.integers(0, 3))
    def evict_from_pool(self, number: int) -> None:
        if key(0, number) in self.pool:
            self.pool.evict(key(0, number))

    @rule(length=st.integers(1, 6), number=st.integers(0, 3))
    def get(self, length: int, number: int) -> None:
        held_keys = chain(length, number)
        held = self.store.match(held_keys)
        damaged = any(name in self.disk and not self.disk._is_intact(name) for name in held_keys)
        # A write that goes on meanwhile may push out of the disk what is about to be read.
        may_miss = damaged or not self.store.writes._idle.is_set()
        try:
            self.run(get(self.store, len(held), number))
        except BlockMissing:
            if not may_miss:
                raise

    @rule(length=st.integers(1, 6), number=st.integers(0, 3))
    def pin(self, length: int, number: int) -> None:
        keys = chain(length, number)
        lease = self.run(self.store.pin(keys, 5.0))
        if lease.id:
            self.leases.append((lease, keys))

    @rule()
    def release(self) -> None:
        if self.leases:
            self.store.release(self.leases.pop(0)[0].id)

    @rule(number=st.integers(0, 3), position=st.integers(0, 4))
    def remove(self, number: int, position: int) -> None:
        # While the disk holds up a write of it, the removal waits for that.
        task = self.loop.create_task(self.store.remove([key(position, number)]))
        for _ in range(20):
            self.run(asyncio.sleep(0))
        assert task.done() or not self.disk.may_write.is_set()
        self.removals.append(task)

    @rule(number=st.integers(0, 3), position=st.integers(0, 5))
    def damage_disk(self, number: int, position: int) -> None:
        name = key(position, number)
        if name in self.disk:
            self.disk.bytes[name][0] ^= 1

    @rule()
    def let_the_disk_work(self) -> None:
        self.disk.may_write.set()
        self.run(settled(self.store))
        while self.removals:
            self.run(self.removals.pop())

    @rule()
    def hold_the_disk_up(self) -> None:
        self.disk.may_write.clear()

    @rule()
    def refuse(self) -> None:
        self.disk.refuses = not self.disk.refuses

    @invariant()
    def leased_bytes_stay(self) -> None:
        for lease, keys in getattr(self, "leases", ()):
            for name, block in zip(keys, lease.blocks, strict=False):
                tier = self.pool if block.tier is Tier.POOL else self.store.host
                assert tier.bytes_of(block.slot).tobytes() == payload(name).tobytes()

    @invariant()
    def the_listener_knows_what_is_held(self) -> None:
        if hasattr(self, "store"):
            self.store.check_integrity()
            assert dict(self.store.blocks()) == self.heard.tiers
            for number in range(4):
                held = [name for name in chain(8, number) if self.store.tier_of(name) is not None]
                assert held == chain(len(held), number), "a hole in a chain"

    def teardown(self) -> None:
        if hasattr(self, "store"):
            for lease, _ in self.leases:
                self.store.release(lease.id)
            self.let_the_disk_work()
            assert self.pool.num_holds == 0
            assert self.store.host.num_pinned == 0
            self.run(self.store.close())
            self.loop.close()


@pytest.mark.slow
def test_any_sequence_of_calls() -> None:
    run_state_machine_as_test(
        StoreMachine, settings=settings(max_examples=120, stateful_step_count=40, deadline=None)
    )

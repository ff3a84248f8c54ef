"""Adapters that left the pool come back from the node's store: from host memory, and after a restart from
disk. Tokens are those of the merged models each time."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from moonpool.engine.adapters.peft import PeftAdapter
from moonpool.engine.adapters.residency import AdapterRef
from moonpool.engine.prefix_cache.store import NodeStore
from moonpool.kvstore.tiers.metrics import CORRUPT_BLOCKS
from moonpool.runtime.config.options import Config, HostTierOptions, SsdTierOptions, StoreOptions
from tests.engine.adapters import make_adapter
from tests.engine.conftest import Reference, prompt
from tests.engine.ranks.test_handover import Side, side

NUM_TOKENS = 8
BLOCK_NBYTES = 3 * 2 * 2 * 8 * 16 * 4  # layers, K and V, KV heads, tokens, dims, float32
# Adapters may use half of it: of these, one at a time.
NUM_BLOCKS = 48

Plan = dict[str, Any]


class Voices:
    """A model with three adapters, and their names in order."""

    def __init__(self, base: Reference, folder: Path) -> None:
        self.models = {
            str(seed): make_adapter(base, folder / str(seed), seed=seed, r=8 + seed) for seed in range(3)
        }
        self.base = base


class Node:
    """An engine with a store, as a node has them."""

    def __init__(self, here: Side, store: NodeStore, voices: Voices) -> None:
        self.engine, self.store = here.memory.engine, store
        self._driver, self._voices = here.driver, voices
        self._refs: dict[str, AdapterRef] = {}
        for name, model in voices.models.items():  # as ``AdapterRegistry`` does
            adapter = PeftAdapter(model.path, self.engine.config)
            self.engine.adapter_shapes.learn(adapter)
            self._refs[name] = AdapterRef(name, adapter.digest, model.path, adapter.rank)

    @property
    def loads(self) -> Counter[str]:
        return self.engine.adapters.counts.loads_from

    async def answer(self, name: str) -> None:
        driver, engine, ids = self._driver, self.engine, prompt(20, seed=int(name))
        sequence = driver.sequence(ids, root_key=name.encode() * 16, max_tokens=NUM_TOKENS, ignore_eos=True)
        async with engine.adapters.pinned(self._refs[name], sequence) as pin:
            await pin.give(sequence)
            (result,) = await driver.run(sequence)
        assert result.token_ids == self._voices.models[name].greedy(ids, NUM_TOKENS), (name, self.loads)

    async def answer_all(self) -> None:
        for name in self._voices.models:
            await self.answer(name)
        await self.store.tiers.copied()
        assert self.store.tiers.writes is not None
        await self.store.tiers.writes.drained()
        self.engine.adapters.check_integrity()
        self.engine.pool.check_integrity()
        self.store.tiers.check_integrity()


@asynccontextmanager
async def node(
    voices: Voices, disk: Path, plan: Plan, num_blocks: int = NUM_BLOCKS, **words: Any
) -> AsyncIterator[Node]:
    """Words are StoreOptions'."""
    options = {"tp": 1, "pp": 1, "pool_nbytes": num_blocks * BLOCK_NBYTES} | plan
    ssd = SsdTierOptions(path=str(disk), capacity_nbytes=64 << 20, deadline_s=30.0)
    config = Config(store=StoreOptions(host=HostTierOptions(capacity_nbytes=8 << 20), ssd=ssd, **words))
    async with side(voices.base.path, "node", **options, config=config) as here:
        memory = here.memory
        store = await NodeStore.open(
            config, "node", here.agent, memory.engine, memory.blocks, lambda key, tier: None
        )
        try:
            yield Node(here, store, voices)
        finally:
            await memory.engine.halt()
            await store.close(30.0 if config.store.write_policy == "write-back" else 0.0)


@pytest.mark.parametrize(
    "plan",
    [
        pytest.param({}, id="alone"),
        pytest.param({"device": "cuda", "max_batch_size": 8}, id="gpu", marks=pytest.mark.gpu),
        pytest.param({"tp": 2}, id="tp 2"),
        pytest.param({"pp": 2}, id="pp 2", marks=pytest.mark.slow),
        pytest.param({"tp": 2, "separate_pools": True}, id="separate pools", marks=pytest.mark.slow),
    ],
)
async def test_adapters_return_without_their_files(checkpoint: Reference, tmp_path: Path, plan: Plan) -> None:
    voices, disk = Voices(checkpoint, tmp_path), tmp_path / "disk"
    async with node(voices, disk, plan) as first:
        await first.answer_all()
        assert first.loads == {"file": 3}
        await first.answer_all()
        assert first.loads == {"file": 3, "host": 3}
    async with node(voices, disk, plan) as second:
        for model in voices.models.values():  # known by now, and not read again
            model.path.rename(model.path.with_name(f"away {model.path.name}"))
        await second.answer_all()
        assert second.loads == {"ssd": 3}
        await second.answer_all()
        assert second.loads == {"ssd": 3, "host": 3}


async def test_adapters_are_written_as_they_are_loaded(checkpoint: Reference, tmp_path: Path) -> None:
    """By write-through, while they are in the pool: nothing is left to do when the node ends."""
    voices, disk = Voices(checkpoint, tmp_path), tmp_path / "disk"
    async with node(voices, disk, {}, write_policy="write-through") as first:
        await first.answer_all()
        assert first.loads == {"file": 3}
    async with node(voices, disk, {}, write_policy="write-through") as second:
        await second.answer_all()
        assert second.loads == {"ssd": 3}


async def test_what_the_disk_has_corrupted_is_read_from_the_files(
    checkpoint: Reference, tmp_path: Path
) -> None:
    voices, disk = Voices(checkpoint, tmp_path), tmp_path / "disk"
    async with node(voices, disk, {}) as first:
        await first.answer_all()
    corrupt = CORRUPT_BLOCKS.labels("ssd")
    before = corrupt._value.get()
    for path in (disk / "node").glob("segment-*.kv"):
        data = bytearray(path.read_bytes())
        data[::4096] = bytes(each ^ 4 for each in data[::4096])
        path.write_bytes(data)
    async with node(voices, disk, {}) as second:
        await second.answer_all()
        assert second.loads == {"file": 3}
        assert corrupt._value.get() > before
        await second.answer_all()
        assert second.loads == {"file": 3, "host": 3}


async def test_another_content_of_a_name_finds_no_block_of_the_former(
    checkpoint: Reference, tmp_path: Path
) -> None:
    voices, disk = Voices(checkpoint, tmp_path), tmp_path / "disk"
    async with node(voices, disk, {}) as first:
        await first.answer_all()
    voices.models["1"] = make_adapter(checkpoint, tmp_path / "1", seed=7, r=9)
    async with node(voices, disk, {}) as second:
        await second.answer_all()
        assert second.loads == {"ssd": 2, "file": 1}


async def test_ranks_with_copies_of_kv_heads_read_the_files(checkpoint: Reference, tmp_path: Path) -> None:
    """The store takes the rows of one rank for those of another."""
    voices = Voices(checkpoint, tmp_path)
    async with node(voices, tmp_path / "disk", {"cp": 2}, 2 * NUM_BLOCKS) as first:
        await first.answer_all()
        await first.answer_all()
        assert first.loads == {"file": 6}

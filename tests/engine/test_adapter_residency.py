"""Which adapters are in memory: loads beside other work, rows, failures, host memory."""

from __future__ import annotations

import asyncio
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moonpool.engine.adapters.host import HostAdapters
from moonpool.engine.adapters.peft import WEIGHTS_FILE, PeftAdapter
from moonpool.engine.adapters.registry import AdapterRegistry
from moonpool.engine.adapters.residency import AdapterRef, AdapterResidency
from moonpool.engine.checkpoint.config import ModelConfig
from moonpool.engine.errors import AdapterRefused
from tests.engine.adapters import make_adapter
from tests.engine.conftest import Reference


class Loads:
    """Loads that end when told to, a clock, and sequences that have adapters."""

    def __init__(self, num_rows: int) -> None:
        self.now_s = 0.0
        self.running: dict[str, asyncio.Future[None]] = {}
        self.in_use: set[int] = set()
        self.residency = AdapterResidency(
            num_rows, self._load, self.in_use.__contains__, clock=lambda: self.now_s
        )

    async def _load(self, ref: AdapterRef, number: int, first: int, num_rows: int) -> None:
        self.running[ref.name] = ended = asyncio.get_running_loop().create_future()
        await ended

    async def begun(self, name: str) -> asyncio.Future[None]:
        while name not in self.running:  # noqa: ASYNC110
            await asyncio.sleep(0)
        return self.running.pop(name)


def ref(name: str, rank: int = 4) -> AdapterRef:
    return AdapterRef(name, f"digest of {name}", Path("/") / name, rank)


async def test_a_load_beside_other_work_is_hidden() -> None:
    made = Loads(8)
    async with made.residency.pinned(ref("a")) as pin:
        load = await made.begun("a")
        made.now_s = 3.0  # its blocks were fetched meanwhile
        waiting = asyncio.ensure_future(pin.number())
        await asyncio.sleep(0)
        made.now_s = 4.0
        load.set_result(None)
        assert await waiting == await pin.number() == 0
    async with made.residency.using(ref("a")) as number:
        assert number == 0
    counts = made.residency.counts
    assert (counts.load_s, counts.hidden_load_s) == (4.0, 3.0)
    assert (counts.hits, counts.misses, counts.loads) == (1, 1, 1)


async def test_a_request_that_gives_up_leaves_the_load_to_the_next() -> None:
    made = Loads(8)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01), made.residency.using(ref("a")):
            pass
    (await made.begun("a")).set_result(None)
    async with asyncio.timeout(5), made.residency.using(ref("a")):
        assert made.residency.counts.loads == 1
    assert made.residency.digests == ["digest of a"]


async def test_a_failed_load_tells_all_that_wait_and_is_tried_again() -> None:
    made = Loads(8)

    async def use() -> int:
        async with made.residency.using(ref("a")) as number:
            return number

    waiting = [asyncio.ensure_future(use()) for _ in range(3)]
    (await made.begun("a")).set_exception(AdapterRefused(Path("/a"), "it is corrupt"))
    found = await asyncio.gather(*waiting, return_exceptions=True)
    assert all(isinstance(one, AdapterRefused) for one in found)
    assert made.residency.num_used_rows == 0
    again = asyncio.ensure_future(use())
    (await made.begun("a")).set_result(None)
    assert await again == 1
    assert made.residency.counts.failed_loads == 1


async def test_what_loads_or_is_used_stays() -> None:
    made = Loads(8)
    async with made.residency.pinned(ref("a")):
        load = await made.begun("a")
        async with made.residency.pinned(ref("b")):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.05), made.residency.pinned(ref("c")):
                    pass
            (await made.begun("b")).set_result(None)
    load.set_result(None)
    await asyncio.sleep(0)
    made.in_use.add(0)  # a sequence goes on with "a"
    async with made.residency.pinned(ref("c")):
        assert made.residency.digests == ["digest of a"]
        assert made.residency.counts.evictions == 1
        made.residency.check_integrity()


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 7)), max_size=40))
async def test_rows_belong_to_one_adapter_each(asked: list[tuple[int, int]]) -> None:
    made = Loads(12)
    ranks: dict[int, int] = {}
    for number, rank in asked:
        name = str(number)
        async with made.residency.pinned(ref(name, ranks.setdefault(number, rank))):
            if f"digest of {name}" not in made.residency.digests:
                (await made.begun(name)).set_result(None)
                await asyncio.sleep(0)
                await asyncio.sleep(0)
            made.residency.check_integrity()
    assert made.residency.num_used_rows <= 12


@pytest.fixture
def folder(checkpoint: Reference, tmp_path: Path) -> Path:
    for seed in range(3):
        make_adapter(checkpoint, tmp_path / str(seed), seed=seed, r=4)
    return tmp_path


def test_what_was_read_returns_without_its_files(checkpoint: Reference, folder: Path) -> None:
    config = ModelConfig.from_checkpoint(checkpoint.path)
    read = [PeftAdapter(folder / str(seed), config) for seed in range(3)]
    host = HostAdapters(config, torch.float32, 2 * read[0].nbytes)
    for one in read:
        host.keep(one)
    assert len(host) == 2
    assert host.nbytes == 2 * read[0].nbytes
    shutil.rmtree(folder)
    assert host.get(read[2].path, read[2].digest) is read[2]
    with pytest.raises(AdapterRefused, match="cannot be read"):
        host.get(read[0].path, read[0].digest)


async def test_names_are_listed_in_pages(checkpoint: Reference, folder: Path) -> None:
    config = ModelConfig.from_checkpoint(checkpoint.path)
    with ThreadPoolExecutor(1) as reader:
        registry = AdapterRegistry(config, HostAdapters(config, torch.float32, 1 << 20), reader)
        for name in "cab":
            await registry.register(name, folder / "0")
        before = registry.version
        with pytest.raises(AdapterRefused):
            await registry.register("d", folder / WEIGHTS_FILE)
        assert registry.version == before
        first, more = registry.page("", 2)
        rest, end = registry.page(first[-1].name, 2)
        assert ([one.name for one in first], more) == (["a", "b"], True)
        assert ([one.name for one in rest], end) == (["c"], False)
        assert registry.remove("a") and not registry.remove("a")
        assert registry.version == before + 1

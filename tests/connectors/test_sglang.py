"""The storage backend under SGLang's own classes: its factory, its host pools, its cache controller.

SGLang's CPU engine runs no HiCache, so no text is generated here.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from moonpool.bench.harness.child import Child, PeerFailed, served
from moonpool.bench.harness.peers import PeerAbsent, python_of
from tests.store_node.conftest import StoreCluster, running
from tests.store_node.test_failures import flip

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.asyncio(loop_scope="module"),
]

ROOT = Path(__file__).parents[2]
_NODE = {"store_node__object_nbytes": "64MiB", "store_node__object_ssd_nbytes": "128MiB"}
_LAYOUTS = ["page_first", "page_first_direct", "layer_first"]
# A call that is slow on a busy machine would be a miss.
_DEADLINE_S = 60.0


@pytest.fixture(scope="module")
def python() -> Path:
    try:
        return python_of("sglang")
    except PeerAbsent:
        pytest.skip("no SGLang here: `make sglang` installs its package without CUDA (1.5 GB)")


class Host:
    """A process with engines, and a cluster that they use."""

    def __init__(self, child: Child, cluster: StoreCluster) -> None:
        self.child, self.cluster = child, cluster
        self._numbers = iter(range(1_000_000))
        self.seed = random.Random(7)

    async def engine(self, layout: str = "page_first", **keywords: Any) -> Engine:
        extra = {
            "backend_name": "moonpool",
            "module_path": "moonpool.connectors.sglang",
            "class_name": "MoonpoolStorage",
            "interface_v1": 1,
            "url": self.cluster.url,
            "set": [f"transfer.deadline_s={_DEADLINE_S}"],
            **keywords.pop("extra", {}),
        }
        name = str(next(self._numbers))
        engine = Engine(self, name)
        keywords.setdefault("model", "a/model")
        engine.writes = (await self.child.call("open", name=name, extra=extra, layout=layout, **keywords))[
            "writes"
        ]
        return engine


class Engine:
    def __init__(self, host: Host, name: str) -> None:
        self._host, self._name = host, name
        self.writes = True

    async def __call__(self, what: str, **keywords: Any) -> Any:
        return await self._host.child.call("do", name=self._name, what=what, **keywords)

    async def close(self) -> None:
        await self._host.child.call("close_one", name=self._name)


@contextlib.asynccontextmanager
async def process(python: Path, cluster: StoreCluster, folder: Path) -> AsyncIterator[Host]:
    # Only our package: the folders beside it have names of others.
    path = folder / "path"
    path.mkdir(exist_ok=True)
    with contextlib.suppress(FileExistsError):
        (path / "moonpool").symlink_to(ROOT / "moonpool")
    engine = Path(__file__).with_name("sglang_engine.py")
    environment = {"PYTHONPATH": str(path), "HF_HUB_OFFLINE": "1"}
    async with served("sglang", engine, "Engines", python=str(python), environment=environment) as child:
        yield Host(child, cluster)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def host(python: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Host]:
    folder = tmp_path_factory.mktemp("sglang")
    async with running() as cluster:
        await cluster.start("a", store__ssd__path=folder / "ssd", **_NODE)
        async with process(python, cluster, folder) as host:
            yield host


@pytest.fixture
def seed(host: Host) -> int:
    """Of tokens that no other test uses."""
    return host.seed.randrange(1 << 20) * 1000


@pytest.mark.parametrize("mla", [False, True], ids=["mha", "mla"])
@pytest.mark.parametrize("layout", _LAYOUTS)
async def test_pages_of_one_engine_are_loaded_by_another(
    host: Host, seed: int, layout: str, mla: bool
) -> None:
    first, second = await host.engine(layout, mla=mla), await host.engine(layout, mla=mla)
    assert await second("prefetch", seed=seed, num_pages=20) == {"hits": 0, "loaded": 0, "right": True}
    assert await first("backup", seed=seed, num_pages=20) == 20
    assert await first("backup", seed=seed, num_pages=20) == 20
    # The prefix ends at the first page that is missing.
    assert await second("prefetch", seed=seed, num_pages=25) == {"hits": 20, "loaded": 20, "right": True}
    assert await first("pages_moved") == [20, 0], "pages that are there are not written again"
    assert await second("pages_moved") == [0, 20]
    await first("clear")
    assert (await second("prefetch", seed=seed, num_pages=20))["hits"] == 0


async def test_copies_of_pages_without_interface_v1(host: Host, seed: int) -> None:
    first, second = [await host.engine("layer_first", extra={"interface_v1": 0}) for _ in range(2)]
    assert await first("backup", seed=seed, num_pages=9) == 9
    assert await second("prefetch", seed=seed, num_pages=10) == {"hits": 9, "loaded": 9, "right": True}


async def test_engines_that_differ_share_nothing(host: Host, seed: int, tmp_path: Path) -> None:
    base = {"tp_rank": 0, "tp_size": 2, "dtype": "bfloat16"}
    writer = await host.engine(**base)
    assert await writer("backup", seed=seed, num_pages=4) == 4
    (tmp_path / "config.json").write_text("{}")
    others: list[tuple[str, dict[str, Any]]] = [
        ("page_first", base | {"tp_rank": 1}),
        ("page_first", base | {"tp_size": 4}),
        ("page_first", base | {"dtype": "float16"}),
        ("page_first", base | {"model": "another/model"}),
        ("page_first", base | {"model": str(tmp_path)}),
        ("page_first", base | {"extra": {"tenant": "another"}}),
        ("page_first", base | {"mla": True}),
        ("page_first_direct", base),
        ("layer_first", base),
    ]
    for layout, keywords in others:
        other = await host.engine(layout, **keywords)
        assert (await other("prefetch", seed=seed, num_pages=4))["hits"] == 0, (layout, keywords)
        await other.close()
    same = await host.engine(**base)
    assert (await same("prefetch", seed=seed, num_pages=4))["right"]
    # SGLang's hashes are of pages of so many tokens; other pages have other bytes besides.
    smaller = await host.engine(**base, page_size=32)
    assert (await smaller("prefetch", seed=seed, num_pages=8))["hits"] == 0


async def test_ranks_of_an_mla_model_share_one_copy(host: Host, seed: int) -> None:
    ranks = [await host.engine(mla=True, tp_rank=rank, tp_size=2) for rank in range(2)]
    assert [rank.writes for rank in ranks] == [True, False], "SGLang lets one rank write"
    assert await ranks[0]("backup", seed=seed, num_pages=6) == 6
    for rank in ranks:
        assert await rank("prefetch", seed=seed, num_pages=6) == {"hits": 6, "loaded": 6, "right": True}
    async with host.cluster.client() as store:
        # One object for each page of the model, whatever the rank.
        before = len(await store.ls("sglang/"))
        assert await ranks[1]("backup", seed=seed, num_pages=6) == 6
        assert len(await store.ls("sglang/")) == before


async def test_a_second_pool_restores_where_its_window_is_complete(host: Host, seed: int) -> None:
    engine = await host.engine()
    await engine("add_side_pool", layout="page_first")
    assert await engine("backup", seed=seed, num_pages=8) == 8
    none = await engine("side_hits", seed=seed, num_pages=8, num_trailing=2)
    assert none == {"hits": 0, "restorable": [], "pools": {"kv": 8}}
    assert await engine("backup_side", seed=seed, num_pages=6, begin=4) == [True, True]
    found = await engine("side_hits", seed=seed, num_pages=8, num_trailing=2)
    assert found == {"hits": 6, "restorable": [6], "pools": {"kv": 8, "swa": 6}}
    assert await engine("load_side", seed=seed, num_pages=6, begin=4) == {"got": [True, True], "right": True}


async def test_a_damaged_page_is_a_miss(host: Host, seed: int) -> None:
    engine = await host.engine()
    await engine("backup", seed=seed, num_pages=5)
    marker = bytes(await engine("bytes_of_page", seed=seed, at=2))
    flip(host.cluster.nodes["a"].pid, marker)
    assert await engine("prefetch", seed=seed, num_pages=5) == {"hits": 5, "loaded": 2, "right": True}
    # The damaged copy is dropped, so the page is stored anew.
    assert (await engine("prefetch", seed=seed, num_pages=5))["hits"] == 2
    assert await engine("backup", seed=seed, num_pages=5) == 5
    assert await engine("prefetch", seed=seed, num_pages=5) == {"hits": 5, "loaded": 5, "right": True}


async def test_pages_outlive_the_engine_and_the_store_node(host: Host, seed: int) -> None:
    engine = await host.engine()
    await engine("backup", seed=seed, num_pages=7)
    await engine.close()
    again = await host.engine()
    assert await again("prefetch", seed=seed, num_pages=7) == {"hits": 7, "loaded": 7, "right": True}
    await host.cluster.kill("a")
    # No exception reaches the controller: it would end the load with none.
    assert await again("prefetch", seed=seed, num_pages=7) == {"hits": 0, "loaded": 0, "right": True}
    assert await again("backup", seed=seed + 1, num_pages=3) == 0
    failures = await again("failures")
    assert failures["exists"] >= 7
    assert failures["set"] >= 3
    await host.cluster.start("a")
    await until_found(again, seed, 7)


async def test_a_redis_that_is_stopped_costs_hits_only(host: Host, seed: int) -> None:
    writer = await host.engine()
    assert await writer("backup", seed=seed, num_pages=4) == 4
    engine = await host.engine(extra={"set": ["transfer.deadline_s=2"]})
    redis = host.cluster.redis.process.pid
    os.kill(redis, signal.SIGSTOP)
    try:
        assert (await engine("prefetch", seed=seed, num_pages=4))["loaded"] == 0
    finally:
        os.kill(redis, signal.SIGCONT)
    await until_found(writer, seed, 4)


async def test_a_clear_that_fails_says_so(host: Host, seed: int) -> None:
    """SGLang tells its operator of a failure only if an exception comes."""
    writer = await host.engine()
    assert await writer("backup", seed=seed, num_pages=4) == 4
    engine = await host.engine(extra={"set": ["transfer.deadline_s=2"]})
    redis = host.cluster.redis.process.pid
    os.kill(redis, signal.SIGSTOP)
    try:
        with pytest.raises(PeerFailed):
            await engine("clear")
    finally:
        os.kill(redis, signal.SIGCONT)
    async with asyncio.timeout(60):
        while True:
            with contextlib.suppress(PeerFailed):
                await engine("clear")
                break
            await asyncio.sleep(0.1)
    assert (await writer("prefetch", seed=seed, num_pages=4))["hits"] == 0


async def test_an_engine_killed_while_it_stores_leaves_no_wrong_page(
    host: Host, seed: int, python: Path, tmp_path: Path
) -> None:
    reader = await host.engine()
    async with process(python, host.cluster, tmp_path) as doomed:
        writer = await doomed.engine()
        await writer("backup", seed=seed, num_pages=1)
        storing = asyncio.ensure_future(writer("backup", seed=seed, num_pages=100))
        await asyncio.sleep(host.seed.uniform(0.01, 0.1))  # any moment will do
        doomed.child.signal(signal.SIGKILL)
        with contextlib.suppress(PeerFailed):
            await storing
    found = await reader("prefetch", seed=seed, num_pages=100)
    assert found["loaded"] == found["hits"]
    assert found["right"]
    assert await reader("backup", seed=seed, num_pages=100) == 100
    assert await reader("prefetch", seed=seed, num_pages=100) == {"hits": 100, "loaded": 100, "right": True}


async def test_what_the_command_line_gets_wrong_ends_the_start(host: Host) -> None:
    with pytest.raises(PeerFailed, match="url is missing"):
        await host.engine(extra={"url": ""})
    with pytest.raises(PeerFailed, match="page_unified, cannot be stored"):
        await host.engine("page_unified")


async def until_found(engine: Engine, seed: int, num_pages: int) -> None:
    while (found := await engine("prefetch", seed=seed, num_pages=num_pages))["loaded"] < num_pages:
        assert found["right"]
        await asyncio.sleep(0.1)
    assert found["right"]

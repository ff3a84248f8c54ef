"""Accounts: what a request took, what tenants used on each day, and who may see it."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from datetime import UTC, date, datetime
from pathlib import Path
from secrets import token_hex
from typing import Any

import aiohttp
import pytest

from moonpool.conductor.access.gate import Gate
from moonpool.conductor.accounts import ledger as ledgers
from moonpool.conductor.accounts.ledger import OTHERS, Ledger, days_back
from moonpool.conductor.accounts.page import nodes_row, tenant_rows
from moonpool.conductor.accounts.spent import Spent
from moonpool.kvstore.errors import IndexUnavailable
from moonpool.kvstore.index.redis.client import connect
from moonpool.kvstore.index.redis.kv_index import KVIndex
from moonpool.kvstore.index.redis.node_record import NodeRecord
from moonpool.protos import node_pb2
from moonpool.runtime.config.security_options import SecurityOptions
from moonpool.runtime.security import process
from moonpool.runtime.security.process import Security
from moonpool.runtime.security.roles import Caller
from tests.conductor.conftest import Api
from tests.conductor.core_nodes import ScriptedNode, obedient, request, running

DAY, NEXT = "2026-03-01", "2026-03-02"
NOON_S = 1_772_366_400.0  # of DAY


def token(busy_s: float, **parts: float) -> node_pb2.TokenOut:
    return node_pb2.TokenOut(busy_s=busy_s, **parts)


# ---------------------------------------------------------------------- one request


def test_what_was_computed_before_is_waste() -> None:
    spent = Spent(known_tokens=48)
    spent.prefilled(token(1.0), num_tokens=80, num_cached=16)
    assert spent.uses() == pytest.approx({"useful": 0.5, "recomputed": 0.5}), "32 of 64 had come before"
    spent.decoded(token(2.0, rejected_s=0.5, again_s=0.25))
    assert spent.uses() == pytest.approx({"useful": 1.75, "recomputed": 0.75, "speculation": 0.5})
    spent.prefilled(token(0.5), num_tokens=90, num_cached=80)
    assert spent.wasted_s["retry"] == pytest.approx(0.5)
    assert sum(spent.uses().values()) == pytest.approx(spent.total_s) == 3.5


def test_a_request_without_an_answer_was_for_nothing() -> None:
    spent = Spent()
    spent.prefilled(token(1.0), 8, 0)
    spent.ended_unanswered("rejected")
    assert spent.uses() == {"rejected": 1.0}


async def test_a_retry_costs_the_prompt_twice(url: str) -> None:
    async def dies(node: ScriptedNode, work: node_pb2.Work, index: int) -> None:
        if index == 3 and work.attempt == 0:
            await node.die()

    async with running(url, namespace=f"usage-{token_hex(4)}") as cluster:
        for name in ("prefill-0", "prefill-1", "decode-0", "decode-1"):
            node = await cluster.add(name, dies if name.startswith("decode") else obedient)
            node.spent = {"busy_s": 0.25}
        await cluster.generate(request(max_tokens=6))
        timeline = cluster.conductor.timeline("r")
        assert timeline is not None
        uses = timeline.to_dict()["events"][-1]["node_s"]
        assert uses["retry"] == pytest.approx(0.25)
        assert timeline.summary.node_s == pytest.approx(sum(uses.values()))
        assert timeline.summary.cost == pytest.approx(timeline.summary.node_s)
        today = datetime.now(UTC).date()
        (usage,) = await cluster.conductor.ledger.read(days_back(today, 1))
        assert usage.tenants[""]["retry"] == pytest.approx(0.25)
        assert usage.tenants[""]["output_tokens"] == 6


# ---------------------------------------------------------------------- days


@pytest.fixture
async def index(url: str) -> AsyncIterator[KVIndex]:
    redis = connect(url)
    yield KVIndex(redis, f"usage-{token_hex(4)}", timeout_s=30.0)  # longer than any pause of the machine
    await redis.aclose()


class Clock:
    now_s = NOON_S

    def __call__(self) -> float:
        return self.now_s


def ledger_of(index: KVIndex, clock: Clock, name: str = "c", records: Any = ()) -> Ledger:
    return Ledger(index, "tiny", name, lambda: records, clock)


def spent_of(seconds: float) -> Spent:
    spent = Spent()
    spent.decoded(token(seconds))
    return spent


async def test_conductors_add_up_and_days_are_apart(index: KVIndex) -> None:
    clock = Clock()
    one, other = ledger_of(index, clock, "a"), ledger_of(index, clock, "b")
    one.add("acme", spent_of(1.0), 10, 5)
    other.add("acme", spent_of(0.5), 20, 7)
    other.add("", spent_of(0.25), 1, 1)
    await other.flush()
    clock.now_s += 86_400
    one.add("acme", spent_of(4.0), 1, 1)
    later, first = await one.read([NEXT, DAY])
    assert first.tenants["acme"] == {
        "requests": 2, "prompt_tokens": 30, "output_tokens": 12, "decode_s": 1.5, "prefill_s": 0,
        "useful": 1.5,
    }  # fmt: skip
    assert first.tenants[""]["useful"] == 0.25
    assert later.tenants.keys() == {"acme"}
    (own,) = await other.read([DAY], "acme")
    assert own.tenants.keys() == {"acme"}, "a tenant sees itself alone"
    again = ledger_of(index, clock, "c")
    assert (await again.read([DAY]))[0].tenants == first.tenants, "it survives its conductors"
    (row,) = [row for row in tenant_rows(first, "tiny", 2.0) if row["tenant"] == "acme"]
    assert (row["cost"], row["tokens_per_unit"]) == (3.0, 4.0)


@pytest.mark.parametrize("arrives", [True, False])
async def test_a_lost_answer_adds_nothing_twice(
    index: KVIndex, monkeypatch: pytest.MonkeyPatch, arrives: bool
) -> None:
    ledger, run = ledger_of(index, Clock()), index.run

    async def lost(*call: Any) -> Any:
        if arrives:
            await run(*call)
        raise IndexUnavailable("usage", "its answer was lost")

    ledger.add("acme", spent_of(1.0), 1, 1)
    monkeypatch.setattr(index, "run", lost)
    for _ in range(2):
        with pytest.raises(IndexUnavailable):
            await ledger.flush()
        ledger.add("acme", spent_of(2.0), 1, 1)
    monkeypatch.undo()
    (usage,) = await ledger.read([DAY])
    assert usage.tenants["acme"]["useful"] == 5.0


async def test_a_day_has_a_bound(index: KVIndex, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledgers, "MAX_FIELDS", 12)
    ledger = ledger_of(index, Clock())
    for number in range(20):
        ledger.add(f"tenant {number}", spent_of(1.0), 1, 1)
    (usage,) = await ledger.read([DAY])
    assert OTHERS in usage.tenants
    assert len(usage.tenants) < 5
    assert sum(sums["useful"] for sums in usage.tenants.values()) == pytest.approx(20), "none is lost"


async def test_redis_names_no_tenant(index: KVIndex, url: str) -> None:
    ledger = ledger_of(index, Clock())
    ledger.add("secretive", spent_of(1.0), 1, 1)
    await ledger.flush()
    assert (
        b"secretive" not in str(await index.command("HGETALL", f"{{{index.namespace}}}:usage:{DAY}")).encode()
    )


def record(wall_s: float, busy_s: float, told_s: float, *, epoch_s: float, **health: Any) -> NodeRecord:
    work = {"wall_s": wall_s, "busy_s": busy_s, "told_s": told_s}
    return NodeRecord("n", int(epoch_s * 1e9), "both", host="h", extra={"work": work, "health": health})


async def test_a_nodes_day_begins_where_the_last_one_ended(index: KVIndex) -> None:
    clock, records = Clock(), [record(100, 10, 9, epoch_s=NOON_S - 100)]
    one, other = (ledger_of(index, clock, name, records) for name in "ab")
    one.add("", spent_of(9.0), 1, 1)
    await one.flush()
    (usage,) = await other.read([DAY])
    row = nodes_row(usage, "tiny", 0.5)
    assert row["seconds"] == {
        "wall": 100, "useful": 9, "wasted": {"abandoned": 1}, "idle": 90, "unsettled": pytest.approx(0)
    }  # fmt: skip
    assert (row["cost"], row["joules"]) == (50, {"gpus": "not available", "processors": "not available"})
    clock.now_s += 86_400
    records[0] = record(86_500, 20, 20, epoch_s=NOON_S - 100)
    newcomer = ledger_of(index, clock, "c", records)
    for ledger in (one, newcomer, other):
        await ledger.flush()
    usage, _ = await newcomer.read([NEXT, DAY])
    assert nodes_row(usage, "tiny", 1.0)["seconds"]["wall"] == 86_400


async def test_joules_are_counted_where_machines_tell(index: KVIndex) -> None:
    gpus = [{"energy_joules": 5.0}, {"energy_joules": 7.0}]
    records = [record(9, 1, 1, epoch_s=NOON_S - 9, gpus=gpus, energy_joules=30.0)]
    (usage,) = await ledger_of(index, Clock(), records=records).read([DAY])
    assert nodes_row(usage, "tiny", 1.0)["joules"] == {"gpus": 12.0, "processors": 30.0}


@pytest.mark.parametrize("work", [None, {}, {"wall_s": "x"}, {"wall_s": -1, "busy_s": 0, "told_s": 0}])
async def test_a_record_without_valid_totals_counts_nothing(index: KVIndex, work: Any) -> None:
    records = [NodeRecord("n", 1, "both", extra={"work": work})]
    (usage,) = await ledger_of(index, Clock(), records=records).read([DAY])
    assert not usage.nodes


# ---------------------------------------------------------------------- the page

KEYS = """
keys = ["sk-all"]
read_keys = ["sk-watch"]
[acme]
keys = ["sk-1"]
"""


def test_days_end_where_the_calendar_begins() -> None:
    assert days_back(date(2026, 3, 1), 2) == ["2026-03-01", "2026-02-28"]
    assert days_back(date(1, 1, 2), 7) == ["0001-01-02", "0001-01-01"]


async def test_a_tenants_key_sees_its_own_usage_only(api: Api, index: KVIndex, tmp_path: Path) -> None:
    before = process.current()
    process.use(Security(SecurityOptions(cluster_key="0123456789abcdef"), Caller("conductor", "c")))
    try:
        (tmp_path / "tenants.toml").write_text(KEYS)
        api.context.gate = Gate.load(str(tmp_path / "tenants.toml"))
        records = [record(9, 1, 1, epoch_s=time.time())]
        ledger = Ledger(index, "tiny", "c", lambda: records)
        api.core.ledger, api.core.price = ledger, 1.0  # type: ignore[attr-defined]
        for tenant in ("acme", "other"):
            ledger.add(tenant, spent_of(1.0), 1, 1)
        assert (await page(api, ""))[0] == 401
        assert [row["tenant"] for row in (await page(api, "sk-watch"))[1]["data"]] == ["acme", "other"]
        assert (await page(api, "sk-watch"))[1]["nodes"][0]["seconds"]["wall"] == 9
        own = (await page(api, "sk-1"))[1]
        assert [row["tenant"] for row in own["data"]] == ["acme"]
        assert "nodes" not in own
        assert "nodes" not in (await page(api, "sk-all"))[1]
        for wrong in ("day=yesterday", "days=0", "days=99", "days=x", "days=00000000199"):
            assert (await page(api, "sk-watch", wrong))[0] == 400
        long_ago = (await page(api, "sk-watch", "day=2020-01-01&days=3"))[1]
        assert long_ago["data"] == []
    finally:
        process.use(before)


async def page(api: Api, key: str, query: str = "") -> tuple[int, Any]:
    async with aiohttp.ClientSession() as http:
        headers = {"Authorization": f"Bearer {key}"}
        async with http.get(f"{api.url}/v1/usage?{query}", headers=headers) as answer:
            return answer.status, await answer.json()

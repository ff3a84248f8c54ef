"""A tenant's limits are divided among cells as its requests are."""

from __future__ import annotations

from pathlib import Path

import pytest

from moonpool.conductor.admission.limits import TokenBucket
from moonpool.conductor.admission.tenants import Tenant
from moonpool.conductor.api.errors import ApiError
from moonpool.conductor.cells.shares import SHARE_HEADER, TenantShares, limited
from tests.conductor.cell_servers import CellServer, routed

ACME = Tenant("acme", max_requests=8, tokens_per_minute=600)


def test_shares_follow_requests_and_sum_to_one() -> None:
    now_s = [0.0]
    shares = TenantShares(lambda: now_s[0])
    both = ("a", "b")
    assert shares.count(ACME, "a", both) == 1
    for _ in range(200):
        now_s[0] += 0.1
        three, one = [shares.count(ACME, cell, both) for cell in ("a", "a", "a", "b")][2:]
    assert three == pytest.approx(0.75, abs=0.02) and one == pytest.approx(0.25, abs=0.02)
    assert shares.count(ACME, "b", ("b",)) == 1, "the other cell gets none"
    now_s[0] += 600.0
    assert shares.count(ACME, "b", both) == pytest.approx(1.0), "it has left the other cell"
    assert shares.count(Tenant("free"), "a", both) == shares.count(Tenant("free"), "b", both) == 1


def test_a_cell_admits_its_part_and_at_least_one() -> None:
    assert limited(ACME, {}) is ACME
    half = limited(ACME, {SHARE_HEADER: "0.5"})
    assert (half.max_requests, half.tokens_per_minute) == (4, 300)
    least = limited(ACME, {SHARE_HEADER: "0.000001"})
    assert (least.max_requests, least.tokens_per_minute) == (1, 1)
    free = limited(Tenant("free"), {SHARE_HEADER: "0.5"})
    assert (free.max_requests, free.tokens_per_minute) == (0, 0), "no limit stays none"
    for wrong in ("0", "2", "x", "nan"):
        with pytest.raises(ApiError, match=SHARE_HEADER):
            limited(ACME, {SHARE_HEADER: wrong})


def test_a_minutes_tokens_are_not_gained_by_changing_shares() -> None:
    bucket = TokenBucket(600, 0.0)
    bucket.use(500, 0.0)
    for _ in range(10):
        bucket.resize(50, 0.0)
        bucket.resize(600, 0.0)
    bucket.use(50, 0.0)
    assert bucket.wait_s(0.0) == pytest.approx(0.1)
    bucket.resize(60, 0.0)
    assert bucket.wait_s(0.0) == pytest.approx(1.0)


async def test_a_router_tells_each_cell_its_part(tmp_path: Path) -> None:
    tenants = tmp_path / "tenants.toml"
    tenants.write_text('[acme]\nkeys = ["sk-acme"]\nmax_requests = 8\n[free]\nkeys = ["sk-free"]\n')
    async with routed(CellServer("a"), CellServer("b"), tenants=tenants) as front:
        for number in range(12):
            for key in ("acme", "free"):
                given = {"Authorization": f"Bearer sk-{key}", SHARE_HEADER: "0.9"}
                assert (await front.post({"prompt": f"{number} " * 400}, **given))[0] == 200
        told = {
            name: [
                float(sent.get(SHARE_HEADER, "1"))
                for sent in server.headers
                if sent["Authorization"] == "Bearer sk-acme"
            ]
            for name, server in front.servers.items()
        }
        last = sorted(found[-1] for found in told.values())
        assert sum(last) == pytest.approx(1.0, abs=0.3) and last[0] > 0
        free = [one for server in front.servers.values() for one in server.headers if "free" in str(one)]
        assert free and not any(SHARE_HEADER in one for one in free), "what a client sends is not passed on"


@pytest.mark.parametrize("drains", [False, True])
async def test_a_cell_gets_the_part_of_one_that_is_lost_or_drains(tmp_path: Path, drains: bool) -> None:
    tenants = tmp_path / "tenants.toml"
    tenants.write_text('[acme]\nkeys = ["sk-acme"]\nmax_requests = 8\n')
    async with routed(CellServer("a"), CellServer("b"), tenants=tenants) as front:
        body = {"prompt": "again " * 400}

        async def cell() -> str:
            status, answer, _ = await front.post(body, Authorization="Bearer sk-acme")
            assert status == 200
            return str(answer["cell"])

        [home] = {await cell() for _ in range(30)}
        if drains:
            front.servers[home].summary["ready"] = False
        else:
            await front.servers[home].stop()
        await front.until(home, usable=False)
        other = front.servers[await cell()]
        assert other.name != home
        assert SHARE_HEADER not in other.headers[-1], "all that the tenant may have"

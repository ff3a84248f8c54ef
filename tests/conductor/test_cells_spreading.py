"""A router has hot prefixes of a cell copied to the cell that their requests go to without it."""

from __future__ import annotations

from typing import Any

from moonpool.conductor.cells.prefixes import prefix_digests
from moonpool.conductor.cells.spreading import Spreading
from tests.conductor.cell_servers import CellServer, Front, routed


def body(number: int) -> dict[str, Any]:
    return {"model": "m", "prompt": f"{number} " * 400}


def offer(number: int, *regions: str) -> dict[str, Any]:
    digests = prefix_digests(body(number), "")
    name = f"sealed {number}"
    return {"id": name, "model": "m", "digests": digests, "regions": regions, "sealed": name}


async def home_of(front: Front, number: int) -> CellServer:
    return front.servers[(await front.post(body(number)))[1]["cell"]]


async def test_a_hot_prefix_waits_where_its_requests_go_without_their_cell() -> None:
    async with routed(CellServer("a"), CellServer("b"), CellServer("c")) as front:
        homes = [await home_of(front, number) for number in range(12)]
        assert len({one.name for one in homes}) == 3
        for number, home in enumerate(homes):
            home.offers.append(offer(number))
        spreading = Spreading(front.cells)
        for cell in front.cells.doors:
            expected = len(front.servers[cell.name].offers)
            assert await spreading.round(cell) == expected
            assert await spreading.round(cell) == 0, "nothing is offered twice"
        for number, home in enumerate(homes):
            assert f"sealed {number}" not in home.taken
        lost = homes[0]
        await lost.stop()
        for number, home in enumerate(homes):
            if home is lost:
                assert f"sealed {number}" in (await home_of(front, number)).taken


async def test_a_cell_that_drains_hands_its_prefixes_to_other_regions_at_last() -> None:
    eu, us = CellServer("eu-1", "eu"), CellServer("us-1", "us")
    async with routed(eu, us, region="eu") as front:
        eu.offers = [offer(1), offer(2, "eu")]
        cell, spreading = front.cells.cells["eu-1"], Spreading(front.cells)
        assert await spreading.round(cell) == 0, "a reserve stays in its region"
        eu.summary["ready"] = False
        await front.seen()
        assert await spreading.round(cell) == 1
        assert us.taken == ["sealed 1"], "what is confined goes nowhere else"
        us.summary["ready"] = False
        await front.seen()
        assert await Spreading(front.cells).round(cell) == 0

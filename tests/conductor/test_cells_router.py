"""A router over HTTP, in front of stand-ins for cells."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from moonpool.conductor.api.streams.resume import HANDED_OVER
from moonpool.conductor.cells.prefixes import prefix_digests
from moonpool.conductor.cells.watch import CellEntry, Cells
from moonpool.conductor.costs.regions import RegionLinks
from moonpool.runtime.errors import ConfigError
from tests.conductor.cell_servers import CellServer, Front, routed
from tests.conductor.conftest import Api

TENANTS = """
[acme]
keys = ["sk-acme"]
regions = ["eu"]
[far]
keys = ["sk-far"]
home_region = "us"
"""


def three() -> list[CellServer]:
    return [CellServer(name) for name in ("a", "b", "c")]


def prompt(number: int, **more: Any) -> dict[str, Any]:
    return {"model": "m", "prompt": f"{number} " * 400, **more}


async def cell_of(front: Front, body: dict[str, Any]) -> CellServer:
    status, answer, headers = await front.post(body)
    assert status == 200 and headers["x-moonpool-cell"] == answer["cell"]
    return front.servers[answer["cell"]]


async def test_requests_are_passed_on_as_they_are() -> None:
    async with routed(*three(), region="eu") as front:
        body = prompt(1, temperature=0.5, unknown=[1])
        status, answer, headers = await front.post(
            body,
            "/v1/chat/completions?x=1",
            **{"X-Request-Id": "mine", "Authorization": "Bearer sk", "X-Y": "z"},
        )
        assert (status, answer["path"]) == (200, "/v1/chat/completions?x=1")
        assert headers["x-request-id"] == "mine" and headers["X-Own"] == "1"
        server = front.servers[answer["cell"]]
        assert server.bodies == [body]
        [sent] = server.headers
        assert sent["Authorization"] == "Bearer sk" and sent["X-Y"] == "z"
        assert sent["x-request-id"] == f"{server.name}:mine" and sent["x-moonpool-region"] == "eu"
        async with front.client.get(f"{front.url}/v1/models") as models:
            assert models.status == 200
        async with front.client.post(f"{front.url}/v1/fleet/drain/x") as other:
            assert other.status == 404
        async with front.client.post(f"{front.url}/v1/completions", data=b"{") as wrong:
            assert wrong.status == 400


async def test_the_same_beginning_goes_to_the_same_cell_and_prompts_spread() -> None:
    async with routed(*three()) as front:
        homes = [await cell_of(front, prompt(number)) for number in range(30)]
        assert {server.name for server in homes} == {"a", "b", "c"}
        for number, home in enumerate(homes):
            again = prompt(number)
            again["prompt"] += "and more"
            assert await cell_of(front, again) is home


@pytest.mark.parametrize("status", [429, 503])
async def test_a_full_cell_is_passed_over_and_all_full_is_said(status: int) -> None:
    async with routed(*three()) as front:
        home = await cell_of(front, prompt(1))
        home.status = status
        assert await cell_of(front, prompt(1)) is not home
        for server in front.servers.values():
            server.status = status
        found, answer, headers = await front.post(prompt(1))
        assert (found, answer["error"]["code"]) == (status, home.name), "that of the first"
        assert headers["Retry-After"] == "7"
        home.status = 400
        assert (await front.post(prompt(1)))[0] == 400, "other errors are answers"


async def test_answers_of_full_cells_are_counted() -> None:
    servers = [CellServer(f"full-{number}") for number in range(3)]
    async with routed(*servers) as front:
        for server in servers:
            server.status = 429
        _, _, headers = await front.post(prompt(1))
        for server in servers:
            server.status = 404
        path = "/v1/requests/cmpl-full-0:abc-1/timeline"
        async with front.client.get(f"{front.url}{path}") as unknown:
            assert unknown.status == 404
        async with front.client.get(f"{front.url}/metrics") as answer:
            page = await answer.text()
        counted = {
            line
            for line in page.splitlines()
            if line.startswith('moonpool_router_requests_total{cell="full-')
        }
        first = headers["x-moonpool-cell"]
        assert counted == {
            f'moonpool_router_requests_total{{cell="{first}",status="429"}} 1.0',
            'moonpool_router_requests_total{cell="full-0",status="404"} 1.0',
        }, "once each, for the cell whose answer the client got"


async def test_a_loaded_cell_spills_over_and_a_draining_one_gets_nothing() -> None:
    async with routed(*three()) as front:
        home = await cell_of(front, prompt(1))
        home.summary["num_requests"] = 40  # ten a node; the others have none
        await front.seen()
        assert await cell_of(front, prompt(1)) is not home
        home.summary["num_requests"] = 0
        async with asyncio.timeout(30):  # its prefixes return a few at each look
            while await cell_of(front, prompt(1)) is not home:
                await front.seen()
        home.summary["ready"] = False
        await front.seen()
        assert await cell_of(front, prompt(1)) is not home
        home.summary |= {"ready": True, "num_nodes": 0}
        await front.seen()
        assert await cell_of(front, prompt(1)) is not home
        for server in front.servers.values():
            server.summary["ready"] = False
        await front.seen()
        status, answer, headers = await front.post(prompt(1))
        assert (status, answer["error"]["code"], headers["Retry-After"]) == (503, "no_cells", "1")
        async with front.client.get(f"{front.url}/readyz") as ready:
            assert ready.status == 503


async def test_a_lost_cell_is_passed_over_and_gets_its_prefixes_back() -> None:
    async with routed(*three()) as front:
        home = await cell_of(front, prompt(1))
        home.hold = asyncio.Event()
        home.begun.clear()
        waits = asyncio.create_task(front.post(prompt(1)))
        await home.begun.wait()
        await home.stop()
        status, answer, _ = await waits
        assert status == 200 and answer["cell"] != home.name, "nothing had come of its answer"
        assert await cell_of(front, prompt(1)) is not home
        await front.until(home.name, usable=False)


async def test_a_silent_cell_loses_what_waits_there() -> None:
    """As behind a partition: its connections stay open, and nothing comes."""
    async with routed(*three()) as front:
        home = await cell_of(front, prompt(1))
        home.hold = asyncio.Event()
        home.begun.clear()
        waits = asyncio.create_task(front.post(prompt(1)))
        await home.begun.wait()

        home.silent = True
        status, answer, _ = await waits
        assert status == 200 and answer["cell"] != home.name
        assert not front.cells.cells[home.name].usable


async def test_a_stream_that_breaks_says_so() -> None:
    async with routed(*three()) as front:
        home = await cell_of(front, prompt(1))
        home.breaks = True
        body = prompt(1, stream=True)
        async with front.client.post(f"{front.url}/v1/completions", json=body) as answer:
            text = await answer.text()
        assert answer.status == 200 and text.startswith("data: one\n\ndata: {")
        assert '"code":"cell_lost"' in text and f"cell {home.name} was lost" in text
        body["stream_options"] = {"resumable": True}
        async with front.client.post(f"{front.url}/v1/completions", json=body) as answer:
            assert await answer.text() == "data: one\n\n" + HANDED_OVER.decode()
        home.breaks = False
        async with front.client.post(f"{front.url}/v1/completions", json=body) as answer:
            assert await answer.text() == "data: one\n\ndata: [DONE]\n\n"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_goes_away_ends_its_request_in_the_cell(stream: bool) -> None:
    async with routed(*three()) as front:
        home = await cell_of(front, prompt(1))
        home.hold = asyncio.Event()
        home.begun.clear()
        async with aiohttp.ClientSession() as client:
            waits = asyncio.create_task(
                client.post(f"{front.url}/v1/completions", json=prompt(1, stream=stream))
            )
            await home.begun.wait()
            if stream:
                (await waits).close()
            else:
                waits.cancel()
            async with asyncio.timeout(30):
                await home.cancelled.wait()


async def test_what_continues_goes_where_it_was_made() -> None:
    async with routed(*three()) as front:
        for name, server in front.servers.items():
            body = prompt(1, previous_response_id=f"resp_{name}:abc-1")
            assert await cell_of(front, body) is server
            async with front.client.get(f"{front.url}/v1/requests/cmpl-{name}:abc-1/timeline") as timeline:
                assert (await timeline.json())["cell"] == name
        front.servers["a"].summary["ready"] = False
        await front.seen()
        for name in "bc":
            front.servers[name].status = 404
        status, answer, _ = await front.post(prompt(1, previous_response_id="resp_a:abc-1"))
        assert (status, answer["error"]["code"]) == (503, "no_cells"), "it may come back"
        # A stream of a lost cell ended there.
        front.servers["c"].status = 200
        assert await cell_of(front, prompt(1, previous_response_id="resp_a:abc-1")) is front.servers["c"]
        # A stream's id does not say where it began.
        front.servers["b"].status = 410
        found = [await front.post(prompt(number), **{"Last-Event-ID": "x:1-00000000"}) for number in range(8)]
        assert {(status, answer["cell"]) for status, answer, _ in found} == {(200, "c")}


async def test_what_ended_elsewhere_is_found_when_its_cell_is_back_and_only_then_looked_for() -> None:
    async with routed(*three()) as front:
        servers, body = front.servers, prompt(1, previous_response_id="resp_a:abc-1")
        servers["a"].status = servers["b"].status = 404
        assert await cell_of(front, body) is servers["c"]
        for given in ({}, {"Last-Event-ID": "x:1-00000000"}):
            servers["a"].status, servers["c"].status = 410, 404
            status, _, headers = await front.post(body, **given)
            assert (status, headers["x-moonpool-cell"]) == (410, "a"), "the cell that made it says why"
        servers["a"].status = 429
        asked = len(servers["b"].bodies) + len(servers["c"].bodies)
        status, _, headers = await front.post(body)
        assert (status, headers["x-moonpool-cell"]) == (429, "a")
        assert len(servers["b"].bodies) + len(servers["c"].bodies) == asked, "they do not have it"


async def test_conductors_of_a_cell_stand_in_for_each_other() -> None:
    servers = [CellServer("a"), CellServer("a"), CellServer("b")]
    servers[0].summary |= {"num_requests": 3, "num_conductors": 2}
    servers[1].summary |= {"num_requests": 4, "num_conductors": 2}
    async with routed(*servers) as front:
        cell = front.cells.cells["a"]
        await front.seen()
        assert (cell.num_requests, cell.num_nodes) == (7.0, 4.0)
        await servers[0].stop()
        await front.seen()
        async with asyncio.timeout(30):
            while cell.num_requests != 8.0:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        assert cell.usable, "twice what the other one tells"
        await servers[1].stop()
        await front.until("a", usable=False)
        assert (await cell_of(front, prompt(1))).name == "b"


async def test_confined_tenants_stay_and_others_go_home_first(tmp_path: Path) -> None:
    (tmp_path / "tenants.toml").write_text(TENANTS)
    servers = [CellServer(name, name[:2]) for name in ("eu1", "eu2", "us1", "us2", "ap1")]
    links = ("eu:us rtt_ms=80", "eu:ap rtt_ms=200", "us:ap rtt_ms=100")
    async with routed(*servers, tenants=tmp_path / "tenants.toml", region="eu", links=links) as front:

        async def regions(key: str, **headers: str) -> set[str]:
            found = [
                await front.post(prompt(number), Authorization=f"Bearer {key}", **headers)
                for number in range(12)
            ]
            return {answer["cell"][:2] if status == 200 else str(status) for status, answer, _ in found}

        assert await regions("sk-none") == {"401"}
        assert await regions("sk-acme") == {"eu"}
        assert await regions("sk-far") == {"us"}
        assert await regions("sk-far", **{"x-moonpool-region": "ap"}) == {"ap"}
        body = prompt(1, previous_response_id="resp_us1:abc-1")
        for server in servers[:2]:
            server.status = 404
        assert (await front.post(body, Authorization="Bearer sk-acme"))[0] == 503
        assert body not in front.servers["us1"].bodies
        for name in ("eu1", "eu2", "us1", "us2"):
            front.servers[name].status = 503
        assert await regions("sk-far") == {"ap"}
        assert await regions("sk-acme") == {"503"}
        for server in servers[:2]:
            await server.stop()
            await front.until(server.name, usable=False)
        asked = {server.name: len(server.bodies) for server in servers}
        assert await regions("sk-acme", **{"x-moonpool-region": "us"}) == {"503"}
        assert {server.name: len(server.bodies) for server in servers} == asked
        status, answer, _ = await front.post(prompt(1), Authorization="Bearer sk-acme")
        assert "tenant acme is confined to eu" in answer["error"]["message"]
        front.router._region = "us"
        status, answer, _ = await front.post(prompt(1), Authorization="Bearer sk-acme")
        assert (status, answer["error"]["code"]) == (503, "outside_regions")


async def test_the_cells_are_shown_and_counted() -> None:
    async with routed(*three()) as front:
        home = await cell_of(front, prompt(1))
        async with front.client.get(f"{front.url}/v1/cluster") as answer:
            shown = {one["name"]: one for one in (await answer.json())["cells"]}
        assert shown[home.name]["usable"] and shown[home.name]["conductors"][0]["url"] == home.url
        async with front.client.get(f"{front.url}/metrics") as answer:
            page = await answer.text()
        assert f'moonpool_router_requests_total{{cell="{home.name}",status="200"}}' in page
        front.router.leaving = True
        async with front.client.get(f"{front.url}/readyz") as ready:
            assert ready.status == 503
        front.router.is_draining = True
        assert (await front.post(prompt(1)))[1]["error"]["code"] == "draining"


def test_cells_are_read_from_texts() -> None:
    entry = CellEntry.parse("eu-1=http://a:8000/v1,https://b,region=eu")
    assert entry == CellEntry("eu-1", ("http://a:8000", "https://b"), "eu")
    assert CellEntry.parse(" x=http://a ") == CellEntry("x", ("http://a",))
    for wrong in ("x", "x=", "x=ftp://a", "x=http://a/b", "=http://a", "x y=http://a", "x=http://a region="):
        with pytest.raises(ConfigError, match=r"router\.cells"):
            CellEntry.parse(wrong)
    for entries in ([], [entry, entry]):
        with pytest.raises(ConfigError, match="at least one cell"):
            Cells(entries, "", RegionLinks())


async def test_a_conductor_tells_its_load_and_hot_prefixes(api: Api) -> None:
    async def told() -> Any:
        async with api.client.get(f"{api.url}/v1/cell") as answer:
            assert answer.status == 200
            return await answer.json()

    first = await told()
    assert first["ready"] and first["models"] == ["tiny"] and first["hot"] == []
    assert (first["num_conductors"], first["num_nodes"], first["num_requests"]) == (1, 0, 0)
    for _ in range(6):
        await api.complete(prompt="In the beginning")
    api.context.cell_summary = 0.0, b""  # older than any
    later = await told()
    # The same beginning has the same digest here and at a router.
    [digest] = prefix_digests({"model": "tiny", "prompt": "In the beginning"}, "")
    assert later["hot"][0][0] == digest and later["requests_per_s"] > 0

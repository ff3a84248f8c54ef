"""A stream goes on in another cell when its cell is lost: nothing twice, nothing left out."""

from __future__ import annotations

from typing import Any

import pytest
from aiohttp import web

from moonpool.conductor.api.streams.resume import HANDED_OVER
from tests.conductor.cell_servers import CellServer, Front, routed

NUM_EVENTS = 8
OPENING = b"data: opening\n\n"
WHOLE = OPENING + b"".join(b"data: %d\n\n" % number for number in range(NUM_EVENTS)) + b"data: [DONE]\n\n"
NO_NODES = b'data: {"error":{"message":"m","type":"service_unavailable_error","code":"no_nodes"}}\n\n'


class Carrying(CellServer):
    """Its streams carry their past, and go on after one that it is sent."""

    ends_after = NUM_EVENTS + 1  # events of a stream
    ending = b": at 99-0000"  # what it sends then, before its connection breaks
    last = b"data: [DONE]\n\n"
    refuses = 0  # the status of its answer to what was begun elsewhere

    async def _answer(self, http: web.Request) -> web.StreamResponse:
        body = await http.json()
        self.bodies.append(body)
        past = body.get("past")
        if past and self.refuses:
            return web.json_response({"error": {"code": "stream_differs"}}, status=self.refuses)
        assert http.headers["x-moonpool-past"] == "1"
        stream = web.StreamResponse(headers={"Content-Type": "text/event-stream", "x-moonpool-past": "1"})
        await stream.prepare(http)
        begun = int(past["at"].partition("-")[0]) if past else 0
        for number in range(begun, NUM_EVENTS):
            if number == self.ends_after:
                await stream.write(self.ending)
                if self.ending.endswith(b"\n\n"):
                    return stream
                assert http.transport is not None
                http.transport.abort()
                return stream
            opening = OPENING if number == 0 else b""
            kept = f": past {self.name} {self.name}{number}\n" if number == begun or number % 3 == 0 else ""
            await stream.write(opening + f": at {number + 1}-00000000\n{kept}data: {number}\n\n".encode())
        await stream.write(self.last)
        return stream


BODY: dict[str, Any] = {"model": "m", "prompt": "1 " * 400, "stream": True}


async def read(
    front: Front, number: int = 1, path: str = "/v1/completions", **more: str
) -> tuple[bytes, str]:
    """Events, and the cell that began them."""
    body = BODY | {"prompt": f"{number} " * 400} | more
    async with front.client.post(front.url + path, json=body) as answer:
        assert answer.status == 200 and "x-moonpool-past" not in answer.headers
        return await answer.read(), answer.headers["x-moonpool-cell"]


async def home_of(front: Front) -> Carrying:
    text, name = await read(front)
    assert text == WHOLE, "the past is not the client's"
    home = front.servers[name]
    assert isinstance(home, Carrying)
    return home


@pytest.mark.parametrize("ending", [b": at 99-0000", HANDED_OVER, NO_NODES, b"data: held back\n\n"])
@pytest.mark.parametrize("after", [0, 1, 4, 7])
async def test_a_stream_goes_on_elsewhere(after: int, ending: bytes) -> None:
    async with routed(Carrying("a"), Carrying("b"), Carrying("c")) as front:
        home = await home_of(front)
        home.ends_after, home.ending = after, ending
        assert await read(front) == (WHOLE, home.name)
        [other] = [one for one in front.servers.values() if one is not home and one.bodies]
        past = other.bodies[0].get("past")
        if not after:
            assert past is None, "nothing was sent: it begins anew"
        else:
            entries = [f"{home.name}{number}" for number in range(0, after, 3)]
            assert past == {"name": home.name, "at": f"{after}-00000000", "entries": entries}
            assert other.bodies[0] == {**BODY, "past": past}


@pytest.mark.parametrize("kind", [b"completed", b"incomplete"])
async def test_a_response_goes_on_though_only_its_cell_knows_the_one_before(kind: bytes) -> None:
    # It repeats the metadata of its request.
    metadata = b'{"metadata":{"type":"service_unavailable_error"}}'
    last = b"event: response." + kind + b'\ndata: {"response":' + metadata + b"}\n\n"
    servers = [Carrying(name) for name in "abc"]
    for server in servers:
        server.last = last
    async with routed(*servers) as front:
        servers[0].ends_after = 4
        text, cell = await read(front, 1, "/v1/responses", previous_response_id="resp_a:abc-1")
        assert (text, cell) == (WHOLE.replace(b"data: [DONE]\n\n", last), "a")
        assert servers[0].bodies[0]["previous_response_id"] == "resp_a:abc-1"


async def test_a_stream_survives_two_cells_and_not_three() -> None:
    async with routed(Carrying("a"), Carrying("b"), Carrying("c")) as front:
        home = await home_of(front)
        home.ends_after = 3
        await read(front)
        [second] = [one for one in front.servers.values() if one is not home and one.bodies]
        [third] = [one for one in front.servers.values() if not one.bodies]
        assert isinstance(second, Carrying) and isinstance(third, Carrying)
        second.ends_after = 5
        assert await read(front) == (WHOLE, home.name)
        assert third.bodies[0]["past"]["entries"] == [f"{second.name}3"], "of the cell that had it last"
        third.ends_after = 6
        text, _ = await read(front)
        assert text.startswith(WHOLE[: WHOLE.index(b"data: 6")]) and b"data: 6" not in text
        assert text.count(b'"code":"cell_lost"') == 1 and f"cell {home.name} was lost".encode() in text


async def test_a_cell_that_would_go_on_differently_does_not() -> None:
    async with routed(Carrying("a"), Carrying("b")) as front:
        home = await home_of(front)
        home.ends_after = 3
        for server in front.servers.values():
            assert isinstance(server, Carrying)
            server.refuses = 409
        text, _ = await read(front)
        assert text.startswith(WHOLE[: WHOLE.index(b"data: 3")] + b"data: {")
        assert b'"code":"cell_lost"' in text


async def test_a_cell_of_an_earlier_version_gets_no_second_beginning() -> None:
    async with routed(Carrying("a"), CellServer("b")) as front:
        number = 0
        while (await read(front, number))[1] != "a":
            number += 1
        home = front.servers["a"]
        assert isinstance(home, Carrying)
        home.ends_after = 3
        text, _ = await read(front, number)
        assert b"data: one" not in text and text.count(OPENING) == 1 and b'"code":"cell_lost"' in text

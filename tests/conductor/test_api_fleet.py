"""The administrative part of the API: who may change the fleet, and what is answered."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from moonpool.client import API_KEY_VARIABLE, Client
from moonpool.conductor.api.fleet_routes import drain
from moonpool.conductor.api.models.lanes import LANES, Lane, Lanes
from moonpool.conductor.fleet.errors import FleetUnchanged, NodeMissing, ProviderFailed
from moonpool.conductor.fleet.providers.provider import RUNNING, STOPPING
from moonpool.runtime.config.options import AuditOptions, SecurityOptions
from moonpool.runtime.observing.audit import audited
from moonpool.runtime.security import process
from moonpool.runtime.security.local_key import local_key
from moonpool.runtime.security.process import Security
from moonpool.runtime.security.roles import CONDUCTOR, NODE, OPERATOR, Caller
from tests.conductor.conftest import Api
from tests.conductor.test_fleet_admin import admin, running

KEY = "the key of this cluster, long enough"
SCALE, DRAIN = "/v1/fleet/scale/decode/3", "/v1/fleet/drain/decode-1"
SWITCH = "/v1/fleet/switch/decode-1/prefill"
SWITCH_MODEL = "/v1/fleet/switch/decode-1/model/tiny"
SWITCH_MODEL = "/v1/fleet/switch/decode-1/model/tiny"


@pytest.fixture
def secured() -> None:
    """This process, and so the API, is a conductor of a cluster that has a key."""
    process.use(Security(SecurityOptions(cluster_key=KEY), Caller(CONDUCTOR, "c")))


def signed(path: str, role: str = OPERATOR, key: str = KEY, method: str = "POST") -> dict[str, str]:
    token = Security(SecurityOptions(cluster_key=key), Caller(role, "x"), serves=False).token(
        f"{method} {path}"
    )
    return {"Authorization": f"Moonpool {token}"}


async def test_without_api_keys_the_fleet_is_changed_with_the_clusters_key_alone(
    api: Api, secured: None, tmp_path: Path
) -> None:
    strangers = (
        {},
        {"Authorization": "Bearer sk-1"},
        signed(SCALE, key="the key of another cluster, as long"),
        signed(SCALE, role=NODE),
        signed(DRAIN),  # of another call
        signed(SWITCH.replace("prefill", "both")),
    )
    with audited(AuditOptions(path=str(tmp_path)), "api"):
        for headers in strangers:
            status, answer = await api.post(SCALE, {}, headers=headers)
            assert status == 401, answer
        assert api.core.fleet.calls == []
        assert (await api.post(SCALE, {}, headers=signed(SCALE)))[0] == 200
        assert (await api.post(DRAIN, {}, headers=signed(DRAIN)))[0] == 200
        assert (await api.post(SWITCH, {}, headers=signed(SWITCH)))[0] == 200
        assert (await api.post(SWITCH_MODEL, {}, headers=signed(SWITCH_MODEL)))[0] == 200
        unknown = SWITCH_MODEL.replace("tiny", "tin")
        status, answer = await api.post(unknown, {}, headers=signed(unknown))
        assert (status, "the nearest is 'tiny'" in answer["error"]["message"]) == (404, True)
    assert api.core.fleet.calls == [
        ("scale", "decode", 3),
        ("drain", "decode-1"),
        ("switch", "decode-1", "prefill"),
        ("switch model", "decode-1", True),
    ]
    lines = [json.loads(line) for file in tmp_path.iterdir() for line in file.read_text().splitlines()]
    changes = [line for line in lines if line["event"] == "administrative"]
    assert [(line["what"], line["outcome"], line["who"]) for line in changes] == [
        (f"POST {SCALE}", "ok", "admin"),
        (f"POST {DRAIN}", "ok", "admin"),
        (f"POST {SWITCH}", "ok", "admin"),
        (f"POST {SWITCH_MODEL}", "ok", "admin"),
        (f"POST {unknown}", "404", "admin"),
    ]
    assert sum(line["event"] == "refused" for line in lines) == len(strangers)


async def test_a_page_of_another_site_does_not_change_the_fleet(api: Api) -> None:
    """Also where nothing is configured: a browser sends such a request without being asked."""
    process.use(Security(SecurityOptions(), Caller(CONDUCTOR, "c")))
    for headers in ({"Origin": "https://evil.example"}, {"Sec-Fetch-Site": "cross-site"}):
        assert (await api.post(SCALE, {}, headers=headers))[0] == 403
    assert api.core.fleet.calls == []
    assert (await api.post(SCALE, {}))[0] == 200


@pytest.mark.parametrize("count", ["0", "-1", "1e3", "1025", "x", "9999999999999999999", "0000000011025"])
async def test_a_count_out_of_range_is_refused(api: Api, secured: None, count: str) -> None:
    path = f"/v1/fleet/scale/decode/{count}"
    assert (await api.post(path, {}, headers=signed(path)))[0] == 400
    assert api.core.fleet.calls == []


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (NodeMissing("no such node"), 404),
        (FleetUnchanged("not so"), 409),
        (ProviderFailed("it is away"), 503),
    ],
)
async def test_what_went_wrong_is_told(api: Api, secured: None, error: Exception, status: int) -> None:
    api.core.fleet.error = error
    answered, answer = await api.post(DRAIN, {}, headers=signed(DRAIN))
    assert (answered, answer["error"]["message"]) == (status, str(error))


@pytest.mark.parametrize(
    "node", ["decode-b-0", "decode-b-0.1", "decode-b-1"], ids=["node", "replica", "starts"]
)
async def test_a_node_of_any_model_is_drained(node: str) -> None:
    """One that starts is known to the provider of its model alone."""
    drained: list[tuple[str, str]] = []

    def lane(model: str) -> Lane:
        async def drain(node_id: str) -> dict[str, Any]:
            if model != "b" or node_id not in ("decode-b-0", "decode-b-0.1", "decode-b-1"):
                raise NodeMissing(f"there is no node {node_id!r}")
            drained.append((model, node_id))
            return {}

        member = SimpleNamespace(node_id=f"decode-{model}-0.1", owner=f"decode-{model}-0")
        fleet = SimpleNamespace(drain=drain)
        conductor = cast(Any, SimpleNamespace(nodes={member.node_id: member}, fleet=fleet))
        context = cast(Any, SimpleNamespace(conductor=conductor))
        return Lane(model, conductor, lambda: context, loaded=context)

    lanes = Lanes([lane("a"), lane("b")])
    assert lanes.of_node("decode-b-0") is lanes.of_node("decode-b-0.1") is not lanes.first.conductor
    http = cast(Any, SimpleNamespace(app={LANES: lanes}, match_info={"node": node}))
    assert (await drain(http)).status == 200
    assert drained == [("b", node)]
    http.match_info["node"] = "decode-c-0"
    with pytest.raises(NodeMissing):
        await drain(http)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 (the server's tasks decide)
            await asyncio.sleep(0.01)


async def test_a_change_is_completed_when_its_caller_disconnects(
    api: Api, secured: None, caplog: pytest.LogCaptureFixture
) -> None:
    """A client's patience ends before the node has handed its prefixes on."""
    provider = running("decode-0", "decode-1")
    fleet, changes = admin(provider)
    asked, goes_on = asyncio.Event(), asyncio.Event()

    async def hand_on(node_id: str) -> None:
        asked.set()
        await goes_on.wait()

    fleet.before_stop = hand_on
    api.core.fleet = cast(Any, fleet)

    async def disconnect() -> None:
        calling = asyncio.create_task(api.post(DRAIN, {}, headers=signed(DRAIN)))
        await asked.wait()
        calling.cancel()
        server = api.server._runner.server
        assert server is not None
        await until(lambda: all(one.transport is None for one in server.connections))

    await disconnect()
    assert provider.nodes["decode-1"].state == RUNNING
    goes_on.set()
    await until(lambda: bool(changes))
    assert provider.nodes["decode-1"].state == STOPPING

    for event in (asked, goes_on):
        event.clear()
    provider.nodes |= running("decode-1").nodes
    await disconnect()
    provider.fails_at = 0
    with caplog.at_level(logging.WARNING):
        goes_on.set()
        await until(lambda: "the provider is away" in caplog.text)


async def test_a_key_that_was_given_signs_calls_to_other_machines(
    api: Api, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The key of this user's local clusters does not: it was not given for them."""
    monkeypatch.setattr(process, "_current", None)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    for name in (*process.ENVIRONMENT, API_KEY_VARIABLE):
        monkeypatch.delenv(name, raising=False)
    assert local_key()
    url = f"http://0.0.0.0:{api.server.port}"  # reaches this machine, and is no loopback address
    async with Client(url) as client:
        assert client._authorization("POST", url + SCALE) == {}
    monkeypatch.setenv("MOONPOOL_CLUSTER_KEY", KEY)
    async with Client(url) as client:
        header = client._authorization("POST", url + SCALE)["Authorization"]
        assert header.startswith("Moonpool operator ") and KEY not in header
        await client.scale("decode", 3)
    assert api.core.fleet.calls == [("scale", "decode", 3)]
    monkeypatch.delenv("MOONPOOL_CLUSTER_KEY")
    process.use_as_client(SecurityOptions(cluster_key=KEY))  # --set security.cluster_key
    async with Client(url) as client:
        assert (await client.fleet())["nodes"] == []
        assert client._authorization("POST", url + SCALE)

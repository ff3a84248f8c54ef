"""Who may ask the API for what."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import pytest

from moonpool.conductor.access import gate
from moonpool.conductor.access.gate import COOKIE, Gate
from moonpool.conductor.access.roles import OPEN, PERMITTED
from moonpool.conductor.access.sessions import Sessions
from moonpool.conductor.errors import RequestRejected
from moonpool.conductor.server import create_app
from moonpool.runtime.config.options import AuditOptions
from moonpool.runtime.config.security_options import SecurityOptions
from moonpool.runtime.observing import audit
from moonpool.runtime.security import process, tls
from moonpool.runtime.security.process import Security
from moonpool.runtime.security.roles import Caller
from tests.conductor.conftest import Api

PROMPT = {"model": "tiny", "prompt": "In the", "max_tokens": 2}
FILE = """
keys = ["sk-plain"]
read_keys = ["sk-watch"]
admin_keys = ["sk-ops"]
[acme]
keys = ["sk-1"]
read_keys = ["sk-page"]
[nightly]
keys = ["sk-2"]
class = "batch"
"""
KEYS = ("sk-plain", "sk-watch", "sk-ops", "sk-1", "sk-page", "sk-2")
OPTIONS = SecurityOptions(cluster_key="0123456789abcdef")


@pytest.fixture
def keyed(api: Api, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Api:
    monkeypatch.setattr(tls, "LOOK_AGAIN_S", 0.0)
    process.use(Security(OPTIONS, Caller("conductor", "c")))
    file = tmp_path / "tenants.toml"
    file.write_text(FILE)
    api.context.gate = Gate.load(str(file))
    return api


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


async def get(api: Api, path: str, **options: Any) -> tuple[int, Any]:
    async with api.client.get(api.url + path, allow_redirects=False, **options) as answer:
        is_json = answer.content_type == "application/json"
        return answer.status, await answer.json() if is_json else await answer.text()


async def sign_in(api: Api, key: str) -> dict[str, str]:
    """The headers that a browser sends afterwards."""
    async with api.client.post(
        f"{api.url}/sign-in", data={"key": key}, headers={"Origin": api.url}, allow_redirects=False
    ) as answer:
        assert (answer.status, answer.headers["Location"]) == (303, "/")
        return {"Cookie": f"{COOKIE}={answer.cookies[COOKIE].value}"}


# ---------------------------------------------------------------------- the table


def test_every_route_has_an_entry_and_every_entry_a_route(api: Api) -> None:
    routes = {
        f"{route.method} {route.resource.canonical}"
        for route in create_app(api.context).router.routes()
        if route.resource is not None and route.method != "HEAD"
    }
    assert routes - PERMITTED.keys() == set(), "give each an entry in conductor/access/roles.py"
    assert PERMITTED.keys() - routes == set()


def test_only_probes_and_the_sign_in_are_open() -> None:
    opened = {endpoint for endpoint, access in PERMITTED.items() if access is OPEN}
    assert opened == {"GET /healthz", "GET /readyz", "GET /sign-in", "POST /sign-in", "POST /sign-out"}


async def test_a_route_without_an_entry_is_refused_to_everybody(
    keyed: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        gate, "PERMITTED", {name: one for name, one in PERMITTED.items() if name != "GET /v1/models"}
    )
    assert (await get(keyed, "/v1/models"))[0] == 401
    assert (await get(keyed, "/v1/models", headers=bearer("sk-ops")))[0] == 403


@pytest.mark.parametrize("endpoint", sorted(PERMITTED))
async def test_an_endpoint_is_for_the_roles_of_the_table(keyed: Api, endpoint: str) -> None:
    method, _, route = endpoint.partition(" ")
    path = re.sub(r"\{\w+\}", "x", route)
    access = PERMITTED[endpoint]
    if access is OPEN or route == "/v1/live":
        return

    async def status(**options: Any) -> int:
        async with keyed.client.request(
            method, keyed.url + path, json={}, allow_redirects=False, **options
        ) as answer:
            return answer.status

    keyed.core.index_blocks = no_blocks  # type: ignore[attr-defined]
    refused = 303 if route == "/" else 401
    assert await status() == refused
    assert await status(headers=bearer("sk-9")) == refused
    for key in KEYS:
        principal = keyed.context.gate.keys.get(keyed.context.gate.keys.id_of(key))
        assert principal is not None
        fits = principal.role in access.roles and (access.tenants or principal.scope is None)
        assert (await status(headers=bearer(key)) not in (303, 401, 403)) == fits, key


async def no_blocks(node: str) -> Any:
    for block in ():
        yield block


async def test_what_does_not_exist_is_told_only_to_those_with_a_key(keyed: Api) -> None:
    assert (await get(keyed, "/v1/nothing"))[0] == 401
    assert (await get(keyed, "/v1/completions"))[0] == 401
    assert (await get(keyed, "/v1/nothing", headers=bearer("sk-1")))[0] == 404
    assert (await get(keyed, "/v1/completions", headers=bearer("sk-1")))[0] == 405


async def test_probes_say_nothing_that_tells(keyed: Api) -> None:
    keyed.core.degraded = ["node prefill-7 at 10.0.0.7 cannot be reached"]
    assert await get(keyed, "/healthz") == (200, {"status": "ok"})
    assert await get(keyed, "/readyz") == (200, {"ready": True, "status": "degraded"})
    _, told = await get(keyed, "/readyz", headers=bearer("sk-watch"))
    assert told["degraded"] == keyed.core.degraded


async def test_without_keys_everything_is_open(api: Api) -> None:
    for path in ("/", "/v1/cluster", "/metrics", "/v1/requests", "/static/dashboard.css"):
        assert (await get(api, path))[0] == 200
    assert await get(api, "/v1/session") == (200, {"role": "admin", "tenant": None, "signed_in": False})
    async with api.client.get(f"{api.url}/sign-in", allow_redirects=False) as answer:
        assert (answer.status, answer.headers["Location"]) == (303, "/")


# ---------------------------------------------------------------------- keys and tenants


@pytest.mark.parametrize("headers", [{}, bearer("sk-9"), {"Authorization": "sk-1"}])
async def test_without_a_key_nothing_is_asked_of_the_core(keyed: Api, headers: dict[str, str]) -> None:
    status, answer = await keyed.post("/v1/completions", PROMPT, headers=headers)
    assert status == 401
    assert answer["error"]["code"] == "invalid_api_key"
    assert "Authorization: Bearer" in answer["error"]["message"]
    assert not keyed.core.requests
    assert not keyed.context.recent.latest(10)


async def test_a_key_decides_the_tenant_its_salt_and_its_class(keyed: Api) -> None:
    for key, body in (
        ("sk-1", {}),
        ("sk-1", {"cache_salt": "x", "service_tier": "flex"}),
        ("sk-2", {}),
        ("sk-2", {"service_tier": "default"}),
        ("sk-plain", {}),
    ):
        status, _ = await keyed.post("/v1/completions", PROMPT | body, headers=bearer(key))
        assert status == 200
    asked = [(r.client.name, r.tenant, r.batch) for r in keyed.core.requests]
    assert asked == [
        ("acme", "4:acme/", False),
        ("acme", "4:acme/x", True),
        ("nightly", "7:nightly/", True),
        ("nightly", "7:nightly/", False),
        ("", "", False),
    ]
    tokens = keyed.registry.get_sample_value(
        "moonpool_tenant_requests_total", {"tenant": "acme", "status": "done"}
    )
    assert tokens == 2


async def test_a_rejected_request_counts_no_tokens(keyed: Api) -> None:
    keyed.core.script = lambda request: [RequestRejected("full", 1.0)]
    status, _ = await keyed.post("/v1/completions", PROMPT, headers=bearer("sk-1"))
    assert status == 429
    sample = keyed.registry.get_sample_value
    of_tenant = {"tenant": "acme", "status": "RequestRejected"}
    assert sample("moonpool_tenant_requests_total", of_tenant) == 1
    assert not sample("moonpool_tenant_tokens_total", {"tenant": "acme", "kind": "prompt"})


async def test_an_unknown_tier_is_a_wrong_field(api: Api) -> None:
    status, answer = await api.post("/v1/completions", PROMPT | {"service_tier": "gold"})
    assert (status, answer["error"]["param"]) == (400, "service_tier")


async def test_a_tenant_sees_its_own_requests_only(keyed: Api) -> None:
    ids = {}
    for key in ("sk-1", "sk-2", "sk-plain"):  # all with the same x-request-id
        headers = bearer(key) | {"x-request-id": "same"}
        status, answer = await keyed.post("/v1/completions", PROMPT | {"n": 2}, headers=headers)
        assert status == 200
        ids[key] = answer["id"]

    async def listed(key: str) -> set[str]:
        return {one["id"] for one in (await get(keyed, "/v1/requests", headers=bearer(key)))[1]["data"]}

    async def timeline(key: str, name: str) -> Any:
        status, answer = await get(keyed, f"/v1/requests/{name}/timeline", headers=bearer(key))
        return answer["api"]["id"] if status == 200 else answer["error"]["message"].replace(name, "ID")

    for key, own in ids.items():
        assert await listed(key) == {own}
        assert await timeline(key, own) == own
        assert await timeline(key, "same") == own
    assert await listed("sk-page") == {ids["sk-1"]}
    for key in ("sk-ops", "sk-watch"):
        assert await listed(key) == set(ids.values())
        assert [await timeline(key, one) for one in ids.values()] == list(ids.values())
    unknown = await timeline("sk-1", "cmpl-unknown")
    for other in (ids["sk-2"], f"{ids['sk-2']}-0", f"{ids['sk-2']}-1"):
        assert await timeline("sk-1", other) == unknown, "what another has sent is as unknown as the rest"


async def test_a_tenants_snapshot_has_nothing_of_others(keyed: Api) -> None:
    for key in ("sk-1", "sk-2"):
        await keyed.post("/v1/completions", PROMPT, headers=bearer(key))
    keyed.core.tenant_activity = lambda tenant: {"tokens": {"computed": 7}, "outcomes": {"new": 1}}  # type: ignore[attr-defined]
    async with keyed.client.get(f"{keyed.url}/v1/live", headers=bearer("sk-page")) as live:
        event = (await live.content.readuntil(b"\n\n")).decode()
    (record,) = keyed.context.recent.latest(9, "acme")
    assert record.id in event
    assert "nightly" not in event and keyed.context.recent.latest(9, "nightly")[0].id not in event
    assert "cluster" not in event and "metrics" not in event


async def test_keys_are_read_again_when_their_file_changes(
    keyed: Api, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def status(key: str) -> int:
        return (await get(keyed, "/v1/models", headers=bearer(key)))[0]

    file = tmp_path / "tenants.toml"
    assert (await status("sk-1"), await status("sk-new")) == (200, 401)
    file.write_text(FILE.replace("sk-1", "sk-new"))
    assert (await status("sk-1"), await status("sk-new")) == (401, 200)
    for wrong, why in (
        (FILE + "wieght = 2", "nightly.wieght: unknown"),
        ("[acme", "at end of document"),
        ("", "no tenant has a key"),
    ):
        file.write_text(wrong)
        assert (await status("sk-1"), await status("sk-new")) == (401, 200), "the former keys stay"
        assert f"the former content of {file} stays in use" in caplog.messages[-1]
        assert why in caplog.messages[-1]
    file.write_text(FILE)
    assert (await status("sk-1"), await status("sk-new")) == (200, 401)


async def test_a_stream_of_snapshots_ends_with_its_session_and_key(keyed: Api, tmp_path: Path) -> None:
    keyed.core.tenant_activity = lambda tenant: {}  # type: ignore[attr-defined]
    url, cookie = f"{keyed.url}/v1/live", await sign_in(keyed, "sk-page")
    async with (
        keyed.client.get(url, headers=cookie) as of_page,
        keyed.client.get(url, headers=bearer("sk-page")) as of_key,
    ):
        for each in (of_page, of_key):
            await each.content.readuntil(b"\n\n")
        keyed.context.gate.sessions = Sessions(b"another secret of the cluster---")
        await of_page.content.read()
        await of_key.content.readuntil(b"\n\n")
        (tmp_path / "tenants.toml").write_text(FILE.replace("sk-page", "sk-other"))
        await of_key.content.read()


# ---------------------------------------------------------------------- sessions


async def test_a_cookie_is_of_this_site_and_not_for_scripts(keyed: Api) -> None:
    headers = {"Origin": keyed.url, "X-Forwarded-Proto": "https"}
    async with keyed.client.post(
        f"{keyed.url}/sign-in", data={"key": "sk-watch"}, headers=headers, allow_redirects=False
    ) as answer:
        cookie = answer.cookies[COOKIE]
    assert (cookie["samesite"], cookie["httponly"], cookie["secure"], cookie["path"]) == (
        "Strict",
        True,
        True,
        "/",
    )
    assert 0 < int(cookie["max-age"]) <= 24 * 3600
    assert "sk-watch" not in cookie.value


async def test_a_session_reads_what_its_key_may(keyed: Api) -> None:
    session = await sign_in(keyed, "sk-watch")
    assert (await get(keyed, "/", headers=session))[0] == 200
    assert await get(keyed, "/v1/session", headers=session) == (
        200,
        {"role": "read", "tenant": None, "signed_in": True},
    )
    assert (await get(keyed, "/v1/index/n", headers=session))[0] == 403
    async with keyed.client.get(f"{keyed.url}/", allow_redirects=False) as answer:
        assert (answer.status, answer.headers["Location"]) == (303, "/sign-in")
    for cookie in ("x", session["Cookie"][len(COOKIE) + 1 : -4]):
        assert (await get(keyed, "/v1/cluster", headers={"Cookie": f"{COOKIE}={cookie}"}))[0] == 401


async def test_a_session_is_over_once_its_key_is_no_more(keyed: Api, tmp_path: Path) -> None:
    session = await sign_in(keyed, "sk-watch")
    (tmp_path / "tenants.toml").write_text(FILE.replace('"sk-watch"', '"sk-other"'))
    assert (await get(keyed, "/v1/cluster", headers=session))[0] == 401
    assert (await get(keyed, "/v1/cluster", headers=await sign_in(keyed, "sk-other")))[0] == 200


@pytest.mark.parametrize(("key", "status"), [("sk-9", 401), ("", 401), ("sk-1", 403)])
async def test_a_key_that_does_not_fit_signs_nobody_in(keyed: Api, key: str, status: int) -> None:
    async with keyed.client.post(
        f"{keyed.url}/sign-in", data={"key": key}, headers={"Origin": keyed.url}, allow_redirects=False
    ) as answer:
        assert (answer.status, COOKIE in answer.cookies) == (status, False)
        assert 'role="alert"' in await answer.text()


@pytest.mark.parametrize(
    "headers",
    [{}, {"Origin": "http://evil.example"}, {"Origin": "null"}, {"Origin": "http://["},
     {"Sec-Fetch-Site": "cross-site"},
     {"Sec-Fetch-Site": "same-site"}, {"Origin": "", "Sec-Fetch-Site": "none"}],
)  # fmt: skip
async def test_a_page_of_another_site_changes_nothing_with_a_session(
    keyed: Api, headers: dict[str, str]
) -> None:
    session = await sign_in(keyed, "sk-ops")
    status, answer = await keyed.post("/v1/completions", PROMPT, headers=session | headers)
    assert (status, answer["error"]["code"]) == (403, "forbidden")
    assert not keyed.core.requests
    for path in ("/sign-in", "/sign-out"):
        async with keyed.client.post(
            keyed.url + path, data={"key": "sk-ops"}, headers=session | headers, allow_redirects=False
        ) as refused:
            assert (refused.status, COOKIE in refused.cookies) == (403, False)
    own = session | {"Origin": keyed.url}
    assert (await keyed.post("/v1/completions", PROMPT, headers=own))[0] == 200
    async with keyed.client.post(f"{keyed.url}/sign-out", headers=own, allow_redirects=False) as out:
        assert (out.headers["Location"], out.cookies[COOKIE].value) == ("/sign-in", "")


# ---------------------------------------------------------------------- the cluster's own commands


async def test_a_command_with_the_clusters_key_may_do_everything_once(keyed: Api) -> None:
    def token(method: str, *, role: str = "operator", key: str = OPTIONS.cluster_key) -> dict[str, str]:
        security = Security(SecurityOptions(cluster_key=key), Caller(role, "me"), serves=False)
        return {"Authorization": f"Moonpool {security.token(method)}"}

    fits = token("GET /v1/cluster")
    assert (await get(keyed, "/v1/cluster", headers=fits))[0] == 200
    refused = {
        "was used before": fits,
        "for another method": token("GET /metrics"),
        "made with another cluster key": token("GET /v1/cluster", key="another-key-of-a-cluster"),
        "missing or unknown": token("GET /v1/cluster", role="node"),
        "malformed": {"Authorization": "Moonpool x"},
    }
    for why, headers in refused.items():
        status, answer = await get(keyed, "/v1/cluster", headers=headers)
        assert status == 401
        assert why in answer["error"]["message"]


@pytest.mark.parametrize(
    "given",
    [
        b"Bearer sk-\xff",
        b"Moonpool operator me\xff s 1 1 mac",
        b"Moonpool operator me s 1 1 \xff",
        b"Moonpool operator me s 1 " + b"9" * 400 + b" mac",
    ],
)
async def test_a_key_or_a_token_of_any_bytes_is_refused(
    keyed: Api, given: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", keyed.server.port)
    writer.write(b"GET /v1/cluster HTTP/1.1\r\nHost: a\r\nAuthorization: %s\r\n\r\n" % given)
    assert b" 401 " in await reader.readline()
    assert "unexpected" not in caplog.text
    writer.close()


async def test_refusals_and_sign_ins_have_audit_lines(keyed: Api, tmp_path: Path) -> None:
    with audit.audited(AuditOptions(path=str(tmp_path / "audit")), "c"):
        await get(keyed, "/v1/index/n")
        await get(keyed, "/v1/cluster", headers=bearer("sk-1"))
        await get(keyed, "/v1/cluster", headers=bearer("sk-ops"))
        await sign_in(keyed, "sk-page")
    text = (tmp_path / "audit" / "audit-c.jsonl").read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    assert [(one["event"], one.get("who"), one["what"]) for one in lines] == [
        ("refused", None, "GET /v1/index/n"),
        ("refused", "inference of acme", "GET /v1/cluster"),
        ("administrative", "read of acme", "POST /sign-in"),
    ]
    assert "sk-" not in text

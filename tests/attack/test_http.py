"""Attacks on the HTTP ports: the API, the dashboard and the pages of metrics."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
from collections.abc import AsyncIterator
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp
import psutil
import pytest

from moonpool.connectors.vllm.conductor_settings import index_of
from moonpool.runtime.config.options import IndexOptions, SecurityOptions
from moonpool.runtime.errors import ConfigError
from moonpool.runtime.observing.metrics_server import metrics_key
from moonpool.runtime.security.call_tokens import RoleKeys
from tests.attack.conftest import KEY, PROMPT, TENANTS, WATCH, Target, bearer
from tests.cluster.conftest import eventually

BODY = {"prompt": PROMPT, "max_tokens": 2}
WRONG = {"no key": {}, "a wrong key": {"Authorization": "Bearer sk-acme-012345678"}}
# Names of files in front of which some server fell.
PATHS = (
    "/static/../conductor.toml",
    "/static/..%2f..%2f..%2f..%2fetc/passwd",
    "/static/%2e%2e/%2e%2e/server.py",
    "/static//etc/passwd",
    "/static/..\\..\\server.py",
    "/static/style.css%00.js",
    "/v1/benchmarks/../../../../etc/passwd",
    "/v1/benchmarks/..%2f..%2fpyproject",
    "/v1/index/..%2f..%2fetc",
    "/v1/requests/..%2f..%2fetc/timeline",
    "/metrics/../../etc/passwd",
    "//etc/passwd",
    "/%2e%2e/%2e%2e/etc/passwd",
)


async def opened(target: Target, url: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    parts = urlsplit(url)
    return await asyncio.open_connection(
        parts.hostname, parts.port, ssl=target.trust if parts.scheme == "https" else None
    )


async def raw(target: Target, url: str, data: bytes, within_s: float = 60) -> bytes:
    """What the server at ``url`` says to these bytes until it hangs up, or its first 64 KiB."""
    reader, writer = await opened(target, url)
    try:
        writer.write(data)
        async with asyncio.timeout(within_s):
            return await reader.read(1 << 16)
    finally:
        writer.close()


@pytest.fixture
async def http(target: Target) -> AsyncIterator[aiohttp.ClientSession]:
    async with target.http() as session:
        yield session


@pytest.mark.parametrize("headers", WRONG.values(), ids=WRONG)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_without_a_key_nothing_is_computed(
    target: Target, http: aiohttp.ClientSession, path: str, headers: dict[str, str]
) -> None:
    async with http.post(path, json=BODY, headers=headers) as answer:
        assert answer.status == 401
        assert (await answer.json())["error"]["code"] == "invalid_api_key"
    await target.logged(event="refused", what=f"POST {path}", why="API key", origin="127.0.0.1")


@pytest.mark.parametrize("path", PATHS)
async def test_no_path_leads_out_of_the_pages(target: Target, path: str) -> None:
    urls = [target.cluster.url, *(child.ready["metrics_url"] for child in target.cluster.nodes)]
    for url in urls:
        head = f"Host: x\r\nAuthorization: Bearer {TENANTS['acme']}\r\nConnection: close"
        answer = await raw(target, url, f"GET {path} HTTP/1.1\r\n{head}\r\n\r\n".encode())
        assert b"root:" not in answer
        assert b"create_app" not in answer
        assert b"cluster_key" not in answer
        assert answer.startswith(b"HTTP/1."), answer[:100]


MALFORMED = {
    "not HTTP": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200) + b"\r\n\r\n",
    "two lengths": b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n"
    b"Content-Length: 50\r\n\r\nhello",
    "length and chunks": b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "a line break in a header": b"GET / HTTP/1.1\r\nHost: x\r\nx-request-id: a\n b\r\n\r\n",
    "a header of 1 MiB": b"GET /healthz HTTP/1.1\r\nHost: x\r\nx-a: " + b"a" * (1 << 20) + b"\r\n\r\n",
    "100,000 headers": b"GET /healthz HTTP/1.1\r\nHost: x\r\n" + b"a: b\r\n" * 100_000 + b"\r\n",
    "a path of 100 KiB": b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
}


@pytest.mark.parametrize("name", MALFORMED)
async def test_a_malformed_request_is_refused(target: Target, name: str) -> None:
    try:
        answer = await raw(target, target.cluster.url, MALFORMED[name])
    except ConnectionResetError:
        answer = b""
    assert not answer or answer.split()[1][:1] == b"4", answer[:200]
    for child in target.cluster.nodes:
        with contextlib.suppress(ConnectionResetError, BrokenPipeError):
            await raw(target, child.ready["metrics_url"], MALFORMED[name])
    await target.serves()


async def test_a_body_is_bounded_as_sent_and_as_unpacked(target: Target, http: aiohttp.ClientSession) -> None:
    large = json.dumps({"prompt": "a" * (9 << 20)}).encode()
    packed = gzip.compress(json.dumps({"prompt": "a" * (128 << 20)}).encode(), 1)
    conductor = psutil.Process(target.cluster.children["conductor"].pid)
    before = conductor.memory_info().rss
    for data, headers in ((large, {}), (packed, {"Content-Encoding": "gzip"})):
        with contextlib.suppress(aiohttp.ClientConnectionError):  # it may hang up before all was sent
            async with http.post("/v1/completions", data=data, headers=bearer("acme") | headers) as answer:
                assert answer.status in (400, 413, 415), await answer.text()
    assert conductor.memory_info().rss - before < 64 << 20
    await target.serves()


@pytest.mark.slow
async def test_slow_clients_keep_nobody_waiting(target: Target) -> None:
    """Slow-loris: requests whose headers and bodies never end, to every HTTP port."""
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"
    body = head + f"Authorization: Bearer {TENANTS['acme']}\r\n".encode() + b"Content-Length: 1000\r\n\r\n{"
    held: list[asyncio.StreamWriter] = []
    for url in (target.cluster.url, *(child.ready["metrics_url"] for child in target.cluster.nodes)):
        for number in range(150):
            _, writer = await opened(target, url)
            writer.write(head if number % 2 else body)
            held.append(writer)
    await target.serves()
    # Another host still reads the metrics; this one has its share of connections.
    key = {"Authorization": f"Bearer {metrics_key(RoleKeys(KEY).derived)}"}
    elsewhere = aiohttp.TCPConnector(local_addr=("127.0.0.2", 0))
    async with aiohttp.ClientSession(connector=elsewhere) as session:
        for child in target.cluster.nodes:
            async with session.get(child.ready["metrics_url"], headers=key) as answer:
                assert answer.status == 200
    for writer in held:
        writer.close()


WHOLE = ("/v1/cluster", "/metrics", "/v1/prometheus-targets", "/v1/index/prefill-0", "/v1/report")
PAGES = ("/", "/v1/live", "/v1/about", "/v1/requests", "/v1/models", "/openapi.json", "/static/dashboard.js")


@pytest.mark.parametrize("path", [*WHOLE, *PAGES])
async def test_every_page_needs_a_key(target: Target, http: aiohttp.ClientSession, path: str) -> None:
    for headers in WRONG.values():
        async with http.get(path, headers=headers, allow_redirects=False) as answer:
            assert answer.status in (303, 401), path
    if path in WHOLE:
        async with http.get(path, headers=bearer("acme")) as answer:
            assert answer.status == 403, path


async def test_where_redis_is_needs_a_key(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """What an engine's connector asks when its ``url`` is a conductor's."""
    if target.authority:
        monkeypatch.setenv("MOONPOOL_CA", str(target.authority / "ca.pem"))

    async def ask(api_key: str, cluster_key: str) -> IndexOptions:
        security = SecurityOptions(cluster_key=cluster_key)
        return await asyncio.to_thread(index_of, target.cluster.url, api_key, security, IndexOptions())

    for api_key, cluster_key in (("", ""), ("sk-guess-0123456789", ""), ("", "another cluster's key")):
        with pytest.raises(ConfigError, match="answered 401"):
            await ask(api_key, cluster_key)
    for api_key, cluster_key in ((WATCH, ""), ("", KEY)):
        assert (await ask(api_key, cluster_key)).redis_url.startswith("unix://")


async def test_another_tenants_requests_are_not_shown(target: Target, http: aiohttp.ClientSession) -> None:
    async with http.post("/v1/completions", json=BODY, headers=bearer("acme")) as answer:
        request_id = (await answer.json())["id"]
    for tenant, status in (("acme", 200), ("globex", 404)):
        url = f"/v1/requests/{request_id}/timeline"
        async with http.get(url, headers=bearer(tenant)) as answer:
            assert answer.status == status
        async with http.get("/v1/requests?limit=200", headers=bearer(tenant)) as answer:
            assert (request_id in await answer.text()) == (tenant == "acme")


async def test_a_page_of_another_site_uses_no_session(target: Target, http: aiohttp.ClientSession) -> None:
    foreign = {"Origin": "https://evil.test", "Sec-Fetch-Site": "cross-site"}
    for path in ("/sign-in", "/sign-out"):
        async with http.post(path, data={"key": WATCH}, headers=foreign, allow_redirects=False) as answer:
            assert answer.status == 403
            assert "Set-Cookie" not in answer.headers
    own = {"Sec-Fetch-Site": "same-origin"}
    async with http.post("/sign-in", data={"key": WATCH}, headers=own, allow_redirects=False) as answer:
        cookie = answer.headers["Set-Cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=Strict" in cookie
    session = cookie.partition(";")[0]
    async with http.get("/v1/cluster", headers={"Cookie": session}) as answer:
        assert answer.status == 200
    async with http.post("/v1/completions", json=BODY, headers={"Cookie": session} | foreign) as answer:
        assert answer.status == 403
    forged = session[:-4] + ("AAAA" if not session.endswith("AAAA") else "BBBB")
    async with http.get("/v1/cluster", headers={"Cookie": forged}) as answer:
        assert answer.status == 401
    await target.logged(event="administrative", what="sign-in", origin="127.0.0.1")


async def test_no_secret_and_no_text_is_in_the_audit(target: Target) -> None:
    """After all that was tried: keys, tokens and prompts are in none of the files."""
    await target.serves()
    folder = Path(target.cluster.config.audit.path)

    async def used() -> bool:
        return any("acme" in file.read_text() for file in folder.glob("usage-*.jsonl"))

    await eventually(used)
    for file in folder.glob("*.jsonl"):
        text = file.read_text()
        for secret in (*TENANTS.values(), WATCH, KEY, PROMPT.strip()):
            assert secret not in text, file


async def test_a_tenant_learns_nothing_of_another_from_its_answers(
    target: Target, http: aiohttp.ClientSession
) -> None:
    """The same long prompt by another tenant finds nothing cached."""
    body = {"prompt": [7 + i % 900 for i in range(200)], "max_tokens": 1}

    async def cached(tenant: str) -> int:
        async with http.post("/v1/completions", json=body, headers=bearer(tenant)) as answer:
            details = (await answer.json())["usage"]["prompt_tokens_details"] or {}
            return int(details.get("cached_tokens") or 0)

    await cached("acme")
    async with asyncio.timeout(60):
        while not await cached("acme"):  # noqa: ASYNC110 - its blocks are published soon
            await asyncio.sleep(0.05)
    assert await cached("globex") == 0

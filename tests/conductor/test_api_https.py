"""The API over HTTPS: its certificates change without an end of streams, and clients know what they trust."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import pytest

from moonpool.bench.serve.client.http_client import HttpClient, ServerUnreachable
from moonpool.client import Client, Reply
from moonpool.doctor.diagnosis import check_cluster
from moonpool.errors import ApiError
from moonpool.runtime.config.options import ConductorOptions, Config
from moonpool.runtime.config.security_options import SecurityOptions
from moonpool.runtime.errors import ConfigError
from moonpool.runtime.security import certificates, posture, process, tls
from moonpool.runtime.security.https import CA_VARIABLE
from moonpool.runtime.security.roles import Caller
from tests.conductor.conftest import Api, serving

ME = Caller("conductor", "c")


@pytest.fixture(autouse=True)
def identity(monkeypatch: pytest.MonkeyPatch) -> None:
    process.use(process.Security(SecurityOptions(), ME))
    monkeypatch.setattr(tls, "LOOK_AGAIN_S", 0.0)


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return with_authority(tmp_path / "certs", monkeypatch)


def with_authority(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A new authority that clients trust, and a certificate of the API."""
    for name in ("ca.pem", "ca.key"):
        (directory / name).unlink(missing_ok=True)
    ca = certificates.init(directory, days=1)
    certificates.issue(directory, ME, days=1, addresses=["127.0.0.1"])
    monkeypatch.setenv(CA_VARIABLE, str(ca))
    return directory


@asynccontextmanager
async def https(checkpoint: Path, directory: Path) -> AsyncIterator[Api]:
    cert = str(directory / "conductor-c.pem")
    options = ConductorOptions(port=0, cert=cert, key=cert.removesuffix(".pem") + ".key")
    async with serving(checkpoint, options) as api:
        api.url = f"https://127.0.0.1:{api.server.port}"
        assert api.server.scheme == "https"
        yield api


async def test_a_stream_goes_on_while_its_certificate_changes(
    checkpoint: Path, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with https(checkpoint, directory) as api:
        gate = asyncio.Event()
        api.core.script = lambda request: [*api.core.says("one"), gate, *api.core.says(" two")]
        reply = Reply()
        async with Client(api.url) as client, aclosing(client.complete("In the", reply)) as pieces:
            assert await anext(pieces)
            with_authority(directory, monkeypatch)
            with pytest.raises(ApiError, match="certificate"):
                # It trusts the former authority, and connects anew: its own connection is in use.
                await client.model()
            async with Client(api.url) as late:
                assert (await late.model())["id"] == "tiny"
            gate.set()
            async for _ in pieces:
                pass
        assert reply.text == "one two"


async def test_the_same_certificates_serve_the_api_and_the_cluster(checkpoint: Path, directory: Path) -> None:
    cert = directory / "conductor-c.pem"
    options = SecurityOptions(cert=str(cert), key=str(cert.with_suffix(".key")), ca=str(directory / "ca.pem"))
    process.use(process.Security(options, ME))
    async with serving(checkpoint, ConductorOptions(port=0)) as api:
        # No certificate is demanded of browsers.
        async with Client(f"https://127.0.0.1:{api.server.port}") as client:
            assert (await client.model())["id"] == "tiny"
        with pytest.raises(ApiError):
            async with Client(f"http://127.0.0.1:{api.server.port}") as plain:
                await plain.model()


async def test_the_certificate_of_the_api_is_watched_too(checkpoint: Path, directory: Path) -> None:
    async with https(checkpoint, directory):
        assert not posture.warnings(process.current())
        certificates.issue(directory, ME, days=0, addresses=["127.0.0.1"])
        (late,) = posture.warnings(process.current())
        assert "(conductor.cert) expired" in late


async def test_clients_trust_the_authority_they_are_given_and_no_other(
    checkpoint: Path, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with https(checkpoint, directory) as api:
        async with HttpClient(api.url) as bench:
            assert (await bench.get("/v1/models")).packets
        monkeypatch.delenv(CA_VARIABLE)
        async with Client(api.url) as client:
            with pytest.raises(ApiError, match=r"certificate.*--ca"):
                await client.model()
        async with HttpClient(api.url) as bench:
            with pytest.raises(ServerUnreachable, match="certificate"):
                await bench.get("/v1/models")
        (finding,) = await check_cluster(api.url, Config())
        assert "--ca" in finding.advice
        monkeypatch.setenv(CA_VARIABLE, "/none/ca.pem")
        with pytest.raises(ConfigError, match=r"/none/ca\.pem"):
            Client(api.url)


async def test_wrong_files_are_named(checkpoint: Path, directory: Path) -> None:
    with pytest.raises(ConfigError, match=r"conductor\.cert must be set together"):
        ConductorOptions(cert="c.pem")
    (directory / "conductor-c.key").write_text("no key")
    with pytest.raises(ConfigError, match=r"conductor-c\.key for HTTPS"):
        async with https(checkpoint, directory):
            pass

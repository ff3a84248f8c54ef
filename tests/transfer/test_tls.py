"""TLS between agents: authentication, encryption, changed and revoked certificates, and errors in time."""

from __future__ import annotations

import asyncio
import logging
import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from moonpool.runtime.config.options import Config, SecurityOptions, TransferOptions
from moonpool.runtime.errors import ConfigError
from moonpool.runtime.security import certificates, process, revocation, tls
from moonpool.runtime.security.roles import Caller
from moonpool.transfer import AccessDenied, DeadlineExceeded, PeerLost, Span, TransferAgent
from moonpool.transfer.connections import listener
from tests.transfer.conftest import StartPeer, with_certificates
from tests.transfer.faults import Proxy, again
from tests.transfer.peer_process import pattern, security_options

TCP = TransferOptions(transports=("tcp",))
NBYTES = 4 << 20


async def agent(directory: Path | None, role: str = "node", name: str = "n") -> TransferAgent:
    """With a certificate in ``directory``; None: without."""
    given = security_options(directory, name=f"{role}-{name}") if directory else SecurityOptions()
    process.use(process.Security(given, Caller(role, name)))
    return await TransferAgent.start(TCP, agent_id="here", epoch=1)


@pytest.mark.parametrize("ours", ["another authority's", "none"])
async def test_who_has_no_certificate_of_the_authority_stays_out(
    start_peer: StartPeer, tls_directory: Path, tmp_path: Path, ours: str
) -> None:
    theirs = start_peer("tcp", TLS_DIR=str(tls_directory))
    async with await agent(None if ours == "none" else with_certificates(tmp_path)) as intruder:
        with pytest.raises((PeerLost, DeadlineExceeded)):
            await intruder.connect(theirs.descriptor, deadline_s=5)
    async with await agent(tls_directory) as friend:
        await friend.connect(theirs.descriptor)


async def test_a_server_without_tls_is_refused(start_peer: StartPeer, tls_directory: Path) -> None:
    theirs = start_peer("tcp")
    async with await agent(tls_directory) as ours:
        with pytest.raises((PeerLost, DeadlineExceeded)):
            await ours.connect(theirs.descriptor, deadline_s=5)


async def test_nothing_goes_in_the_clear(start_peer: StartPeer, tls_directory: Path) -> None:
    theirs = start_peer("tcp", TLS_DIR=str(tls_directory))
    seen = bytearray()
    proxy = Proxy(theirs.descriptor.tcp_port, seen.extend)
    async with await agent(tls_directory) as here:
        peer = await here.connect(replace(theirs.descriptor, tcp_port=proxy.port))
        remote = (await theirs.do("allocate", nbytes=NBYTES, seed=1))["region"]
        ours = here.allocate(NBYTES, "ours")
        await peer.read([Span(ours.id, 0, NBYTES)], [Span(remote, 0, NBYTES)], deadline_s=10)
        peer.notify(b"a note in confidence")
        assert (await theirs.do("next_note"))["payload"] == "a note in confidence"
        assert np.array_equal(ours.array, pattern(NBYTES, 1))
        sample = ours.array[:64].tobytes()
    proxy.close()
    assert len(seen) > NBYTES
    assert b"a note in confidence" not in seen
    assert sample not in seen


async def test_a_stopped_and_a_killed_peer(start_peer: StartPeer, tls_directory: Path) -> None:
    theirs = start_peer("tcp", TLS_DIR=str(tls_directory))
    async with await agent(tls_directory) as here:
        peer = await here.connect(theirs.descriptor)
        remote = (await theirs.do("allocate", nbytes=NBYTES, seed=1))["region"]
        ours = here.allocate(NBYTES, "ours")
        spans = [Span(ours.id, 0, NBYTES)], [Span(remote, 0, NBYTES)]
        await peer.read(*spans, deadline_s=10)
        theirs.signal(signal.SIGSTOP)
        for move in (peer.read, peer.write):
            with pytest.raises(DeadlineExceeded):
                await move(*spans, deadline_s=0.2)
        ours.array[:] = 9
        theirs.signal(signal.SIGCONT)
        await peer.read([Span(ours.id, 0, 8)], [Span(remote, 0, 8)], deadline_s=10)
        assert (ours.array[8:] == 9).all()
        theirs.kill()
        with pytest.raises(PeerLost):
            await again(peer.read, *spans)


def test_bad_options_are_refused(tls_directory: Path) -> None:
    with pytest.raises(ConfigError, match="together"):
        SecurityOptions(cert="cert.pem")
    with pytest.raises(ConfigError, match="ucx"):
        Config(security=security_options(tls_directory), transfer=TransferOptions(transports=("ucx", "tcp")))


async def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"ca\.pem cannot be read"):
        await agent(tmp_path)


async def test_a_certificate_opens_no_other_role(tls_directory: Path) -> None:
    certificates.issue(tls_directory, Caller("client", "c"), days=1)
    certificates.issue(tls_directory, Caller("conductor", "c"), days=1)
    async with await agent(tls_directory) as server:
        async with await agent(tls_directory, "client", "c") as client:
            await client.connect(server.describe())
            client._security.me = Caller("node", "pretender")
            with pytest.raises(AccessDenied, match="our role"):
                async with await TransferAgent.start(TCP, agent_id="other", epoch=1) as other:
                    await other.connect(server.describe())
        async with await agent(tls_directory, "conductor", "c") as conductor:
            with pytest.raises(AccessDenied, match="our role"):
                await conductor.connect(server.describe())


async def test_changed_files_are_used_and_streams_go_on(
    tls_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tls, "LOOK_AGAIN_S", 0.0)
    async with await agent(tls_directory) as server, await agent(tls_directory) as client:
        theirs, ours = server.allocate(NBYTES, "theirs"), client.allocate(NBYTES, "ours")
        spans = [Span(ours.id, 0, NBYTES)], [Span(theirs.id, 0, NBYTES)]
        peer = await client.connect(server.describe())
        await peer.read(*spans, deadline_s=10)
        connected = client._security.tls
        # Another authority for both: only who reads the new files comes in.
        for name in ("ca.pem", "ca.key"):
            (tls_directory / name).unlink()
        with_certificates(tls_directory)
        async with await agent(tls_directory) as late:
            await late.connect(server.describe())
        assert client._security.tls is not connected
        await peer.read(*spans, deadline_s=10)


async def test_files_that_are_wrong_are_not_used(
    tls_directory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tls, "LOOK_AGAIN_S", 0.0)
    async with await agent(tls_directory) as server, await agent(tls_directory) as client:
        before = server._security.tls
        (tls_directory / "node-n.pem").write_text("half a certi")
        assert server._security.tls is before
        assert "node-n.pem, " in caplog.text and "stays in use" in caplog.text
        await client.connect(server.describe())


async def test_a_revoked_certificate_is_refused_by_both_sides(
    tls_directory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tls, "LOOK_AGAIN_S", 0.0)
    caplog.set_level(logging.DEBUG, "moonpool.transfer")
    for name in ("stolen", "good"):
        certificates.issue(tls_directory, Caller("node", name), days=1)
    async with await agent(tls_directory) as server, await agent(tls_directory, name="stolen") as thief:
        await thief.connect(server.describe())
        revocation.revoke(tls_directory, Caller("node", "stolen"), "key-compromise")
        async with await agent(tls_directory, name="stolen") as again_thief:
            with pytest.raises((PeerLost, DeadlineExceeded)):
                await again_thief.connect(server.describe(), deadline_s=60)
            async with asyncio.timeout(60):
                # It is said just after the client is refused.
                while "was revoked: key-compromise" not in caplog.text:  # noqa: ASYNC110
                    await asyncio.sleep(0.001)
            assert "node stolen" in caplog.text
            async with await agent(tls_directory, name="good") as good:
                await good.connect(server.describe())
                with pytest.raises((PeerLost, DeadlineExceeded), match="revoked: key-compromise"):
                    await good.connect(again_thief.describe(), deadline_s=60)


async def test_a_list_that_the_authority_did_not_sign_revokes_nothing(
    tls_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tls, "LOOK_AGAIN_S", 0.0)
    revocation.revoke(with_certificates(tmp_path), Caller("node", "n"), "superseded")
    async with await agent(tls_directory) as server:
        (tls_directory / "crl.pem").write_bytes((tmp_path / "crl.pem").read_bytes())
        assert server._security.tls is not None
        assert not server._security.tls.revoked
        assert "not signed by the authority" in caplog.text
    with pytest.raises(ConfigError, match="not signed by the authority"):
        await agent(tls_directory)


async def test_a_stranger_that_says_nothing_delays_nobody(
    tls_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener, "HANDSHAKE_S", 3600.0)  # it is not ended by that
    async with await agent(tls_directory) as server, await agent(tls_directory) as client:
        _, writer = await asyncio.open_connection("127.0.0.1", server.describe().tcp_port)
        await client.connect(server.describe(), deadline_s=60)
        writer.close()

"""TLS between agents: authentication, encryption, and errors in time."""

from __future__ import annotations

import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import trustme

from moonpool.runtime.config.options import TlsOptions, TransferOptions
from moonpool.runtime.errors import ConfigError
from moonpool.transfer import DeadlineExceeded, PeerLost, Span, TransferAgent
from tests.transfer.conftest import StartPeer, issue
from tests.transfer.faults import Proxy, again
from tests.transfer.peer_process import pattern

NBYTES = 4 << 20


def options(directory: Path | None) -> TransferOptions:
    files = [str(directory / f"{name}.pem") for name in ("cert", "key", "ca")] if directory else []
    return TransferOptions(transports=("tcp",), tls=TlsOptions(*files))


@pytest.mark.parametrize("ours", ["another authority's", "none"])
async def test_who_has_no_certificate_of_the_authority_stays_out(
    start_peer: StartPeer, tls_directory: Path, tmp_path: Path, ours: str
) -> None:
    theirs = start_peer("tcp", TLS_DIR=str(tls_directory))
    directory = None if ours == "none" else issue(trustme.CA(), tmp_path)
    async with await TransferAgent.start(options(directory), agent_id="intruder", epoch=1) as agent:
        with pytest.raises((PeerLost, DeadlineExceeded)):
            await agent.connect(theirs.descriptor, deadline_s=5)
    async with await TransferAgent.start(options(tls_directory), agent_id="here", epoch=1) as agent:
        await agent.connect(theirs.descriptor)


async def test_a_server_without_tls_is_refused(start_peer: StartPeer, tls_directory: Path) -> None:
    theirs = start_peer("tcp")
    async with await TransferAgent.start(options(tls_directory), agent_id="here", epoch=1) as agent:
        with pytest.raises((PeerLost, DeadlineExceeded)):
            await agent.connect(theirs.descriptor, deadline_s=5)


async def test_nothing_goes_in_the_clear(start_peer: StartPeer, tls_directory: Path) -> None:
    theirs = start_peer("tcp", TLS_DIR=str(tls_directory))
    seen = bytearray()
    proxy = Proxy(theirs.descriptor.tcp_port, seen.extend)
    async with await TransferAgent.start(options(tls_directory), agent_id="here", epoch=1) as agent:
        peer = await agent.connect(replace(theirs.descriptor, tcp_port=proxy.port))
        remote = (await theirs.do("allocate", nbytes=NBYTES, seed=1))["region"]
        ours = agent.allocate(NBYTES, "ours")
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
    async with await TransferAgent.start(options(tls_directory), agent_id="here", epoch=1) as agent:
        peer = await agent.connect(theirs.descriptor)
        remote = (await theirs.do("allocate", nbytes=NBYTES, seed=1))["region"]
        ours = agent.allocate(NBYTES, "ours")
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
        TlsOptions(cert="cert.pem")
    with pytest.raises(ConfigError, match="ucx"):
        replace(options(tls_directory), transports=("ucx", "tcp"))


async def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cert\.pem"):
        await TransferAgent.start(options(tmp_path), agent_id="here", epoch=1)

"""Agents to test with: one here, and one in another process that can be told, stopped and killed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from moonpool.runtime.config.options import TransferOptions
from moonpool.runtime.security import certificates
from moonpool.runtime.security.roles import Caller
from moonpool.transfer import AgentDescriptor, TransferAgent
from moonpool.transfer.native.compiled_copy import compiled_copy
from tests.forked import PipedProcess, start_module
from tests.processes import stop
from tests.transfer.cables import Cabled, obstacle

_MODULE = "tests.transfer.peer_process"


class RemotePeer:
    """The agent of ``peer_process.py``."""

    def __init__(
        self,
        transports: str,
        *,
        epoch: int = 1,
        port: int = 0,
        secret: str = "",
        forbid: bool = False,
        namespace: str = "",
        **environment: str,
    ) -> None:
        arguments = (transports, str(epoch), str(port), secret, "forbid" if forbid else "")
        self.process: PipedProcess | subprocess.Popen[bytes]
        if namespace:
            self.process = subprocess.Popen(
                ["ip", "netns", "exec", namespace, sys.executable, "-m", _MODULE, *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)} | environment,
            )
        else:
            self.process = start_module(_MODULE, *arguments, environment=os.environ | environment)
        assert self.process.stdout is not None
        self.descriptor = AgentDescriptor.unpack(self.process.stdout.readline().strip())

    async def do(self, command: str, **arguments: Any) -> dict[str, Any]:
        return await asyncio.to_thread(self._do, {"do": command, **arguments})

    def _do(self, command: dict[str, Any]) -> dict[str, Any]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(command).encode() + b"\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())  # type: ignore[no-any-return]

    def signal(self, number: int) -> None:
        if number == signal.SIGSTOP:
            stop(self.process.pid)
        else:
            self.process.send_signal(number)

    def kill(self) -> None:
        """As kill -9; returns when it is gone."""
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()


StartPeer = Callable[..., RemotePeer]


def with_certificates(directory: Path) -> Path:
    """``directory``, with an authority and a certificate of node ``n``."""
    certificates.init(directory, days=1)
    certificates.issue(directory, Caller("node", "n"), days=1)
    return directory


@pytest.fixture
def tls_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What ``peer_process.security_options`` takes."""
    return with_certificates(tmp_path_factory.mktemp("tls"))


@pytest.fixture
def fresh_compiled_copy() -> Iterator[None]:
    """Whether copies are compiled is found out anew, by what the environment says then, and afterwards."""
    compiled_copy.cache_clear()
    yield
    compiled_copy.cache_clear()


@pytest.fixture
def start_peer() -> Iterator[StartPeer]:
    """``start_peer(transports, ...)``: one of the test's own; killed in the end, whatever state it is in."""
    started: list[RemotePeer] = []

    def start(transports: str, **more: Any) -> RemotePeer:
        started.append(RemotePeer(transports, **more))
        return started[-1]

    yield start
    for peer in started:
        peer.kill()


@pytest.fixture(scope="session")
def shared_peer() -> Iterator[StartPeer]:
    """The same, but one for all tests that ask for the same; they must leave it in order."""
    started: dict[tuple[Any, ...], RemotePeer] = {}

    def start(transports: str, **more: Any) -> RemotePeer:
        key = (transports, *sorted(more.items()))
        if key not in started:
            started[key] = RemotePeer(transports, **more)
        return started[key]

    yield start
    for peer in started.values():
        peer.kill()


@pytest.fixture
def cabled() -> Iterator[Cabled]:
    """A network namespace behind two cables."""
    if reason := obstacle():
        pytest.skip(reason)
    there = Cabled()
    yield there
    there.close()


@pytest.fixture
async def agent() -> AsyncIterator[TransferAgent]:
    """An agent here that speaks everything."""
    async with await TransferAgent.start(TransferOptions(), agent_id="here", epoch=1) as agent:
        yield agent
        agent.regions.check_integrity()

"""An address where no Ray cluster answers is told at once, and the process ends when it is asked to."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc.aio
import pytest

from moonpool.conductor.fleet.errors import ProviderFailed
from moonpool.conductor.fleet.providers import ray as ray_provider
from moonpool.conductor.fleet.providers.ray import check_answers


@asynccontextmanager
async def silent() -> AsyncIterator[str]:
    """A server that takes connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


async def test_a_server_of_grpc_answers() -> None:
    server = grpc.aio.server()
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        await check_answers(f"ray://127.0.0.1:{port}")
        await check_answers(f"127.0.0.1:{port}")
    finally:
        await server.stop(None)


async def test_nobody_at_an_address_is_told_with_the_reason() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(ProviderFailed, match=rf"answers at ray://127\.0\.0\.1:{port}: .*refused.*Give the"):
        await check_answers(f"ray://127.0.0.1:{port}")


async def test_a_server_that_says_nothing_is_not_waited_for() -> None:
    async with silent() as address:
        with pytest.raises(ProviderFailed, match=f"no Ray cluster answers at {address}"):
            await check_answers(address, answer_s=0.2)


async def test_what_ray_finds_by_itself_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    await check_answers("auto")
    async with silent() as address:
        monkeypatch.setenv("RAY_ADDRESS", address)
        with pytest.raises(ProviderFailed, match=address):
            await check_answers("auto", answer_s=0.2)


async def test_a_call_that_was_given_up_keeps_nobody_waiting() -> None:
    goes_on = threading.Event()
    call = asyncio.create_task(ray_provider._in_thread(goes_on.wait))
    try:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await call
        assert all(one.daemon for one in threading.enumerate() if one.name == "call to Ray")
    finally:
        goes_on.set()
    assert await ray_provider._in_thread(lambda: 3) == 3
    with pytest.raises(KeyError):
        await ray_provider._in_thread(lambda: {}["nothing"])


async def begun(address: str) -> asyncio.subprocess.Process:
    command = [sys.executable, "-m", "moonpool", "up", "--on", f"ray://{address}", "--port", "0"]
    return await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )


@pytest.mark.slow
async def test_up_says_what_it_tries_and_fails() -> None:
    async with silent() as address:
        process = await begun(address)
        output, _ = await asyncio.wait_for(process.communicate(), 120)
    text = " ".join(output.decode().split())
    assert f"looking for the Ray cluster at ray://{address}" in text
    assert f"no Ray cluster answers at ray://{address}" in text
    assert process.returncode == 1
    assert "conductor is ready" not in text


@pytest.mark.slow
async def test_up_ends_when_asked_to_while_it_tries() -> None:
    async with silent() as address:
        process = await begun(address)
        assert process.stdout is not None
        async for line in process.stdout:
            if b"looking for the Ray cluster" in line:
                break
        os.kill(process.pid, signal.SIGINT)
        began_s = time.monotonic()
        await asyncio.wait_for(process.communicate(), 60)
        # Ray's own half a minute is over only after this.
        assert time.monotonic() - began_s < 20
    assert process.returncode == 130

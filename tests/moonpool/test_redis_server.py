"""The private Redis: a real server that ends with its parent."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import redis.asyncio

from moonpool.errors import RedisMissing
from moonpool.local import redis_server
from moonpool.local.redis_server import RedisBinary, RedisServer, find_redis
from moonpool.runtime.errors import ChildFailed

ROOT = Path(__file__).parents[2]

KEEPER = """
import asyncio, sys
from pathlib import Path
from moonpool.local.redis_server import RedisServer
async def main():
    async with RedisServer(Path(sys.argv[1])) as server:
        print(server.child.pid, flush=True)
        await asyncio.Event().wait()
asyncio.run(main())
"""


async def test_serves_until_stopped(tmp_path: Path) -> None:
    async with RedisServer(tmp_path) as server:
        async with redis.asyncio.Redis.from_url(server.url) as client:
            assert await client.eval("return 6 * 7", 0) == 42
        assert server.socket.stat().st_mode & 0o077 == 0
        pid = server.child.pid
        assert "redis-server" in psutil.Process(pid).name() or "valkey" in psutil.Process(pid).name()
    assert not psutil.pid_exists(pid)
    assert not list(tmp_path.glob("*.rdb"))
    await server.stop()  # idempotent


async def test_starts_again_after_a_crash(tmp_path: Path) -> None:
    async with RedisServer(tmp_path) as server:
        server.child.kill()
        assert await server.child.wait() == -9
        await server.start()
        async with redis.asyncio.Redis.from_url(server.url) as client:
            assert await client.ping()


async def test_a_server_that_cannot_start_says_why(tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.write_text("#!/bin/sh\necho no can do; exit 3\n")
    broken.chmod(0o755)
    with pytest.raises(ChildFailed, match=r"redis ended with code 3[^$]*no can do"):
        await RedisServer(tmp_path, RedisBinary(broken, "a test")).start()


def test_a_long_directory_is_refused() -> None:
    with pytest.raises(ValueError, match="too long"):
        RedisServer(Path("/tmp") / ("x" * 100))


def test_the_machines_own_server_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = tmp_path / "valkey-server"
    own.write_text("#!/bin/sh\n")
    own.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_redis() == RedisBinary(own, "PATH")


def test_no_server_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.setattr(redis_server, "find_spec", lambda name: None)
    with pytest.raises(RedisMissing, match="apt install redis-server"):
        find_redis()


def test_it_dies_with_a_killed_parent(tmp_path: Path) -> None:
    keeper = subprocess.Popen([sys.executable, "-c", KEEPER, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE)
    assert keeper.stdout is not None
    server = psutil.Process(int(keeper.stdout.readline()))
    keeper.kill()
    keeper.wait()
    deadline = time.monotonic() + 60
    while server.is_running() and server.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, f"redis-server {server.pid} outlived {os.getpid()}'s child"
        time.sleep(0.01)
    keeper.stdout.close()

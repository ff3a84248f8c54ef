"""Real vLLM servers whose surroundings fail: they serve on, the texts are right, nothing is left behind."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from moonpool.doctor.diagnosis import check_engine
from moonpool.runtime.security.local_key import local_key
from tests.connectors.conftest import BLOCK_SIZE, ROOT, Redis, VllmServer, hit_everything
from tests.connectors.small_engine import until
from tests.connectors.test_vllm import prompts
from tests.processes import stop

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


class Started:
    """Servers that end with the test."""

    def __init__(self, python: Path, redis: Redis, folder: Path, stack: ExitStack) -> None:
        self._python, self._redis, self._folder, self._stack = python, redis, folder, stack

    def server(self, name: str, *sets: str, block_size: int = BLOCK_SIZE) -> VllmServer:
        extra: dict[str, Any] = {
            "url": self._redis.url,
            "node_id": name,
            "set": ["store.host.capacity_nbytes=256MiB", *sets],
        }
        made = VllmServer(self._python, self._folder / f"{name}.log", extra, block_size=block_size)
        self._stack.callback(made.kill)
        made.start()
        return made


@pytest.fixture
def started(vllm_python: Path, redis: Redis, tmp_path: Path) -> Iterator[Started]:
    with ExitStack() as stack:
        yield Started(vllm_python, redis, tmp_path, stack)


def test_killed_with_loads_and_saves_under_way_and_restarted_on_its_disk(
    started: Started, tmp_path: Path
) -> None:
    sets = (f"store.ssd.path={tmp_path / 'ssd'}", "store.write_policy=write-through")
    server = started.server("killed", *sets)
    server.wait_ready()
    known, new = prompts(11, (700, 900, 1100)), prompts(12, (600,) * 4)
    expected = [server.complete(prompt) for prompt in known]
    hit_everything(server, known[0], expected[0])
    server.forget()
    with ThreadPoolExecutor(len(known) + len(new)) as threads:
        asked = [threads.submit(server.complete, prompt) for prompt in (*known, *new)]
        until(lambda: server.metric("vllm:num_requests_running") > 0)
        server.kill()
        assert any(each.exception() is not None for each in asked), "none was under way"
    server.start()
    server.wait_ready()
    for prompt, answer in zip(known, expected, strict=True):
        hit_everything(server, prompt, answer)


def test_aborts_while_loading_leak_nothing(started: Started) -> None:
    """The other engine is stopped, so that loads from it are under way when their requests are aborted. None
    has ended before: until one has, no engine computes faster than it would load."""
    first, second = started.server("source"), started.server("aborts", "transfer.deadline_s=3")
    for server in (first, second):
        server.wait_ready()
    many = prompts(14, (600,) * 4)
    expected = [first.complete(prompt) for prompt in many]
    for prompt, answer in zip(many, expected, strict=True):
        hit_everything(first, prompt, answer)
    stopped = [process.pid for process in first.processes()]
    for pid in stopped:
        stop(pid)
    try:
        for prompt in many[1:]:
            second.abort_soon(prompt)
            # The metric shows the one that was aborted for a while.
            until(lambda: second.metric("vllm:num_requests_waiting") == 0)
        until(lambda: second.metric("vllm:kv_cache_usage_perc") == 0)
        # The loads have failed, and requests that stay are computed: nothing is tried for ever.
        assert second.complete(many[1]).token_ids == expected[1].token_ids
    finally:
        for process in reversed(first.processes()):
            process.resume()
    hit_everything(second, many[2], expected[2])


def test_a_store_that_cannot_start(started: Started, tmp_path: Path) -> None:
    path = tmp_path / "ssd"
    path.write_text("a file, where a folder should be")
    server = started.server("no-store", f"store.ssd.path={path}")
    server.wait_ready()
    for prompt in prompts(15, (100,) * 5):
        assert server.complete(prompt).token_ids
    text = server.log_text()
    assert text.count("blocks were not kept") == 1, "once a minute"
    assert "the KV store of this engine failed; it is started again in 60 s" in text


def test_engines_of_other_block_sizes_share_nothing_and_the_doctor_says_why(started: Started) -> None:
    one, other = started.server("blocks-32"), started.server("blocks-64", block_size=64)
    for server in (one, other):
        server.wait_ready()
    [prompt] = prompts(16, (700,))
    expected = one.complete(prompt)
    hit_everything(one, prompt, expected)
    assert other.complete(prompt) == expected
    found = asyncio.run(check_engine(one.metrics_url()))
    [fact] = [finding.fact for finding in found if finding.what == "layouts"]
    assert "blocks-32 and blocks-64 share no blocks" in fact and "block_size 32 and 64" in fact
    # A salt that another tenant has not: the same tokens, and a miss that is explained.
    one.forget()
    salted = one.complete(prompt, cache_salt="of another tenant")
    assert (salted.token_ids, salted.num_cached) == (expected.token_ids, 0)
    found = asyncio.run(check_engine(one.metrics_url()))
    assert any("missed: salted" in finding.fact for finding in found)


def run(python: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    return subprocess.run(
        [python, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )


def test_salt_adapter_and_image_are_in_the_keys(vllm_python: Path) -> None:
    done = run(vllm_python, "tests/connectors/vllm_keys.py")
    assert done.returncode == 0, done.stderr
    keys = json.loads(done.stdout.splitlines()[-1])
    hints = {"pin_s": 5, "prefetch": True, "drop_from": 32, "drop_after": False}
    assert keys.pop("hints") == hints, "of vLLM's own envelope"
    assert keys.pop("plain again") == keys["plain"]
    every = [key for chain in keys.values() for key in chain]
    assert len(every) == 3 * 7 and len(set(every)) == len(every), "two requests share a block"


def test_an_unknown_version_of_vllm_is_refused(vllm_python: Path, redis: Redis) -> None:
    local_key()
    script = f"""
import types, vllm
vllm.__version__ = "0.99.1"
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from moonpool.connectors.vllm import MoonpoolConnector
transfer = types.SimpleNamespace(kv_connector_extra_config={{"url": {redis.url!r}}}, engine_id="0123456789")
config = types.SimpleNamespace(kv_transfer_config=transfer)
MoonpoolConnector(config, KVConnectorRole.SCHEDULER, None)
"""
    done = run(vllm_python, "-c", script)
    assert done.returncode and "vLLM 0.99.1 is not supported; these versions are: 0.32" in done.stderr

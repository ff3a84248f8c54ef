"""vLLM's OpenAI server: the peers ``vllm-cpu`` and ``vllm-cpu-eager``, in a Python environment of their own,
and ``vllm`` on a GPU, in ours."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import psutil

import moonpool
from moonpool.bench.harness.child import Child, started
from moonpool.bench.harness.peers import PeerFailed, peers_dir, python_of
from moonpool.bench.serve.client.http_client import HttpClient, ServerUnreachable
from moonpool.bench.serve.client.server import Server
from moonpool.bench.serve.peers.contestants import ServerContestant, TokenIds
from moonpool.local.vllm_command import free_port, vllm_command, vllm_environment

# It compiles first, which takes minutes on a busy machine.
_START_S = 900.0
# The longest prompt of the cases and its output, with room.
_MAX_MODEL_LEN = 4096
_GPU_MEMORY = 0.4


class VllmCpu(ServerContestant):
    """Paused during others' turns: its idle loops take a quarter of the machine from them."""

    def __init__(self, server: Server, child: Child) -> None:
        super().__init__(server)
        self._child = child
        child.signal(signal.SIGSTOP)

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """It runs during the block."""
        with self._child.turn():
            # It closes those that seem to have been idle for long, at any moment after a pause.
            self.server.http.drop_idle()
            await self.server.http.get("/health")
            yield

    async def forget(self) -> None:
        """Drop its cached blocks; what a connector keeps stays. It must run."""
        await self.server.http.post("/reset_prefix_cache", b"")

    def cpu_s(self) -> float:
        """Processor seconds of all its processes since their start."""
        own = psutil.Process(self._child.pid)
        times = [process.cpu_times() for process in (own, *own.children(recursive=True))]
        return float(sum(one.user + one.system for one in times))

    async def together(self, prompts: Sequence[TokenIds], output_tokens: int) -> float:
        async with self.turn():
            return await super().together(prompts, output_tokens)

    async def alone(self, prompt: TokenIds, output_tokens: int) -> float:
        async with self.turn():
            return await super().alone(prompt, output_tokens)

    async def first_token(self, prompt: TokenIds) -> float:
        async with self.turn():
            return await super().first_token(prompt)


@asynccontextmanager
async def vllm_server(
    model_dir: Path,
    peer: str,
    *,
    threads: int = 1,
    first_core: int = 0,
    name: str = "",
    store: Mapping[str, Any] | None = None,
    kv_gib: int = 2,
    arguments: Sequence[str] = (),
) -> AsyncIterator[VllmCpu]:
    """A running server, its threads on cores of their own. Raises ``PeerFailed``.

    name: in reports. store: settings of our KV connector; None: without it. arguments: further ones.
    """
    on_gpu, eager = peer == "vllm", peer.endswith("eager")
    port = free_port()
    given = ["--max-model-len", str(_MAX_MODEL_LEN), *(["--enforce-eager"] if eager else []), *arguments]
    if on_gpu:
        # Beside two nodes of ours, each with its weights.
        given += ["--gpu-memory-utilization", str(_GPU_MEMORY)]
    python = sys.executable if on_gpu else python_of("vllm-cpu")
    command = vllm_command(python, model_dir, port, name="peer", store=store, arguments=given)
    cores = sorted(os.sched_getaffinity(0))[first_core : first_core + threads]
    environment = vllm_environment(cores, peers_dir() / "vllm-cache", kv_gib=kv_gib)
    environment["VLLM_SERVER_DEV_MODE"] = "1"  # /reset_prefix_cache
    if not name:
        name = "vllm-cpu eager" if eager else peer
        if threads > 1 and not on_gpu:
            name += f" {threads} threads"
    async with AsyncExitStack() as stack:
        if store is not None:
            environment["PYTHONPATH"] = stack.enter_context(_own_package())
        running = started(name, command, environment=environment, paused=True, prints_ready=False)
        child = await stack.enter_async_context(running)
        http = await stack.enter_async_context(HttpClient(f"http://127.0.0.1:{port}"))
        try:
            async with asyncio.timeout(_START_S):
                await _wait_until_up(http, child)
        except TimeoutError as error:
            raise PeerFailed(f"{name} was not ready after {_START_S:.0f} s") from error
        yield VllmCpu(await Server.find(name, http), child)


@contextmanager
def _own_package() -> Iterator[str]:
    """A folder with this Moonpool and nothing else: what is beside it must not hide the peer's packages."""
    with tempfile.TemporaryDirectory(prefix="bench-vllm-") as folder:
        (Path(folder) / "moonpool").symlink_to(Path(moonpool.__file__).parent)
        yield folder


async def _wait_until_up(http: HttpClient, child: Child) -> None:
    while True:
        child.check_runs()
        try:
            await http.get("/health")
            return
        except ServerUnreachable:
            await asyncio.sleep(0.5)

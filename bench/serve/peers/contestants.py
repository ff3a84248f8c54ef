"""Systems that generate greedily: servers behind HTTP, and ``transformers`` in a process of its own."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from pathlib import Path

from moonpool.bench.harness.child import Child, served, started
from moonpool.bench.harness.peers import PeerFailed
from moonpool.bench.serve.client.answer import status_of
from moonpool.bench.serve.client.http_client import HttpClient, ServerUnreachable
from moonpool.bench.serve.client.server import Server
from moonpool.bench.serve.figures import output_rate

TokenIds = Sequence[int]
# ``transformers`` is measured in both: the better one counts.
DTYPES = ("float32", "bfloat16")


class ServerContestant:
    """A server, as its client sees it. ``together`` and ``alone`` generate exactly ``output_tokens`` greedy
    tokens for each prompt."""

    def __init__(self, server: Server) -> None:
        self.name = server.name
        self.server = server

    def turn(self) -> AbstractAsyncContextManager[None]:
        """It runs during the block."""
        return nullcontext()

    async def together(self, prompts: Sequence[TokenIds], output_tokens: int) -> float:
        """All prompts at once: generated tokens per second, prefill included."""
        async with self.turn():
            return output_rate(await self.server.ask_all(prompts, output_tokens))

    async def alone(self, prompt: TokenIds, output_tokens: int) -> float:
        """One prompt on an idle machine: seconds per token after the first."""
        async with self.turn():
            answer = await self.server.ask(prompt, output_tokens)
        assert len(answer.token_s) > 1, "a stream of one event has no time between tokens"
        return answer.tpot_s

    async def first_token(self, prompt: TokenIds) -> float:
        """One prompt on an idle machine: seconds to its first token."""
        async with self.turn():
            return (await self.server.ask(prompt, 1)).ttft_s


class PausedServer(ServerContestant):
    """A peer's server, stopped during others' turns: its idle loops would take a part of the machine."""

    def __init__(self, server: Server, child: Child) -> None:
        super().__init__(server)
        self._child = child
        child.signal(signal.SIGSTOP)

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        with self._child.turn():
            # It closes those that seem to have been idle for long, at any moment after a pause.
            self.server.http.drop_idle()
            await self.server.http.get("/health")
            yield


@asynccontextmanager
async def running_server(
    name: str, command: Sequence[str], port: int, ready_s: float, environment: Mapping[str, str]
) -> AsyncIterator[tuple[Server, Child]]:
    """A peer's server from when its ``/health`` is well. Raises ``PeerFailed``: not within ``ready_s``."""
    run = started(name, command, environment=environment, paused=True, prints_ready=False)
    async with run as child, HttpClient(f"http://127.0.0.1:{port}") as http:
        try:
            async with asyncio.timeout(ready_s):
                await _wait_until_well(http, child)
        except TimeoutError as error:
            raise PeerFailed(f"{name} was not ready after {ready_s:.0f} s") from error
        yield await Server.find(name, http), child


async def _wait_until_well(http: HttpClient, child: Child) -> None:
    while True:
        child.check_runs()
        try:
            if status_of(await http.get("/health")) == 200:  # 503: it loads
                return
        except ServerUnreachable:
            pass
        await asyncio.sleep(0.5)


class TransformersPeer:
    """``generate`` of ``transformers`` with one dtype, in a child that is idle during others' turns. Figures
    as of ``ServerContestant``."""

    def __init__(self, child: Child) -> None:
        self.name = child.name
        self._child = child

    async def together(self, prompts: Sequence[TokenIds], output_tokens: int) -> float:
        return len(prompts) * output_tokens / await self._generate(prompts, output_tokens)

    async def alone(self, prompt: TokenIds, output_tokens: int) -> float:
        first_s = await self._generate([prompt], 1)
        return (await self._generate([prompt], output_tokens) - first_s) / (output_tokens - 1)

    async def first_token(self, prompt: TokenIds) -> float:
        return await self._generate([prompt], 1)

    async def _generate(self, prompts: Sequence[TokenIds], output_tokens: int) -> float:
        prompts = [list(prompt) for prompt in prompts]
        return float(await self._child.call("generate", prompts=prompts, output_tokens=output_tokens))


Contestant = ServerContestant | TransformersPeer


@asynccontextmanager
async def transformers_peer(model_dir: Path, dtype: str, threads: int = 1) -> AsyncIterator[TransformersPeer]:
    """Raises ``PeerFailed``."""
    name, module = f"transformers {dtype}", "moonpool.bench.serve.peers.transformers_child"
    async with served(
        name, module, "Generator", model_dir=str(model_dir), dtype=dtype, threads=threads
    ) as child:
        yield TransformersPeer(child)

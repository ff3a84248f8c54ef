"""vLLM servers of one model on the same cores: alone, and with the KV connector."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moonpool.bench.harness.command import Run
from moonpool.bench.harness.services import redis
from moonpool.bench.serve.client.answer import Answer
from moonpool.bench.serve.client.server import RequestFailed
from moonpool.bench.serve.client.workload import Workload
from moonpool.bench.serve.peers.vllm import VllmCpu, vllm_server
from moonpool.engine.checkpoint.config import ModelConfig

ALONE = "vLLM alone"
CONNECTED = "with the connector"
PEER = "a peer engine"
# A server that is stopped during others' turns stays in the index.
_LEASE = "index.lease_ttl_s=120"


@dataclass
class Settings:
    """``model``: its name in the report. ``block_size``: tokens. The servers start when a case needs them."""

    model: str
    model_dir: Path
    threads: int
    block_size: int
    host_nbytes: int
    seed: int
    work: Workload
    eager: bool
    _redis_url: str = ""
    _kept: dict[str, tuple[AsyncExitStack, VllmCpu]] = field(default_factory=dict)

    @property
    def token_nbytes(self) -> int:
        """KV of one token."""
        config = ModelConfig.from_checkpoint(self.model_dir)
        return 2 * 2 * config.num_layers * config.num_kv_heads * config.head_dim

    async def kept(self, run: Run, *names: str) -> list[VllmCpu]:
        """Servers by name, which later parts use again; all but ``ALONE`` have the connector.

        Those that are missing start at the same time. Raises ``PeerFailed``.
        """

        async def keep(name: str, store: dict[str, Any] | None) -> None:
            end = await run.stack.enter_async_context(AsyncExitStack())
            self._kept[name] = end, await end.enter_async_context(self.server(run, name, store))

        missing = {name: await self.connected(run, name) for name in names if name not in self._kept}
        starts = (keep(name, None if name == ALONE else store) for name, store in missing.items())
        # All have started or failed before one's error ends the others.
        for error in await asyncio.gather(*starts, return_exceptions=True):
            if error is not None:
                raise error
        return [self._kept[name][1] for name in names]

    async def end(self, *names: str) -> None:
        """End these servers; nothing happens if they are not kept."""
        for name in names:
            if name in self._kept:
                await self._kept.pop(name)[0].aclose()

    async def connected(self, run: Run, name: str, sets: Sequence[str] = ()) -> dict[str, Any]:
        """Settings of the connector of an engine ``name``; a Redis runs until the benchmark ends."""
        if not self._redis_url:
            self._redis_url = await run.stack.enter_async_context(redis())
        host = f"store.host.capacity_nbytes={self.host_nbytes}"
        return {"url": self._redis_url, "node_id": name, "set": [host, _LEASE, *sets]}

    @asynccontextmanager
    async def server(
        self,
        run: Run,
        name: str,
        store: dict[str, Any] | None,
        arguments: Sequence[str] = (),
        *,
        half: int | None = None,
    ) -> AsyncIterator[VllmCpu]:
        """A server during the block, which is paused but in its turns. Raises ``PeerFailed``.

        half: 0 or 1: of the cores; None: all.
        """
        run.say(f"starting {name}")
        given = ["--block-size", str(self.block_size), *arguments]
        each = self.threads if half is None else max(1, self.threads // 2)
        running = vllm_server(
            self.model_dir,
            "vllm-cpu-eager" if self.eager else "vllm-cpu",
            threads=each,
            first_core=each if half else 0,
            name=name,
            store=store,
            kv_gib=1,
            arguments=given,
        )
        async with running as server:
            yield server


@asynccontextmanager
async def running(*servers: VllmCpu) -> AsyncIterator[None]:
    """They run during the block, all others are paused."""
    async with AsyncExitStack() as stack:
        for server in servers:
            await stack.enter_async_context(server.turn())
        yield


class NotFound(RequestFailed):
    """A prefix that had to be cached was computed, at least in part."""


def check_cached(answer: Answer, num_tokens: int, source: str) -> None:
    """Raises ``NotFound`` if the answer did not find exactly so many tokens of its prompt cached."""
    if answer.cached_tokens != num_tokens:
        raise NotFound(f"{source}: {answer.cached_tokens} tokens were cached, not {num_tokens}")

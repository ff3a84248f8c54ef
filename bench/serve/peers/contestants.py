"""Systems that generate greedily: servers behind HTTP, and ``transformers`` in a process of its own."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Protocol

from moonpool.bench.harness.child import Child, served
from moonpool.bench.serve.client.server import Server
from moonpool.bench.serve.figures import output_rate

TokenIds = Sequence[int]
# ``transformers`` is measured in both: the better one counts.
DTYPES = ("float32", "bfloat16")


class Contestant(Protocol):
    """``together`` and ``alone`` generate exactly ``output_tokens`` greedy tokens for each prompt."""

    @property
    def name(self) -> str: ...

    async def together(self, prompts: Sequence[TokenIds], output_tokens: int) -> float:
        """All prompts at once: generated tokens per second, prefill included."""
        ...

    async def alone(self, prompt: TokenIds, output_tokens: int) -> float:
        """One prompt on an idle machine: seconds per token after the first."""
        ...

    async def first_token(self, prompt: TokenIds) -> float:
        """One prompt on an idle machine: seconds to its first token."""
        ...


class ServerContestant:
    """A server, as its client sees it."""

    def __init__(self, server: Server) -> None:
        self.name = server.name
        self.server = server

    async def together(self, prompts: Sequence[TokenIds], output_tokens: int) -> float:
        return output_rate(await self.server.ask_all(prompts, output_tokens))

    async def alone(self, prompt: TokenIds, output_tokens: int) -> float:
        answer = await self.server.ask(prompt, output_tokens)
        assert len(answer.token_s) > 1, "a stream of one event has no time between tokens"
        return answer.tpot_s

    async def first_token(self, prompt: TokenIds) -> float:
        return (await self.server.ask(prompt, 1)).ttft_s


class TransformersPeer:
    """``generate`` of ``transformers`` with one dtype, in a child that is idle during others' turns."""

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


@asynccontextmanager
async def transformers_peer(model_dir: Path, dtype: str, threads: int = 1) -> AsyncIterator[TransformersPeer]:
    """Raises ``PeerFailed``."""
    name, module = f"transformers {dtype}", "moonpool.bench.serve.peers.transformers_child"
    async with served(
        name, module, "Generator", model_dir=str(model_dir), dtype=dtype, threads=threads
    ) as child:
        yield TransformersPeer(child)

"""Who can be compared: anything that generates greedily, whether behind HTTP or in a process of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from moonpool.bench.serve.client.server import Server
from moonpool.bench.serve.figures import gaps, output_rate

TokenIds = Sequence[int]


class Contestant(Protocol):
    """Both methods generate exactly ``output_tokens`` greedy tokens for each prompt."""

    name: str

    async def together(self, prompts: Sequence[TokenIds], output_tokens: int) -> float:
        """All prompts at once: generated tokens a second, prefill included."""
        ...

    async def alone(self, prompt: TokenIds, output_tokens: int) -> float:
        """One prompt on an idle machine: seconds a token after the first."""
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
        assert gaps(answer), "a stream of one event has no time between tokens"
        return answer.tpot_s

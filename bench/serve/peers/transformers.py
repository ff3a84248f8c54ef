"""The peer ``transformers``: its own ``generate``, in process of a child, the better of two dtypes."""

from __future__ import annotations

import asyncio
import json
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from moonpool.bench.harness.peer_environment import PeerFailed
from moonpool.bench.serve.contestant import TokenIds

DTYPES = ("float32", "bfloat16")


class TransformersPeer:
    """One dtype. The child is idle, blocked on its input, while others are measured."""

    def __init__(self, process: Process, dtype: str) -> None:
        self.name = f"transformers {dtype}"
        self._process = process

    @classmethod
    @asynccontextmanager
    async def started(cls, model_dir: Path, dtype: str, threads: int = 1) -> AsyncIterator[TransformersPeer]:
        module = "moonpool.bench.serve.peers.transformers_child"
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", module, str(model_dir), dtype, str(threads)),
            stdin=PIPE,
            stdout=PIPE,
            stderr=DEVNULL,
            limit=1 << 24,
        )
        peer = cls(process, dtype)
        try:
            await peer._answer()
            yield peer
        finally:
            assert process.stdin is not None
            process.stdin.close()
            await process.wait()

    async def together(self, prompts: Sequence[TokenIds], output_tokens: int) -> float:
        return len(prompts) * output_tokens / await self._generate(prompts, output_tokens)

    async def alone(self, prompt: TokenIds, output_tokens: int) -> float:
        first = await self._generate([prompt], 1)
        return (await self._generate([prompt], output_tokens) - first) / (output_tokens - 1)

    async def _generate(self, prompts: Sequence[TokenIds], output_tokens: int) -> float:
        """Seconds of one ``generate`` call."""
        assert self._process.stdin is not None
        question = {"prompts": [list(prompt) for prompt in prompts], "output_tokens": output_tokens}
        self._process.stdin.write(json.dumps(question).encode() + b"\n")
        return float((await self._answer())["seconds"])

    async def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = await self._process.stdout.readline()
        if not line:
            raise PeerFailed(
                f"{self.name}: the child ended with {await self._process.wait()}; is transformers installed "
                "(pip install -e '.[dev]')?"
            )
        answer: dict[str, Any] = json.loads(line)
        return answer

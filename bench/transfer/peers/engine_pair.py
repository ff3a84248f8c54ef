"""A peer's library in two processes of its own python, stopped while it is others' turn."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import tempfile
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from moonpool.bench.harness.peer_environment import PeerFailed, python_of
from moonpool.bench.transfer.batch_shape import Shape

ROOT = Path(__file__).parents[4]
_ANSWER_S = 60.0


@dataclass(frozen=True, slots=True)
class Library:
    """packages: of its environment; also: a command for what pip does not bring."""

    name: str
    packages: tuple[str, ...]
    also: str = ""


class _Child:
    def __init__(self, process: Process, name: str, log: Path) -> None:
        self._process = process
        self._name = name
        self._log = log
        self.clock = psutil.Process(process.pid)
        self.facts: dict[str, Any] = {}

    @classmethod
    @asynccontextmanager
    async def started(
        cls, library: Library, role: str, pool_nbytes: int, variant: str, environment: Mapping[str, str]
    ) -> AsyncIterator[_Child]:
        """Ended at the end, whatever state it is in. Raises PeerAbsent, PeerFailed."""
        python = python_of(library.name, library.packages, library.also)
        module = f"moonpool.bench.transfer.peers.{library.name}_child"
        with tempfile.NamedTemporaryFile(prefix=f"{library.name}-{role}-", suffix=".log") as log:
            process = await asyncio.create_subprocess_exec(
                *(str(python), "-m", module, role, str(pool_nbytes), variant),
                stdin=PIPE,
                stdout=PIPE,
                stderr=log,
                cwd=ROOT,
                env={**os.environ, **environment},
                limit=1 << 24,
            )
            child = cls(process, library.name, Path(log.name))
            try:
                child.facts = await child._answer()
                yield child
            finally:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await process.wait()

    async def ask(self, question: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(question).encode() + b"\n")
        return await self._answer()

    async def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        try:
            line = await asyncio.wait_for(self._process.stdout.readline(), _ANSWER_S)
        except TimeoutError:
            raise PeerFailed(f"{self._name} has not answered for {_ANSWER_S:.0f} s") from None
        if not line:
            said = self._log.read_text(errors="replace").strip().splitlines()[-4:]
            raise PeerFailed(f"{self._name} ended with {await self._process.wait()}: {' / '.join(said)}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def send(self, number: signal.Signals) -> None:
        # One that has ended is told of by its answer.
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)


class EnginePair:
    """A ``Contestant``."""

    def __init__(self, name: str, target: _Child, client: _Child, pool_nbytes: int) -> None:
        self.name = name
        self._target = target
        self._client = client
        self._pool_nbytes = pool_nbytes

    async def prepare(self, shape: Shape) -> None:
        here, there = (
            [
                [child.facts["address"] + offset for offset in spans.offset.tolist()]
                for spans in shape.spans(0, self._pool_nbytes, side)
            ]
            for side, child in enumerate((self._client, self._target))
        )
        what = {"direction": shape.direction, "nbytes": shape.block_nbytes, "here": here, "there": there}
        with self._turn():
            await self._client.ask({"prepare": what})

    async def move(self, seconds: float) -> list[float]:
        with self._turn():
            return list((await self._client.ask({"move": seconds}))["seconds"])

    def cpu_seconds(self) -> float:
        times = [child.clock.cpu_times() for child in (self._target, self._client)]
        return float(sum(time.user + time.system for time in times))

    @contextmanager
    def _turn(self) -> Iterator[None]:
        # Threads that poll would take a core from the others.
        for child in (self._target, self._client):
            child.send(signal.SIGCONT)
        try:
            yield
        finally:
            self.pause()

    def pause(self) -> None:
        for child in (self._client, self._target):
            child.send(signal.SIGSTOP)


@asynccontextmanager
async def engine_pair(
    library: Library, name: str, variants: tuple[str, str], environment: Mapping[str, str], pool_nbytes: int
) -> AsyncIterator[EnginePair]:
    """variants: of the target and of the client. Raises PeerAbsent, PeerFailed."""
    async with AsyncExitStack() as stack:
        target, client = [
            await stack.enter_async_context(_Child.started(library, role, pool_nbytes, variant, environment))
            for role, variant in zip(("target", "client"), variants, strict=True)
        ]
        await client.ask({"connect": target.facts["facts"]})
        pair = EnginePair(name, target, client, pool_nbytes)
        pair.pause()
        yield pair

"""Another store, in a process of its own python that stands still while it is others' turn."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import tempfile
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moonpool.bench.harness.peer_environment import PeerFailed, python_of
from moonpool.bench.store.block_set import Shape

ROOT = Path(__file__).parents[4]
_ANSWER_S = 120.0


@dataclass(frozen=True, slots=True)
class StoreLibrary:
    """packages: of its environment; also: a command for what pip does not bring. on_disk: its blocks go to
    disk, and it is compared with the tier there."""

    name: str
    environment: str
    packages: tuple[str, ...]
    on_disk: bool
    also: str = ""


LIBRARIES = {
    "lmcache": StoreLibrary("lmcache", "lmcache", ("lmcache==0.5.6", "torch==2.13.0+cpu"), on_disk=True),
    "mooncake": StoreLibrary(
        "mooncake",
        "mooncake",
        ("mooncake-transfer-engine-non-cuda==0.3.13.post1",),
        on_disk=False,
        also="apt install libibverbs1 librdmacm1",
    ),
}


class PeerStore:
    """Puts and gets blocks of one shape; ``name`` says of what."""

    def __init__(self, name: str, process: Process, log: Path) -> None:
        self.name = name
        self._process = process
        self._log = log

    @classmethod
    @asynccontextmanager
    async def started(
        cls, library: StoreLibrary, shape: Shape, directory: Path, threads: int
    ) -> AsyncIterator[PeerStore]:
        """Ended at the end. Raises PeerAbsent, PeerFailed."""
        python = python_of(library.environment, library.packages, library.also)
        module = f"moonpool.bench.store.peers.{library.name}_child"
        sizes = (str(shape.block_nbytes), str(shape.num_blocks), str(shape.batch), str(threads))
        with tempfile.NamedTemporaryFile(prefix=f"{library.name}-", suffix=".log") as log:
            process = await asyncio.create_subprocess_exec(
                *(str(python), "-m", module, str(directory), *sizes),
                stdin=PIPE,
                stdout=PIPE,
                stderr=log,
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": str(ROOT)},
                start_new_session=True,
            )
            peer = cls(library.name, process, Path(log.name))
            try:
                await peer._answer()
                peer._signal(signal.SIGSTOP)
                yield peer
            finally:
                with contextlib.suppress(ProcessLookupError):
                    peer._signal(signal.SIGCONT)
                    peer._signal(signal.SIGKILL)
                await process.wait()

    async def round(self, order: Sequence[int]) -> tuple[float, float]:
        """Seconds to put all blocks, and to get them in this order."""
        assert self._process.stdin is not None
        self._signal(signal.SIGCONT)
        try:
            self._process.stdin.write(json.dumps({"order": list(order)}).encode() + b"\n")
            answer = await self._answer()
        finally:
            self._signal(signal.SIGSTOP)
        return answer["put"], answer["get"]

    def _signal(self, number: int) -> None:
        os.killpg(self._process.pid, number)

    async def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        try:
            line = await asyncio.wait_for(self._process.stdout.readline(), _ANSWER_S)
        except TimeoutError:
            raise PeerFailed(f"{self.name} did not answer within {_ANSWER_S:.0f} s; {self._why()}") from None
        if not line:
            raise PeerFailed(f"{self.name} ended with {await self._process.wait()}; {self._why()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _why(self) -> str:
        lines = self._log.read_text(errors="replace").strip().splitlines() or ["none"]
        errors = [line for line in lines if "Error" in line]
        return f"its last words: {(errors or lines)[-1][:300]}"

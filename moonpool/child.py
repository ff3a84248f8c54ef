"""One process of the local cluster: started tied to us, its output in a log file, its end awaited."""

from __future__ import annotations

import asyncio
import json
import os
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from moonpool.errors import ChildFailed
from runtime.child import tied_command

_TAIL_NBYTES = 3000


class Child:
    """May be started again after it ended. ``ready`` holds what its ready line said, empty before."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        log: Path,
        *,
        environment: Mapping[str, str] | None = None,
        speaks: bool = False,
    ) -> None:
        """``speaks``: it prints a ready line on stdout; the rest of its output goes to the log."""
        self.name = name
        self.log = log
        self.ready: dict[str, Any] = {}
        self._command = list(command)
        self._environment = {**os.environ, **(environment or {})}
        self._speaks = speaks
        self._process: Process | None = None
        self._reader: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None, "not started"
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.returncode if self._process is not None else None

    async def start(self) -> None:
        self.ready = {}
        # In a session of its own: Ctrl-C in the terminal reaches only us, and we stop the others in order.
        with self.log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *tied_command(self._command),
                stdin=DEVNULL,
                stdout=PIPE if self._speaks else log,
                stderr=log,
                env=self._environment,
                start_new_session=True,
            )

    async def wait_ready(self, timeout_s: float) -> None:
        """Until the child has printed its ready line.

        Raises:
            ChildFailed: it ended before, or was silent for ``timeout_s``; it may still run.
        """
        process = self._process
        assert process is not None
        assert process.stdout is not None
        try:
            async with asyncio.timeout(timeout_s):
                async for line in process.stdout:
                    if line.startswith(b"{"):
                        self.ready = json.loads(line)
                        # Somebody must go on reading, or its next lines would block it.
                        self._reader = asyncio.create_task(self._copy_output(process.stdout))
                        return
                code = await process.wait()
        except TimeoutError:
            raise self.failure(f"was not ready within {timeout_s:.0f} s") from None
        raise self.failure(f"ended with code {code} before it was ready")

    async def _copy_output(self, stdout: asyncio.StreamReader) -> None:
        with self.log.open("ab", buffering=0) as log:
            while data := await stdout.read(1 << 16):
                log.write(data)

    async def wait(self) -> int:
        """Until it ends; its exit code, negative for a signal."""
        assert self._process is not None
        return await self._process.wait()

    async def stop(self, timeout_s: float) -> None:
        """SIGTERM, then SIGKILL after ``timeout_s``; returns when it is gone. Idempotent."""
        process = self._process
        if process is None or process.returncode is not None:
            return
        process.terminate()
        try:
            await asyncio.wait_for(process.wait(), timeout_s)
        except TimeoutError:
            self.kill()
            await process.wait()

    def kill(self) -> None:
        """SIGKILL, as a crash would look to the others. Nothing where it has ended."""
        if self._process is not None and self._process.returncode is None:
            self._process.kill()

    def failure(self, what: str) -> ChildFailed:
        """The error that says what happened to this child, with the end of its log."""
        text = self.log.read_bytes()[-_TAIL_NBYTES:].decode(errors="replace") if self.log.exists() else ""
        return ChildFailed(self.name, what, self.log, text)

"""Child processes that cannot outlive us."""

from __future__ import annotations

import asyncio
import json
import os
from asyncio.subprocess import PIPE
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from moonpool.runtime.errors import ChildFailed
from moonpool.runtime.service.spawn import Process, spawn

HEARS_LOADING = "MOONPOOL_HEARS_LOADING"
"""Set for a child whose parent asks to hear how far it has loaded."""
BEAT_S = "MOONPOOL_BEAT_S"
"""Set for a child whose parent asks to hear that often, in seconds, that it runs."""
_TAIL_NBYTES = 3000
# Of what a child prints, lines longer than this are no messages.
_MAX_MESSAGE_NBYTES = 1 << 20


class Child:
    """A process tied to us. May be started again after it ended. ``ready`` holds what its ready line said,
    empty before; ``num_heard`` counts what it said."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        log: Path | None,
        *,
        environment: Mapping[str, str] | None = None,
        speaks: bool = False,
        given: bytes = b"",
        on_message: Callable[[dict[str, Any]], None] = lambda message: None,
        on_loaded: Callable[[int, int], None] | None = None,
        beat_s: float = 0.0,
    ) -> None:
        """``log``: the file its output goes to; None: its stderr goes where ours goes.

        ``speaks``: it prints JSON lines on stdout, the first of which is its ready line; ``on_message`` hears
        those after it. ``on_loaded`` (bytes, of bytes): hears how far it is, before that and in later lives.
        ``given``: what it finds on its stdin. ``beat_s``: how often it is to say that it runs; 0: never.
        """
        self.name = name
        self.log = log
        self.environment = {**os.environ, **(environment or {})}
        self.environment[HEARS_LOADING] = "1" if on_loaded else ""
        self.environment[BEAT_S] = str(beat_s) if beat_s else ""
        self.ready: dict[str, Any] = {}
        self.num_heard = 0
        self._command = list(command)
        self._speaks = speaks
        self._given = given
        self._on_message = on_message
        self._on_loaded = on_loaded
        self._process: Process | None = None
        self._is_ready = asyncio.Event()
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
        self._is_ready.clear()
        log = self.log.open("ab") if self.log is not None else None
        try:
            self._process = process = await spawn(
                self._command,
                environment=self.environment,
                stdin=bool(self._given),
                stdout=PIPE if self._speaks else None if log is None else log.fileno(),
                stderr=None if log is None else log.fileno(),
            )
        finally:
            if log is not None:
                log.close()
        if process.stdin is not None:
            process.stdin.write(self._given)
            process.stdin.close()
        if process.stdout is not None:
            # Somebody must go on reading, or its next lines would block it.
            self._reader = asyncio.create_task(self._read(process.stdout), name=f"output of {self.name}")

    async def wait_ready(self, timeout_s: float | None = None) -> None:
        """Until the child has printed its ready line.

        Raises:
            ChildFailed: it ended before, or was silent for ``timeout_s``; it may still run.
        """
        assert self._reader is not None
        is_ready = asyncio.ensure_future(self._is_ready.wait())
        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.wait((is_ready, self._reader), return_when=asyncio.FIRST_COMPLETED)
                if self._is_ready.is_set():
                    return
                code = await self.wait()
        except TimeoutError:
            raise self.failure(f"was not ready within {timeout_s:.0f} s") from None
        finally:
            is_ready.cancel()
        raise self.failure(f"ended with code {code} before it was ready")

    async def _read(self, stdout: asyncio.StreamReader) -> None:
        rest = b""
        while data := await stdout.read(1 << 16):
            self.num_heard += 1
            *lines, rest = (rest + data).split(b"\n")
            if len(rest) > _MAX_MESSAGE_NBYTES:
                rest = b""
            if self.log is not None:
                with self.log.open("ab", buffering=0) as log:
                    log.write(data)
            for line in lines:
                if line.startswith(b"{"):
                    self._hear(line)

    def _hear(self, line: bytes) -> None:
        try:
            message = json.loads(line)
        except ValueError:
            return  # it prints other things too
        if "beat" in message:
            return
        if "loaded" in message:
            if self._on_loaded is not None:
                self._on_loaded(*message["loaded"])
        elif self._is_ready.is_set():
            self._on_message(message)
        else:
            self.ready = message
            self._is_ready.set()

    async def wait(self) -> int:
        """Until it ends; its exit code, negative for a signal."""
        assert self._process is not None
        return await self._process.wait()

    async def stop(self, timeout_s: float) -> None:
        """SIGTERM, then SIGKILL after ``timeout_s``; returns when it is gone. Idempotent."""
        if self._process is None or self._process.returncode is not None:
            return
        self.terminate()
        try:
            await asyncio.wait_for(self.wait(), timeout_s)
        except TimeoutError:
            self.kill()
            await self.wait()

    def terminate(self) -> None:
        """SIGTERM. Nothing where it has ended."""
        if self._process is not None and self._process.returncode is None:
            self._process.terminate()

    def kill(self) -> None:
        """SIGKILL, as a crash would look to the others. Nothing where it has ended."""
        if self._process is not None and self._process.returncode is None:
            self._process.kill()

    def failure(self, what: str) -> ChildFailed:
        """The error that says what happened to this child, with the end of its log."""
        if self.log is None:
            return ChildFailed(self.name, what)
        text = self.log.read_bytes()[-_TAIL_NBYTES:].decode(errors="replace") if self.log.exists() else ""
        return ChildFailed(self.name, what, self.log, text)

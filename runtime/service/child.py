"""Child processes that end with this process."""

from __future__ import annotations

import asyncio
import json
import logging
import os
from asyncio.subprocess import PIPE
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from moonpool.runtime.errors import ChildFailed
from moonpool.runtime.service.spawn import Process, spawn

_log = logging.getLogger(__name__)

REPORTS_LOADING = "MOONPOOL_REPORTS_LOADING"
"""Set for a child that should report the progress of loading."""
BEAT_S = "MOONPOOL_BEAT_S"
"""Interval in seconds of the heartbeats that a child should send."""
_TAIL_NBYTES = 3000
# Longer lines of output are not parsed as messages.
_MAX_MESSAGE_NBYTES = 1 << 20
_NOT_LOGGED = (b'{"loaded":', b'{"beat":')


class Child:
    """A process that ends with this one; it may be started again after its end.

    ``ready``: the content of its ready line, empty before. ``num_messages`` counts its reads of output.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        log: Path | None,
        *,
        environment: Mapping[str, str] | None = None,
        sends_json: bool = False,
        stdin: bytes = b"",
        on_message: Callable[[dict[str, Any]], None] = lambda message: None,
        on_loaded: Callable[[int, int], None] | None = None,
        beat_s: float = 0.0,
    ) -> None:
        """``log``: the file for its output; None: stderr is inherited.

        ``sends_json``: it prints JSON lines on stdout, first its ready line; ``on_message`` gets those after
        it. ``on_loaded`` (bytes, of bytes) gets the progress of loading. ``stdin``: content of its stdin.
        ``beat_s``: interval of its heartbeats; 0: none.
        """
        self.name = name
        self.log = log
        self.environment = {**os.environ, **(environment or {})}
        self.environment[REPORTS_LOADING] = "1" if on_loaded else ""
        self.environment[BEAT_S] = str(beat_s) if beat_s else ""
        self.ready: dict[str, Any] = {}
        self.num_messages = 0
        self._command = list(command)
        self._sends_json = sends_json
        self._stdin = stdin
        self._on_message = on_message
        self._on_loaded = on_loaded
        self._process: Process | None = None
        self._is_ready = asyncio.Event()
        self._reader: asyncio.Task[None] | None = None
        self._log_fails = False

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
                stdin=bool(self._stdin),
                stdout=PIPE if self._sends_json else None if log is None else log.fileno(),
                stderr=None if log is None else log.fileno(),
            )
        finally:
            if log is not None:
                log.close()
        if process.stdin is not None:
            process.stdin.write(self._stdin)
            process.stdin.close()
        if process.stdout is not None:
            # Read until its end, or a full pipe would block it.
            self._reader = asyncio.create_task(self._read(process.stdout), name=f"output of {self.name}")

    async def wait_ready(self, timeout_s: float | None = None) -> None:
        """Wait until the child has printed its ready line.

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
            self.num_messages += 1
            *lines, rest = (rest + data).split(b"\n")
            # Progress and heartbeats would push out of the log's end why a child failed.
            self._keep(b"".join(line + b"\n" for line in lines if not line.startswith(_NOT_LOGGED)))
            if len(rest) > _MAX_MESSAGE_NBYTES:
                self._keep(rest)
                rest = b""
            for line in lines:
                if line.startswith(b"{"):
                    self._on_line(line)
        self._keep(rest)

    def _keep(self, output: bytes) -> None:
        """Write it to the log. Where that fails it is lost: the child must not wait for a disk."""
        if self.log is None or not output:
            return
        try:
            with self.log.open("ab", buffering=0) as log:
                log.write(output)
            self._log_fails = False
        except OSError as error:
            if not self._log_fails:
                _log.error(
                    "the output of %s is lost: %s cannot be written: %s", self.name, self.log, error.strerror
                )
            self._log_fails = True

    def _on_line(self, line: bytes) -> None:
        try:
            message = json.loads(line)
        except ValueError:
            return  # other output
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
        """Wait for its end and return the exit code, negative for a signal."""
        assert self._process is not None
        return await self._process.wait()

    async def stop(self, timeout_s: float) -> None:
        """Send SIGTERM, then SIGKILL after ``timeout_s``; return when it has ended. Idempotent."""
        if self._process is None or self._process.returncode is not None:
            return
        self.terminate()
        try:
            await asyncio.wait_for(self.wait(), timeout_s)
        except TimeoutError:
            self.kill()
            await self.wait()

    def terminate(self) -> None:
        """Send SIGTERM; no effect after its end."""
        if self._process is not None and self._process.returncode is None:
            self._process.terminate()

    def kill(self) -> None:
        """Send SIGKILL; no effect after its end."""
        if self._process is not None and self._process.returncode is None:
            self._process.kill()

    def failure(self, what: str) -> ChildFailed:
        """A ChildFailed with this text and the end of the log."""
        if self.log is None:
            return ChildFailed(self.name, what)
        text = self.log.read_bytes()[-_TAIL_NBYTES:].decode(errors="replace") if self.log.exists() else ""
        return ChildFailed(self.name, what, self.log, text)

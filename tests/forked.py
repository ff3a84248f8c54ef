"""Processes for tests without an event loop, or in a thread; forked where that is possible."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from types import TracebackType
from typing import BinaryIO, Protocol, Self

from moonpool.runtime.service.fork_server import fork_server_for


class PipedProcess(Protocol):
    """What is used of ``subprocess.Popen``, its stdin and stdout being pipes of bytes."""

    @property
    def pid(self) -> int: ...

    stdin: BinaryIO
    stdout: BinaryIO

    def send_signal(self, number: int) -> None: ...
    def kill(self) -> None: ...
    def poll(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> int: ...
    def __enter__(self) -> Self: ...
    def __exit__(self, *_: object) -> None: ...


def start_module(
    module: str,
    *arguments: str,
    environment: Mapping[str, str] | None = None,
    stderr_with_stdout: bool = False,
    stderr: int = 2,
    forked: bool = True,
) -> PipedProcess:
    """``python -m module``, forked if the fork server has imported it. ``stderr``: a file descriptor."""
    environment = dict(os.environ if environment is None else environment)
    command = [sys.executable, "-m", module, *arguments]
    server = fork_server_for(command, environment) if forked else None
    if server is None:
        return subprocess.Popen(  # type: ignore[return-value]
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT if stderr_with_stdout else stderr,
            env=environment,
        )
    child_reads, we_write = os.pipe()
    we_read, child_writes = os.pipe()
    try:
        status = server.ask(
            command, environment, (child_reads, child_writes, child_writes if stderr_with_stdout else stderr)
        )
    finally:
        os.close(child_reads)
        os.close(child_writes)
    return ForkedPipes(status, os.fdopen(we_write, "wb"), os.fdopen(we_read, "rb"))


async def run_module(module: str, *arguments: str, stdin: bytes = b"") -> tuple[int, str]:
    """Exit code of ``python -m module``, and its output, stderr too. ``stdin``: as much as a pipe holds."""

    def run() -> tuple[int, str]:
        with start_module(module, *arguments, stderr_with_stdout=True) as process:
            process.stdin.write(stdin)
            process.stdin.close()
            output = process.stdout.read().decode()
            return process.wait(), output

    return await asyncio.to_thread(run)


class ForkedPipes:
    """A forked process; ends when this object is deleted."""

    def __init__(self, status: socket.socket, stdin: BinaryIO, stdout: BinaryIO) -> None:
        self.stdin = stdin
        self.stdout = stdout
        self.returncode: int | None = None
        self._status = status
        data, fds, _, _ = socket.recv_fds(status, 64, 1)
        assert data, "the fork server has ended"
        self.pid, self._pidfd = int(data), fds[0]

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            # It may have ended since: its exit code is on the way.
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def poll(self) -> int | None:
        return self._hear(0)

    def wait(self, timeout: float | None = None) -> int:
        code = self._hear(timeout)
        if code is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
        return code

    def _hear(self, timeout_s: float | None) -> int | None:
        if self.returncode is None and select.select([self._status], [], [], timeout_s)[0]:
            data = self._status.recv(64)
            self.returncode = int(data) if data else -signal.SIGKILL
            self._status.close()
            os.close(self._pidfd)
        return self.returncode

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stdin.close()
        self.stdout.close()
        self.wait()

"""The fork server: a process that has imported what others need, and forks them.

Importing torch and our own modules takes two seconds of processor time. A forked process has all of it at
once, and shares the memory. It may ask the same server for processes of its own, which end with it.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence

from moonpool.runtime.service import fork_server_main
from moonpool.runtime.service.fork_server_main import Request, Served

# Read by the interpreter, a library or one of our modules when it is loaded. A process for which one of these
# differs is not forked.
_READ_AT_START = (
    *("PYTHON", "LD_", "MALLOC_", "XDG_CACHE_HOME", "CXX"),
    *("OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "CUDA_", "NVIDIA_", "TRITON_", "MOONPOOL_KERNELS"),
)
# Nodes and ranks set their number of threads themselves.
_SET_LATER = "OMP_NUM_THREADS"
SERVER_ENVIRONMENT = {
    # Idle OpenMP threads that spin take the cores from the other processes of this machine.
    "OMP_WAIT_POLICY": "PASSIVE",
    "OMP_NUM_THREADS": "1",
    # numpy starts its threads when it is imported, and a process with threads must not fork.
    "OPENBLAS_NUM_THREADS": "1",
    # torch then counts GPUs without making the CUDA driver ready, which does not survive a fork.
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
}
_MAIN = "import sys; from moonpool.runtime.service.fork_server_main import main; "


class ForkServer:
    """Forks processes that run modules of this package. May be used from any thread and event loop."""

    def __init__(self, preload: Mapping[str, Sequence[str]], *, served: Served | None = None) -> None:
        """``preload``: for each module that may be run, the modules to import before; in this order.

        ``served``: we were forked by a server ourselves; this is it.
        """
        self._preload = {module: list(imports) for module, imports in preload.items()}
        self._connection = served.connection if served is not None else None
        self._environment = served.environment if served is not None else dict(os.environ)
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        """Of the server's process; None: it was not started by us."""
        return self._process.pid if self._process is not None else None

    def serves(self, command: Sequence[str], environment: Mapping[str, str]) -> bool:
        """Whether ``command`` with ``environment`` runs the same when it is forked here."""
        if list(command[:2]) != [sys.executable, "-m"] or command[2] not in self._preload:
            return False
        ours = {**self._environment, **SERVER_ENVIRONMENT}
        return all(
            environment.get(name) in (ours.get(name), self._environment.get(name))
            for name in {*ours, *environment} - {_SET_LATER}
            if name.startswith(_READ_AT_START)
        )

    def start(self) -> None:
        """Start the server's process, unless it runs. It imports while we go on."""
        with self._lock:
            if self._connection is not None:
                return
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            arguments = (theirs.fileno(), os.getpid(), json.dumps(self._preload))
            with theirs:
                self._process = subprocess.Popen(
                    [sys.executable, "-c", f"{_MAIN}main(*{arguments!r})"],
                    stdin=subprocess.DEVNULL,
                    env={**self._environment, **SERVER_ENVIRONMENT},
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,
                )
            self._connection = ours

    async def fork(
        self, command: Sequence[str], environment: Mapping[str, str], files: Sequence[int]
    ) -> ForkedProcess:
        """Run ``command``, which it ``serves``, with ``files`` as stdin, stdout and stderr.

        Returns when the process exists. Raises OSError: the server is gone, or could not fork.
        """
        process = ForkedProcess(self.ask(command, environment, files))
        try:
            await process.wait_started()
        except BaseException:
            process.close()
            raise
        return process

    def ask(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        files: Sequence[int],
        directory: str | None = None,
    ) -> socket.socket:
        """Ask for a process as ``fork`` does, and return its status socket. Raises OSError.

        ``directory``: its working directory; None: ours.
        """
        self.start()
        assert self._connection is not None
        where = directory or os.getcwd()
        request = Request(command[2], list(command[3:]), dict(environment), where, os.getpid())
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            with theirs, self._lock:
                socket.send_fds(self._connection, [request.pack()], [theirs.fileno(), *files])
        except BaseException:
            ours.close()
            raise
        return ours


class ForkedProcess:
    """A process that the fork server has forked and waits for. It is killed when this object is closed."""

    def __init__(self, status: socket.socket) -> None:
        """``status`` says the process's id and passes a pidfd, and later says its exit code."""
        self.pid = 0
        self.returncode: int | None = None
        self.stdin: asyncio.WriteTransport | None = None  # our ends of its pipes, where it has any
        self.stdout: asyncio.StreamReader | None = None
        status.setblocking(False)
        self._status = status
        self._pidfd = -1
        self._loop = asyncio.get_running_loop()
        self._started = asyncio.Event()
        self._ended = asyncio.Event()
        self._loop.add_reader(status.fileno(), self._hear)

    async def wait_started(self) -> None:
        """Raises ConnectionResetError: the server is gone, or could not fork."""
        await self._started.wait()
        if not self.pid:
            raise ConnectionResetError("it has ended, or cannot fork")

    async def wait(self) -> int:
        """Wait until it ends; return its exit code, negative for a signal."""
        await self._ended.wait()
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Nothing happens once it has ended."""
        if self._pidfd >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def close(self) -> None:
        """Idempotent."""
        if self._status.fileno() >= 0:
            self._loop.remove_reader(self._status.fileno())
            self._status.close()
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1

    def _hear(self) -> None:
        try:
            data, ancillary, _, _ = self._status.recvmsg(64, socket.CMSG_SPACE(array.array("i").itemsize))
        except BlockingIOError:
            return
        except OSError:
            data, ancillary = b"", []
        if data and not self.pid:
            self.pid, self._pidfd = int(data), array.array("i", ancillary[0][2])[0]
        else:
            # A server that ends takes its processes along, and says nothing.
            self.returncode = int(data) if data else -signal.SIGKILL
            self.close()
            self._ended.set()
        self._started.set()


_current: tuple[ForkServer, ...] = ()


def use_fork_servers(*preloads: Mapping[str, Sequence[str]]) -> tuple[ForkServer, ...]:
    """The fork servers of this process; one for each of ``preloads``, if there were none before. Empty where
    the system cannot have any.

    They serve until this process ends, and import side by side. ``preloads``: see ``ForkServer``.
    """
    global _current
    if not _current_servers() and sys.platform == "linux" and hasattr(os, "pidfd_open"):
        _current = tuple(ForkServer(preload) for preload in preloads)
    return _current


def fork_server_for(command: Sequence[str], environment: Mapping[str, str]) -> ForkServer | None:
    """The fork server of this process, or the one that forked it, that ``serves`` this command."""
    return next((server for server in _current_servers() if server.serves(command, environment)), None)


def _current_servers() -> tuple[ForkServer, ...]:
    global _current
    if not _current and fork_server_main.served is not None:
        _current = (ForkServer(fork_server_main.served.preload, served=fork_server_main.served),)
    return _current

"""The process of a ``ForkServer``: it imports modules, and forks when it is asked to.

It has one thread and touches no GPU, so that forking is safe. It ends when the process that started it ends,
and the kernel ends every forked process with it. A forked process also ends when its status socket is closed:
the process that asked for it has ended, or wants it no more.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import json
import os
import runpy
import selectors
import signal
import socket
import sys
import threading
from dataclasses import asdict, dataclass
from typing import NoReturn

_MAX_REQUEST_NBYTES = 1 << 20
_PR_SET_PDEATHSIG = 1
_NUM_FILES = 4  # the status socket, stdin, stdout, stderr


@dataclass(frozen=True, slots=True)
class Request:
    """Run ``module`` as ``python -m`` would, in ``directory``. ``parent``: the process that asks."""

    module: str
    arguments: list[str]
    environment: dict[str, str]
    directory: str
    parent: int

    def pack(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def unpack(cls, data: bytes) -> Request:
        return cls(**json.loads(data))


@dataclass(frozen=True, slots=True)
class Served:
    """What a forked process knows of its server. ``environment``: what the process was started with."""

    connection: socket.socket
    preload: dict[str, list[str]]
    environment: dict[str, str]


@dataclass(frozen=True, slots=True)
class _Forked:
    pid: int
    pidfd: int
    status: socket.socket
    connection: socket.socket  # our end of what the process asks through


@dataclass(frozen=True, slots=True)
class _Asked:
    request: Request
    files: list[int]


served: Served | None = None
"""Set in a process that was forked."""


class Server:
    def __init__(self, connection: socket.socket, parent_pid: int, preload: dict[str, list[str]]) -> None:
        self._preload = preload
        self._pid = os.getpid()
        self._first = connection
        self._environment = dict(os.environ)
        self._parent_pid = parent_pid
        self._parent = os.pidfd_open(parent_pid)
        self._loaded: set[str] = set()
        self._asked: list[_Asked] = []
        self._forked: dict[int, _Forked] = {}  # by pidfd
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._selector = selectors.DefaultSelector()
        self._selector.register(connection, selectors.EVENT_READ)
        self._selector.register(self._parent, selectors.EVENT_READ)

    def run(self) -> Request:
        """Serve until the parent is gone. Returns in each forked process, with what it is to run."""
        gc.disable()
        for module, imports in self._preload.items():
            for name in imports:
                try:
                    importlib.import_module(name)
                except ImportError as error:
                    # A process that needs it fails in the same way, and says so in its own log.
                    print(f"fork server: cannot import {name}: {error}", file=sys.stderr)
            self._loaded.add(module)
            if (request := self._serve(0)) is not None:
                return request
        gc.collect()
        while (request := self._serve(None)) is None:
            pass
        return request

    def _serve(self, timeout_s: float | None) -> Request | None:
        for key, _ in self._selector.select(timeout_s):
            if key.fd == self._parent:
                os._exit(0)
            elif key.fd in self._forked:
                self._reap(key.fd)
            elif isinstance(key.fileobj, socket.socket) and key.fileobj.fileno() >= 0:
                self._read(key.fileobj, key.data)
        for asked in list(self._asked):
            if asked.request.module in self._loaded:
                self._asked.remove(asked)
                try:
                    connection = self._fork(asked)
                except OSError as error:
                    # The process that asked sees the end of its status socket, and starts it by exec.
                    print(f"fork server: cannot fork {asked.request.module}: {error}", file=sys.stderr)
                    _close(asked.files)
                    continue
                if connection is not None:
                    self._become(asked, connection)
                    return asked.request
        return None

    def _read(self, connection: socket.socket, pidfd: int | None) -> None:
        """Read a request; or notice the end of a connection, or of a status socket (it has a ``pidfd``)."""
        try:
            data, files, _, _ = socket.recv_fds(connection, _MAX_REQUEST_NBYTES, _NUM_FILES)
        except ConnectionResetError:
            data, files = b"", []  # it was closed before what we had told was read
        if data and len(files) < _NUM_FILES:
            print(
                f"fork server: {len(files)} of a request's {_NUM_FILES} files arrived: too many are open",
                file=sys.stderr,
            )
            _close(files)
            return
        if data:
            self._asked.append(_Asked(Request.unpack(data), files))
            return
        self._selector.unregister(connection)
        if connection is self._first:
            os._exit(0)
        if pidfd is not None:
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)

    def _fork(self, asked: _Asked) -> socket.socket | None:
        """In the new process, its connection to us; here, None.

        Raises OSError, only here: no process was made, and ``asked.files`` are open.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            pid = os.fork()
        except OSError:
            ours.close()
            theirs.close()
            raise
        if not pid:
            ours.close()
            return theirs
        theirs.close()
        try:
            pidfd = os.pidfd_open(pid)
        except OSError:
            ours.close()
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            raise
        status = socket.socket(fileno=asked.files[0])
        _close(asked.files[1:])
        child = _Forked(pid, pidfd, status, ours)
        self._forked[child.pidfd] = child
        self._selector.register(child.pidfd, selectors.EVENT_READ)
        self._selector.register(ours, selectors.EVENT_READ)
        self._selector.register(status, selectors.EVENT_READ, child.pidfd)
        _tell(status, pid, [child.pidfd])
        return None

    def _reap(self, pidfd: int) -> None:
        child = self._forked.pop(pidfd)
        _, status = os.waitpid(child.pid, 0)
        for file in (child.pidfd, child.status, child.connection):
            if file in self._selector.get_map():
                self._selector.unregister(file)
        os.close(child.pidfd)
        child.connection.close()
        _tell(child.status, os.waitstatus_to_exitcode(status), [])
        child.status.close()

    def _become(self, asked: _Asked, connection: socket.socket) -> None:
        """Turn this process, just forked, into the one asked for."""
        global served
        os.setsid()
        # If the server died before this call, no signal would follow.
        if self._libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) or os.getppid() != self._pid:
            os._exit(1)
        # Only the server may hold these: the others wait for their ends.
        self._selector.close()
        os.close(self._parent)
        self._first.close()
        for child in self._forked.values():
            os.close(child.pidfd)
            child.status.close()
            child.connection.close()
        for number, file in enumerate(asked.files[1:]):
            os.dup2(file, number)
        _close([*asked.files, *(file for other in self._asked for file in other.files)])
        request = asked.request
        os.chdir(request.directory)
        if not sys.flags.safe_path:
            sys.path[0] = request.directory
        # What modules set when they are imported stays.
        imported = {name: word for name, word in os.environ.items() if name not in self._environment}
        os.environ.clear()
        os.environ.update(imported | request.environment)
        title = [sys.executable, "-m", request.module, *request.arguments]
        if request.parent != self._parent_pid:
            title.append(f"(of process {request.parent})")
        _set_title(" ".join(title))
        served = Served(connection, self._preload, request.environment)
        # What is imported stays: to search it for garbage would copy its pages.
        gc.freeze()
        gc.enable()


def _close(files: list[int]) -> None:
    for file in files:
        os.close(file)


def _tell(status: socket.socket, number: int, files: list[int]) -> None:
    try:
        socket.send_fds(status, [str(number).encode()], files)
    except OSError:
        return  # the process that asked is gone; its end is handled elsewhere


def _set_title(title: str) -> None:
    with contextlib.suppress(ImportError):  # only `ps` shows it
        from setproctitle import setproctitle

        setproctitle(title)


def main(fd: int, parent_pid: int, preload: str) -> None:
    """``fd``: a connection to the process that started us."""
    _set_title(f"moonpool: fork server of {parent_pid}")
    server = Server(socket.socket(fileno=fd), parent_pid, json.loads(preload))
    request = server.run()
    sys.argv[1:] = request.arguments
    # Records of benchmarks name the command of this process, not that of the server.
    sys.orig_argv = [sys.executable, "-m", request.module, *request.arguments]
    code: object = None
    try:
        runpy.run_module(request.module, run_name="__main__", alter_sys=True)
    except SystemExit as ended:
        code = ended.code
    _end(code)


def _end(code: object) -> NoReturn:
    """End as the interpreter does, but for its last step: to tear down all that was imported takes a quarter
    of a second of processor time, and copies the pages shared with the server."""
    if code is not None and not isinstance(code, int):
        print(code, file=sys.stderr)
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # closed, or without a reader
            stream.flush()
    os._exit((code or 0) & 0xFF)

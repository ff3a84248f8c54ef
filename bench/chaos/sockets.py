"""Cut the TCP connections of another process, as a lost link would."""

from __future__ import annotations

import ctypes
import os
import socket
from pathlib import Path

from moonpool.runtime.errors import MoonpoolError
from moonpool.runtime.failures import FailureClass

_PIDFD_GETFD = 438  # the same number on every architecture
_ESTABLISHED = "01"


class CutRefused(MoonpoolError):
    """The kernel does not let this process take the sockets of another. Nothing was cut."""

    failure = FailureClass.WORKER


def established(pid: int) -> dict[str, int]:
    """The established TCP connections of the process's network: inode to local port."""
    found = {}
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text(encoding="ascii").splitlines()[1:]:
            fields = line.split()
            if fields[3] == _ESTABLISHED:
                found[fields[9]] = int(fields[1].rpartition(":")[2], 16)
    return found


def cut_connections(pid: int, *, except_port: int = 0) -> int:
    """Shut down every established TCP connection of process ``pid``; returns how many.

    except_port: connections with this local port are left alone.

    Raises:
        CutRefused: not the same user, or ptrace rights are missing.
        ProcessLookupError: there is no such process.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    connections = established(pid)
    num_cut = 0
    pidfd = os.pidfd_open(pid)
    try:
        for number in os.listdir(f"/proc/{pid}/fd"):
            try:
                target = os.readlink(f"/proc/{pid}/fd/{number}")
            except FileNotFoundError:
                continue  # closed meanwhile
            port = connections.get(target.removeprefix("socket:[").removesuffix("]"))
            if port is None or port == except_port:
                continue
            fd = libc.syscall(_PIDFD_GETFD, pidfd, int(number), 0)
            if fd < 0:
                error = ctypes.get_errno()
                if error == 9:  # EBADF: closed meanwhile
                    continue
                raise CutRefused(f"the sockets of process {pid} cannot be taken: {os.strerror(error)}")
            with socket.socket(fileno=fd) as connection:
                try:
                    connection.shutdown(socket.SHUT_RDWR)
                except OSError:
                    continue  # its peer ended it first
                num_cut += 1
    finally:
        os.close(pidfd)
    return num_cut

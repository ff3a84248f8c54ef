"""Cut the TCP connections of another process, as a lost link would."""

from __future__ import annotations

import ctypes
import os
import socket

import psutil

from moonpool.runtime.errors import MoonpoolError
from moonpool.runtime.failures import FailureClass

_PIDFD_GETFD = 438  # the same number on every architecture


class CutRefused(MoonpoolError):
    """The kernel does not let this process take the sockets of another. Nothing was cut."""

    failure = FailureClass.WORKER


def cut_connections(pid: int, *, except_port: int = 0) -> int:
    """Shut down every established TCP connection of process ``pid``; returns how many.

    except_port: connections with this local port are left alone.

    Raises:
        CutRefused: not the same user, or ptrace rights are missing.
        ProcessLookupError: there is no such process.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    num_cut = 0
    pidfd = os.pidfd_open(pid)
    try:
        try:
            connections = psutil.Process(pid).net_connections("tcp")
        except psutil.AccessDenied:
            raise CutRefused(f"the sockets of process {pid} cannot be seen: not the same user") from None
        for one in connections:
            if one.status != psutil.CONN_ESTABLISHED or one.laddr.port == except_port:
                continue
            fd = libc.syscall(_PIDFD_GETFD, pidfd, one.fd, 0)
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

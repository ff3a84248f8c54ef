"""Start a process that is tied to us: forked by the fork server where there is one, else by ``exec``."""

from __future__ import annotations

import asyncio
import logging
import os
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import Mapping, Sequence

from moonpool.runtime.service.fork_server import ForkedProcess, ForkServer, fork_server_for
from moonpool.runtime.service.tied_command import tied_command

log = logging.getLogger(__name__)

DEFAULT_LIMIT_NBYTES = 1 << 16

Process = asyncio.subprocess.Process | ForkedProcess


async def spawn(
    command: Sequence[str],
    *,
    environment: Mapping[str, str],
    stdin: bool = False,
    stdout: int | None = PIPE,
    stderr: int | None = None,
    limit_nbytes: int = DEFAULT_LIMIT_NBYTES,
) -> Process:
    """Start ``command`` in a session of its own, so that Ctrl-C reaches only us. It cannot outlive us.

    ``stdin``: it gets a pipe, else nothing to read. ``stdout``, ``stderr``: a file descriptor, or None for
    ours; ``stdout`` may be ``PIPE``. ``limit_nbytes``: of a line of its stdout. Where it is started by
    ``exec``, it ends with the thread that called: normally the main one.
    """
    if (server := fork_server_for(command, environment)) is not None:
        try:
            return await _fork(server, command, environment, stdin, stdout, stderr, limit_nbytes)
        except OSError as error:
            log.warning("%s is started by exec: the fork server failed: %s", command[2], error)
    return await asyncio.create_subprocess_exec(
        *tied_command(command),
        stdin=PIPE if stdin else DEVNULL,
        stdout=stdout,
        stderr=stderr,
        env=dict(environment),
        limit=limit_nbytes,
        start_new_session=True,
    )


async def _fork(
    server: ForkServer,
    command: Sequence[str],
    environment: Mapping[str, str],
    stdin: bool,
    stdout: int | None,
    stderr: int | None,
    limit_nbytes: int,
) -> Process:
    theirs: list[int] = []
    writer: asyncio.WriteTransport | None = None
    reader: asyncio.StreamReader | None = None
    loop = asyncio.get_running_loop()
    try:
        if stdin:
            read_fd, write_fd = os.pipe()
            theirs.append(read_fd)
            writer, _ = await loop.connect_write_pipe(asyncio.Protocol, os.fdopen(write_fd, "wb", 0))
        else:
            theirs.append(os.open(os.devnull, os.O_RDONLY))
        if stdout == PIPE:
            read_fd, write_fd = os.pipe()
            theirs.append(write_fd)
            reader = asyncio.StreamReader(limit=limit_nbytes)
            protocol = asyncio.StreamReaderProtocol(reader)
            await loop.connect_read_pipe(lambda: protocol, os.fdopen(read_fd, "rb", 0))
        else:
            theirs.append(os.dup(1 if stdout is None else stdout))
        theirs.append(os.dup(2 if stderr is None else stderr))
        process = await server.fork(command, environment, theirs)
        process.stdin, process.stdout = writer, reader
        return process
    except BaseException:
        if writer is not None:
            writer.close()
        raise
    finally:
        for file in theirs:
            os.close(file)

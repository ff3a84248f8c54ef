"""``ucx_perftest``: libucp with one buffer that stays in the cache, unlike a copy of KV blocks."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
from asyncio.subprocess import PIPE
from collections.abc import Mapping

from moonpool.bench.harness.peers import PeerAbsent, PeerFailed, peers_dir
from moonpool.bench.transfer.shapes import Shape
from moonpool.runtime.network.sockets import free_port

_TESTS = {"read": "ucp_get", "write": "ucp_put_bw"}
_MIB = 1 << 20
# Blocks of the first run of a shape; later runs take as many as the time allows at the last speed.
_MIN_BLOCKS = 20
_RUN_S = 30.0


class PerfTest:
    """As ``EnginePair``. Each move runs a server, then a client."""

    name = "ucx_perftest"

    def __init__(self, program: str, environment: Mapping[str, str]) -> None:
        self._program = program
        self._environment = {**os.environ, "UCX_WARN_UNUSED_ENV_VARS": "n", **environment}
        self._shape = Shape(1, 1)
        self._nbytes_per_s = 0.0

    @classmethod
    def found(cls, environment: Mapping[str, str]) -> PerfTest:
        """Find it on PATH, or unpacked under the peers' directory. Raises ``PeerAbsent``."""
        program = shutil.which("ucx_perftest")
        if program is not None:
            return cls(program, environment)
        home = peers_dir() / "ucx_perftest" / "usr"
        program = str(home / "bin" / "ucx_perftest")
        if not os.access(program, os.X_OK):
            raise PeerAbsent("ucx_perftest is not installed; this does it: apt install ucx-utils")
        libraries = [str(path) for path in (home / "lib").glob("*-linux-gnu")]
        return cls(program, {**environment, "LD_LIBRARY_PATH": ":".join(libraries)})

    async def prepare(self, shape: Shape) -> None:
        self._shape = shape
        self._nbytes_per_s = 0.0
        await self.move(0.0)

    async def move(self, seconds: float) -> list[float]:
        shape = self._shape
        blocks = max(int(self._nbytes_per_s * seconds / shape.block_nbytes), _MIN_BLOCKS)
        arguments = ["-t", _TESTS[shape.direction], "-s", str(shape.block_nbytes), "-n", str(blocks)]
        arguments += ["-w", "10", "-O", str(shape.batch * shape.parallel), "-f", "-v"]
        port = str(free_port())
        server = await asyncio.create_subprocess_exec(
            self._program, "-p", port, stdout=PIPE, stderr=PIPE, env=self._environment
        )
        try:
            async with asyncio.timeout(_RUN_S):
                output = await self._client(port, arguments)
        except TimeoutError:
            raise PeerFailed(f"ucx_perftest did not end within {_RUN_S:.0f} s") from None
        finally:
            with contextlib.suppress(ProcessLookupError):
                server.kill()
            await server.communicate()
        self._nbytes_per_s = bandwidth_of(output)
        return [shape.nbytes / self._nbytes_per_s]

    async def _client(self, port: str, arguments: list[str]) -> str:
        while True:
            client = await asyncio.create_subprocess_exec(
                *(self._program, "127.0.0.1", "-p", port, *arguments),
                stdout=PIPE,
                stderr=PIPE,
                env=self._environment,
            )
            try:
                output, errors = await client.communicate()
            finally:
                if client.returncode is None:
                    client.kill()
                    await client.wait()
            if client.returncode == 0:
                return output.decode()
            if b"refused" not in errors + output:
                raise PeerFailed(f"ucx_perftest: {(errors + output).decode(errors='replace').strip()[-300:]}")
            # The server is not listening yet.
            await asyncio.sleep(0.01)

    def cpu_s(self) -> float:
        """None is told: in runs as short as these, most of it is of starting two processes."""
        return 0.0


def bandwidth_of(output: str) -> float:
    """Bytes/s, from the last line of ``-f -v``: iterations, three latencies, two bandwidths, two rates."""
    fields = output.strip().splitlines()[-1].split(",")
    return float(fields[-3]) * _MIB

"""A node as any, which can be held on its way to a request that moves to it.

A test writes the name of a stage to ``hold_file``: the node stays in it until the file is gone, and says so
by ``held_file``. Neither side depends on how fast the other is.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import runpy
from pathlib import Path

ASKED = "asked"
"""It follows the source, and has no blocks yet."""
READING = "reading"
"""It has reserved blocks and read some; the source decodes."""
STANDS_STILL = "stands still"
"""The source has stopped the request, and waits for the last blocks to be read."""
DIRECTORY = "HELD_NODE_DIRECTORY"
NAME = "HELD_NODE_NAME"


def hold_file(directory: Path, name: str) -> Path:
    return directory / f"{name}.hold"


def held_file(directory: Path, name: str) -> Path:
    return directory / f"{name}.held"


def _hold_where_asked() -> None:
    from moonpool.decode_node import takeover
    from moonpool.protos import node_pb2

    directory, name = Path(os.environ[DIRECTORY]), os.environ[NAME]
    hold, held = hold_file(directory, name), held_file(directory, name)
    reserve, stop_if_near = takeover._reserve, takeover._stop_if_near

    async def held_at(stage: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            while hold.read_text() == stage:
                held.touch()
                await asyncio.sleep(0.01)

    async def hold_and_reserve(reading: takeover._Reading, first: node_pb2.KvChunk) -> None:
        if reading.source.decodes:
            await held_at(ASKED)
        await reserve(reading, first)

    async def stop_if_near_and_hold(reading: takeover._Reading, num_tokens: int) -> None:
        if reading.source.decodes and not reading.stopped_s:
            await held_at(READING)
            await stop_if_near(reading, num_tokens)
            if reading.stopped_s:
                await held_at(STANDS_STILL)

    takeover._reserve, takeover._stop_if_near = hold_and_reserve, stop_if_near_and_hold


if __name__ == "__main__":
    _hold_where_asked()
    runpy.run_module("moonpool.node", run_name="__main__", alter_sys=True)

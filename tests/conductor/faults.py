"""What can go wrong on a scripted node."""

from __future__ import annotations

import asyncio

from moonpool.protos import node_pb2
from tests.conductor.core_nodes import Broken, Busy, Script, ScriptedNode


def once(index: int, fault: Script) -> Script:
    """``fault`` at the first token with this index, and never again."""
    done = False

    async def script(node: ScriptedNode, work: node_pb2.Work, at: int) -> None:
        nonlocal done
        if at == index and not done:
            done = True
            await fault(node, work, at)

    return script


async def dies(node: ScriptedNode, work: node_pb2.Work, index: int) -> None:
    await node.die()


async def hangs(node: ScriptedNode, work: node_pb2.Work, index: int) -> None:
    await asyncio.Event().wait()


async def breaks(node: ScriptedNode, work: node_pb2.Work, index: int) -> None:
    raise Broken("out of luck")


async def is_busy(node: ScriptedNode, work: node_pb2.Work, index: int) -> None:
    raise Busy("no room")

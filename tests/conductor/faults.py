"""What can go wrong on a scripted node."""

from __future__ import annotations

import asyncio

from moonpool.protos import node_pb2
from moonpool.runtime.errors import LifeEnded
from moonpool.runtime.failures import FailureClass
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


async def ends(node: ScriptedNode, work: node_pb2.Work, index: int) -> None:
    raise LifeEnded("rank 1 is lost", FailureClass.RANK)


class Lives:
    """Every prompt joins the step that its node runs; with the request ``poison`` in it the node's life ends.
    At token ``index``. ``ended``: the requests of each step that ended a life."""

    def __init__(self, poison: str, index: int = 0) -> None:
        self.ended: list[set[str]] = []
        self._poison, self._index = poison, index
        self._steps: dict[str, tuple[set[str], asyncio.Event]] = {}

    async def __call__(self, node: ScriptedNode, work: node_pb2.Work, index: int) -> None:
        if index != self._index:
            return
        step, end = self._steps.setdefault(node.node_id, (set(), asyncio.Event()))
        step.add(work.request_id)
        if work.request_id == self._poison:
            await asyncio.sleep(0.05)  # others join
            self.ended.append(step)
            del self._steps[node.node_id]
            end.set()
        try:
            await asyncio.wait_for(end.wait(), 0.3)
        except TimeoutError:
            step.discard(work.request_id)
            return
        raise LifeEnded("rank 1 is lost: it ended by signal 9")


async def is_busy(node: ScriptedNode, work: node_pb2.Work, index: int) -> None:
    raise Busy("no room")

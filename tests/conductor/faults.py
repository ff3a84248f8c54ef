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
    At token ``index``. ``ended``: the requests of each step that ended a life.

    No step ends before ``poison`` and ``num_others`` requests are in one: the first life ends with those that
    are on its node, and the others are computed then.
    """

    def __init__(self, poison: str, index: int, num_others: int) -> None:
        self.ended: list[set[str]] = []
        self._poison, self._index, self._num_others = poison, index, num_others
        self._seen: set[str] = set()
        # By node: its requests, and whether its life ends.
        self._steps: dict[str, tuple[set[str], asyncio.Future[bool]]] = {}

    async def __call__(self, node: ScriptedNode, work: node_pb2.Work, index: int) -> None:
        if index != self._index:
            return
        fresh = set[str](), asyncio.get_running_loop().create_future()
        step, ends = self._steps.setdefault(node.node_id, fresh)
        step.add(work.request_id)
        self._seen.add(work.request_id)
        is_first = not self.ended
        if work.request_id == self._poison:
            while len(self._seen) <= self._num_others:  # noqa: ASYNC110
                await asyncio.sleep(0.002)
            await asyncio.sleep(0.05)  # who may join does
            self.ended.append(step)
            del self._steps[node.node_id]
            ends.set_result(True)
            if is_first:
                for _, others_end in self._steps.values():
                    others_end.set_result(False)
                self._steps.clear()
        await asyncio.wait((ends,), timeout=None if is_first else 0.3)
        if not ends.done() or not ends.result():
            step.discard(work.request_id)
            return
        raise LifeEnded("rank 1 is lost: it ended by signal 9")


async def is_busy(node: ScriptedNode, work: node_pb2.Work, index: int) -> None:
    raise Busy("no room")

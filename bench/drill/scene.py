"""What a drill is, and the cluster that it happens to."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from moonpool.bench.chaos.disk import LoopDisk
from moonpool.bench.chaos.faults import ClusterFaults
from moonpool.bench.drill.beside import Link
from moonpool.local.cluster import LocalCluster
from moonpool.runtime.service.child import Child


@dataclass(frozen=True, slots=True)
class Scene:
    """A cluster under load. ``disk``: of its nodes' blocks, ``link``: between its second conductor and Redis,
    ``gpu_node``: one with a GPU's stand-in, each where the drill needs it. ``more``: sends as many more
    requests at a time, for as many seconds; ``ask``: one more, with that prompt and that many output tokens.
    ``mitigated``: whether what failed is started again."""

    cluster: LocalCluster
    faults: ClusterFaults
    mitigated: bool
    more: Callable[[int, float], Awaitable[None]]
    ask: Callable[[list[int], int], Awaitable[None]]
    disk: LoopDisk | None = None
    link: Link | None = None
    gpu_node: Child | None = None


Fault = Callable[[Scene], Awaitable[object]]


@dataclass(frozen=True, slots=True)
class Drill:
    """``fault`` is over when it returns.

    ``mitigation``: in a few words; ``on`` and ``off`` are its options with and without, and ``restarts`` says
    that it is the supervision of children, or that what was cut is joined again.
    """

    name: str
    fault: Fault
    mitigation: str
    sets: tuple[str, ...] = ()
    on: tuple[str, ...] = ()
    off: tuple[str, ...] = ()
    restarts: bool = False
    streams: int = 6
    after_s: float = 5.0  # under load, after the fault
    needs_disk: bool = False
    splits: bool = False  # it needs a second conductor, that has half of the streams
    needs_gpu: bool = False

    def arms(self) -> list[tuple[str, tuple[str, ...], bool]]:
        """(name, options, whether children are started again) with and without the mitigation."""
        return [
            ("with", (*self.sets, *self.on), self.restarts),
            ("without", (*self.sets, *self.off), False),
        ]

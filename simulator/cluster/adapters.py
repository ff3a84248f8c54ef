"""The LoRA adapters in a simulated node's pool."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from moonpool.conductor.placing.node_view import NodeView
from moonpool.simulator.cluster.clock import Clock
from moonpool.simulator.cluster.job import Job
from moonpool.simulator.cluster.memory import NodeMemory, PinnedBlocks


@dataclass(slots=True)
class _Resident:
    """``users``: requests that need it. ``ready_s``: when it is loaded."""

    hold: PinnedBlocks
    ready_s: float
    users: dict[Job, None] = field(default_factory=dict)


class Adapters:
    """Adapters of equal size, loaded from host memory when a request needs them. Those without users stay
    until their blocks are needed. ``engine.adapters.residency`` without the bytes."""

    def __init__(
        self, clock: Clock, memory: NodeMemory, views: Sequence[NodeView], *, num_blocks: int, load_s: float
    ) -> None:
        """``num_blocks`` and ``load_s``: of each. ``views``: name the resident ones."""
        self.num_loads = 0
        self._clock = clock
        self._memory = memory
        self._views = views
        for view in views:
            view.adapter_load_s = load_s
        self._num_blocks = num_blocks
        self._load_s = load_s
        self._residents: OrderedDict[str, _Resident] = OrderedDict()  # last used last
        self._waiting: deque[tuple[Job, Callable[[], None]]] = deque()  # for room

    @property
    def num_idle_blocks(self) -> int:
        """Blocks of adapters without users."""
        return self._num_blocks * sum(not one.users for one in self._residents.values())

    def bring(self, job: Job, ready: Callable[[], None]) -> None:
        """Keep the job's adapter, and call ``ready`` once it is loaded: at once where the job has none."""
        if not job.request.adapter:
            ready()
            return
        self._waiting.append((job, ready))
        self.grant()

    def grant(self) -> None:
        """Load what waits, in order, as far as there is room."""
        while self._waiting:
            job, ready = self._waiting[0]
            one = self._residents.get(job.request.adapter) or self._load(job.request.adapter)
            if one is None:
                return
            self._waiting.popleft()
            one.users[job] = None
            self._residents.move_to_end(job.request.adapter)
            self._clock.at(one.ready_s, ready)

    def leave(self, job: Job) -> None:
        """The job no longer needs its adapter here. Idempotent."""
        if job.request.adapter:
            self._waiting = deque(entry for entry in self._waiting if entry[0] is not job)
            if (one := self._residents.get(job.request.adapter)) is not None:
                one.users.pop(job, None)

    def evict(self) -> bool:
        """Release the blocks of the adapter that has been without users for longest; False: there is none."""
        for name, one in self._residents.items():
            if not one.users:
                del self._residents[name]
                self._memory.release(one.hold)
                self._tell()
                return True
        return False

    def _load(self, name: str) -> _Resident | None:
        hold = PinnedBlocks()
        while not self._memory.reserve(hold, (), self._num_blocks):
            if not self.evict():
                return None
        self.num_loads += 1
        one = self._residents[name] = _Resident(hold, self._clock.now_s + self._load_s)
        self._tell()
        return one

    def _tell(self) -> None:
        for view in self._views:
            view.resident_adapters = frozenset(self._residents)

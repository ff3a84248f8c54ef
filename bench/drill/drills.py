"""The drills: what fails, how, and what is there against it."""

from __future__ import annotations

import os
import signal
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import psutil

from moonpool.bench.chaos.disk import LoopDisk
from moonpool.bench.chaos.faults import ClusterFaults, FaultFailed
from moonpool.local.cluster import LocalCluster

_STOPPED_S = 15.0
_STALLED_S = 8.0
_BURST_S = 10.0
# Requests at a time: far beyond what the cluster serves in time, and what its decode pools hold.
_OVERLOAD, _SEQUENCES = 100, 24


@dataclass(frozen=True, slots=True)
class Scene:
    """A cluster under load. ``disk``: of its nodes' blocks, where the drill needs one. ``more``: sends as
    many more requests at a time, for as many seconds."""

    cluster: LocalCluster
    faults: ClusterFaults
    disk: LoopDisk | None
    more: Callable[[int, float], Awaitable[None]]


Fault = Callable[[Scene], Awaitable[object]]


@dataclass(frozen=True, slots=True)
class Drill:
    """``fault`` is over when it returns.

    ``mitigation``: in a few words; ``on`` and ``off`` are its options with and without, and ``restarts`` says
    that it is the supervision of children.
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

    def arms(self) -> list[tuple[str, tuple[str, ...], bool]]:
        """(name, options, whether children are started again) with and without the mitigation."""
        return [
            ("with", (*self.sets, *self.on), self.restarts),
            ("without", (*self.sets, *self.off), False),
        ]


async def _kill_decode(scene: Scene) -> None:
    await scene.faults.kill("decode-0", 0.0)


async def _stop_prefill(scene: Scene) -> None:
    await scene.faults.stop("prefill-0", _STOPPED_S)


async def _kill_redis(scene: Scene) -> None:
    """Its supervisor starts it again, or nothing does."""
    child = scene.cluster.children["redis"]
    os.kill(child.pid, signal.SIGKILL)
    await child.wait()


async def _stop_rank(scene: Scene) -> None:
    """A rank stops in an exchange: the others wait for it."""
    # The fork server's children say in their titles whose they are.
    of = f"(of process {scene.cluster.children['decode-0'].pid})"
    found = psutil.process_iter(["cmdline"])
    ranks = [process for process in found if of in " ".join(process.info["cmdline"] or ())]
    if not ranks:
        raise FaultFailed("decode-0 has no rank of its own process: engine.parallel.tp must be 2")
    await scene.faults.stop_process(ranks[-1].pid, _STOPPED_S)


async def _stall_disk(scene: Scene) -> None:
    assert scene.disk is not None
    await scene.disk.stall(_STALLED_S)


async def _overload(scene: Scene) -> None:
    await scene.more(_OVERLOAD, _BURST_S)


async def _fill_pools(scene: Scene) -> None:
    await scene.more(_SEQUENCES, _BURST_S)


_SMALL_POOL = "engine.pool_nbytes=4MiB"
_ONCE = ("conductor.max_attempts=1",)
_SMALL_TIERS = (
    "engine.pool_nbytes=16MiB",
    "store.host.capacity_nbytes=4MiB",
    "store.write_policy=write-through",
    "store.ssd.capacity_nbytes=192MiB",
)

DRILLS = (
    Drill(
        "killed decode node",
        _kill_decode,
        "placed again from lineage (conductor.max_attempts)",
        off=_ONCE,
    ),
    Drill(
        "stopped prefill node",
        _stop_prefill,
        "placed again from lineage (conductor.max_attempts)",
        off=_ONCE,
    ),
    Drill(
        "silent rank",
        _stop_rank,
        "heartbeats of ranks (engine.parallel.timeout_s)",
        sets=("cluster.prefill=1", "cluster.decode_options=engine.parallel.tp=2"),
        off=("engine.parallel.timeout_s=60",),
    ),
    Drill(
        "index killed",
        _kill_redis,
        "Redis is started again (its supervisor); the mirror serves meanwhile in both",
        restarts=True,
        after_s=8.0,
    ),
    Drill(
        "stalled disk",
        _stall_disk,
        "reads are given up (store.ssd.deadline_s)",
        sets=_SMALL_TIERS,
        off=("store.ssd.deadline_s=60",),
        needs_disk=True,
    ),
    Drill(
        "KV out of memory",
        _fill_pools,
        "no more sequences run than fit (engine.max_batch_size)",
        on=(f"cluster.decode_options={_SMALL_POOL},engine.max_batch_size=4",),
        off=(f"cluster.decode_options={_SMALL_POOL}",),
    ),
    Drill(
        "overload",
        _overload,
        "no more requests than are served in time; others are answered 429 (conductor.max_requests)",
        sets=("conductor.request_timeout_s=5",),
        on=("conductor.max_requests=16",),
    ),
)

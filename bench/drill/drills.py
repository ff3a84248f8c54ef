"""The drills: what fails, how, and what is there against it."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass

import psutil

from moonpool.bench.chaos.disk import LoopDisk
from moonpool.bench.chaos.faults import ClusterFaults, FaultFailed
from moonpool.bench.drill.beside import Link, lose_gpu
from moonpool.bench.serve.client.workload import Prompts
from moonpool.client import Client, Reply
from moonpool.local.cluster import LocalCluster
from moonpool.runtime.service.child import Child
from moonpool.runtime.service.vital import cancel_and_wait

_STOPPED_S = 15.0
_STALLED_S = 8.0
_BURST_S = 10.0
# Requests at a time: far beyond what the cluster serves in time, and what its decode pools hold.
_OVERLOAD, _SEQUENCES = 200, 24
# A node that stands still: for so long, so often, shorter than its lease lasts.
_PAUSED_S, _BETWEEN_S, _PAUSES = 3.0, 3.0, 3
_CUT_S = 8.0
# Of a decode node's pool; a request fills a part of it, and a prompt fits into it only when it is empty.
_POOL_BLOCKS, _BLOCK_NBYTES = 400, 98_304
_FILLER_TOKENS, _FILLER_OUTPUT, _LONG_TOKENS = 1000, 2000, 5500


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


async def _kill_redis(scene: Scene) -> None:
    """Its supervisor starts it again, or nothing does."""
    child = scene.cluster.children["redis"]
    os.kill(child.pid, signal.SIGKILL)
    await child.wait()


async def _stop_rank(scene: Scene) -> None:
    """A rank of the busiest decode node stops in an exchange: the others wait for it."""
    async with scene.cluster.client() as client:
        decode = [node for node in (await client.cluster())["nodes"] if node["role"] == "decode"]
    name = max(decode, key=lambda node: node["load"]["num_running"])["node_id"]
    # The fork server's children say in their titles of which process they are.
    of = f"(of process {scene.cluster.children[name].pid})"
    found = psutil.process_iter(["cmdline"])
    ranks = [process for process in found if of in " ".join(process.info["cmdline"] or ())]
    if not ranks:
        raise FaultFailed(f"{name} has no rank of its own process: engine.parallel.tp must be 2")
    await scene.faults.stop_process(ranks[-1].pid, _STOPPED_S)


async def _stall_disk(scene: Scene) -> None:
    assert scene.disk is not None
    await scene.disk.stall(_STALLED_S)


async def _pause_prefill(scene: Scene) -> None:
    for _ in range(_PAUSES):
        await scene.faults.stop("prefill-0", _PAUSED_S)
        await asyncio.sleep(_BETWEEN_S)


async def _fragment(scene: Scene) -> None:
    """Fill a part of each pool, then send a prompt that needs more blocks than one of them has left."""
    prompts = Prompts(0, "fragments")
    long = prompts.draw(_LONG_TOKENS)
    async with scene.cluster.client() as client:
        # Computed before: what the prompt waits for later is room.
        await _begun(client, long, 1)
        fillers = []
        for node in ("decode-0", "decode-1"):
            stream, request_id = await _begun(client, prompts.draw(_FILLER_TOKENS), _FILLER_OUTPUT)
            fillers.append(stream)
            if (await client.timeline(request_id))["summary"]["decode_node"] != node:
                await client.migrate(request_id, node)
        reading = [asyncio.create_task(_read(stream)) for stream in fillers]
        await scene.ask(long, 8)
        await cancel_and_wait(*reading)


async def _begun(client: Client, prompt: list[int], max_tokens: int) -> tuple[AsyncGenerator[str, None], str]:
    """A stream that decodes, and its id."""
    reply = Reply()
    stream = client.complete(prompt, reply, max_tokens=max_tokens, temperature=0, ignore_eos=True)
    async for _ in stream:
        if len(reply.pieces_s) >= min(max_tokens, 3):
            break
    return stream, reply.id


async def _read(stream: AsyncGenerator[str, None]) -> None:
    async with aclosing(stream):
        async for _ in stream:
            pass


async def _lose_gpu(scene: Scene) -> None:
    assert scene.gpu_node is not None
    lose_gpu(scene.gpu_node)


async def _split(scene: Scene) -> None:
    assert scene.link is not None
    scene.link.cut()
    await asyncio.sleep(_CUT_S)
    if scene.mitigated:
        scene.link.join()


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
        lambda scene: scene.faults.kill("decode-0", 0.0),
        "placed again from lineage (conductor.max_attempts)",
        off=_ONCE,
    ),
    Drill(
        "stopped prefill node",
        lambda scene: scene.faults.stop("prefill-0", _STOPPED_S),
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
        lambda scene: scene.more(_SEQUENCES, _BURST_S),
        "no more sequences run than fit (engine.max_batch_size)",
        on=(f"cluster.decode_options={_SMALL_POOL},engine.max_batch_size=4",),
        off=(f"cluster.decode_options={_SMALL_POOL}",),
    ),
    Drill(
        "overload",
        lambda scene: scene.more(_OVERLOAD, _BURST_S),
        "no more requests than are served in time; others are answered 429 (conductor.max_requests)",
        sets=("conductor.request_timeout_s=2",),
        on=("conductor.max_requests=16",),
    ),
    Drill(
        "p99 ten times p50",
        _pause_prefill,
        "prompts go where they would begin first (conductor.policy), not to each node in turn",
        sets=("index.lease_ttl_s=10",),
        off=("conductor.policy=round-robin",),
        streams=3,
    ),
    Drill(
        "fragmentation",
        _fragment,
        "a running request moves and makes room (conductor.migrate=defragment)",
        sets=(
            "cluster.prefill=1",
            f"cluster.decode_options=engine.pool_nbytes={_POOL_BLOCKS * _BLOCK_NBYTES}",
            "conductor.request_timeout_s=240",
        ),
        on=("conductor.migrate=drain,defragment",),
        streams=0,
    ),
    Drill(
        "GPU that falls off",
        _lose_gpu,
        "its node ends (health.gpu_lost); placed again from lineage (conductor.max_attempts)",
        sets=("cluster.decode=1",),
        off=_ONCE,
        needs_gpu=True,
    ),
    Drill(
        "index split",
        _split,
        "the link comes back, and the conductor reads what it missed; its mirror serves meanwhile in both",
        restarts=True,
        after_s=8.0,
        splits=True,
    ),
)

"""The ranks of one engine: start, load, watch, end."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor
from dataclasses import replace
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from moonpool.engine.checkpoint.config import ModelConfig
from moonpool.engine.collectives.board import SharedBoard
from moonpool.engine.collectives.exchange_clock import ExchangeClock
from moonpool.engine.device.device import Device
from moonpool.engine.device.threads import use_threads
from moonpool.engine.errors import CheckpointError, ExpertsRefused, LinkBroken, RankLost
from moonpool.engine.ranks.assignment import Assignment, check_identity
from moonpool.engine.ranks.channel import PipeChannel
from moonpool.engine.ranks.group_memory import GroupMemory
from moonpool.engine.ranks.leader import ParallelRunner
from moonpool.engine.ranks.link_factory import open_link
from moonpool.engine.ranks.process_handle import RankProcess
from moonpool.engine.ranks.rank_listener import FarRank, RankListener
from moonpool.engine.sharding.expert_placement import Holders
from moonpool.runtime.cancellation import outlast
from moonpool.runtime.config.options import ParallelOptions, TransferOptions
from moonpool.runtime.service.heartbeat import Heartbeat
from moonpool.runtime.service.load_progress import Progress, TotalProgress
from moonpool.runtime.service.vital import cancel_and_wait, vital

T = TypeVar("T")

log = logging.getLogger(__name__)

_CHECKS_PER_TIMEOUT = 20
# The end of a rank's process is known this soon after its connections break.
_CAUSE_KNOWN_S = 0.2


class RankGroup:
    """Rank 0 is this process. The others of this machine are its children; those of other machines are
    started there by a launcher, join, and end with their call to this process.

    Call ``start`` once, then ``open`` a model, and another one after ``unload``. When a rank is lost every
    wait in the group raises RankLost, ``on_lost`` is called on the loop, and the group can only be closed.
    """

    def __init__(
        self,
        world_size: int,
        timeout_s: float,
        listener: RankListener | None = None,
        *,
        separate_pools: bool = False,
    ) -> None:
        """``listener``: for ranks on other machines; the group opens and closes it.
        ``separate_pools``: share no pool memory with any rank; always so with several machines and on GPUs.
        """
        self.world_size = world_size
        self.far: dict[int, FarRank] = {}
        self.ranks = [RankProcess(rank) for rank in range(1, world_size)]
        self.on_lost: Callable[[RankLost], None] | None = None
        self.lost: RankLost | None = None
        self.silent_s = 0.0  # since the lost rank's last heartbeat, when the group was torn down
        self._listener = listener
        self._timeout_s = timeout_s
        self._start_timeout_s = 0.0  # of the model that is open
        self._separate_pools = separate_pools
        self._memory: GroupMemory | None = None  # while a model is open
        self._runner: ParallelRunner | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._heartbeat: Heartbeat | None = None

    @property
    def pools(self) -> list[npt.NDArray[np.uint8]]:
        """The bytes of the other ranks' pools; none with separate pools."""
        return [] if self._memory is None else [pool.array for pool in self._memory.pools]

    async def start(self, threads: int) -> None:
        """Wait for the ranks of other machines and start those of this one. Call it on a thread that outlives
        the processes: they are tied to it.

        Raises PortInUse or ConfigError when the listener cannot be opened, RankLost when a rank does not
        join within ``start_timeout_s``.
        """
        if self._listener is not None:
            self._listener.open()
            self.far = await self._listener.gather()
        for rank in self.ranks:
            rank.on_end = self.abort
            rank.start(self.far.get(rank.rank) or await PipeChannel.start(rank.rank, threads))

    async def open(
        self,
        config: ModelConfig,
        assignment: Assignment,
        device: Device,
        worker: Executor,
        *,
        pool_memory: npt.NDArray[np.uint8] | None = None,
        progress: Progress | None = None,
    ) -> ParallelRunner:
        """Load the model on all ranks. ``assignment``: rank 0's, without paths; without a number of blocks
        all take as many as fit on the GPU of each. Until ``serve`` exchanges may take long: ranks compile.

        Raises CheckpointError (of rank 0's part), RankLost (another rank failed, or no rank made progress for
        ``start_timeout_s``) or RankRefused. The group can then only be closed.
        """
        if self.lost is not None:
            raise self.lost
        try:
            return await self._open(config, assignment, device, worker, pool_memory, progress)
        except BaseException as error:
            self.abort(error if isinstance(error, RankLost) else RankLost(0, str(error)))
            raise

    async def _open(
        self,
        config: ModelConfig,
        assignment: Assignment,
        device: Device,
        worker: Executor,
        pool_memory: npt.NDArray[np.uint8] | None,
        progress: Progress | None,
    ) -> ParallelRunner:
        began_s = time.monotonic()
        parallel = assignment.options.parallel
        if self.far:
            assignment = replace(assignment, address=next(iter(self.far.values())).leader_address)
        self._memory = memory = GroupMemory(
            config,
            assignment,
            self._timeout_s,
            separate_pools=self._separate_pools or assignment.device != "cpu" or parallel.hosts > 1,
        )
        assignments, board = memory.assignments, memory.board
        self._heartbeat = board.start_heartbeat()
        self._watcher = vital(self._watch(board), "heartbeats of ranks")
        loop, limit_s = asyncio.get_running_loop(), parallel.start_timeout_s
        self._start_timeout_s = limit_s
        await self._open_far(memory, parallel)
        limit = asyncio.timeout(limit_s)
        waits = True

        def put_off() -> None:
            if waits and not limit.expired():
                limit.reschedule(loop.time() + limit_s)

        def report(done: int, nbytes: int, name: str) -> None:
            loop.call_soon_threadsafe(put_off)
            if progress is not None:
                progress(done, nbytes, name)

        total = TotalProgress(report, self.world_size)
        clock = ExchangeClock()

        def load() -> ParallelRunner:
            use_threads(assignment.options)
            link = open_link(assignments[0], config, board, clock)
            try:
                return ParallelRunner(
                    config,
                    assignments[0],
                    device,
                    board,
                    link,
                    clock,
                    memory.expert_load,
                    pool_memory=pool_memory,
                    progress=total.of(0),
                    agree=lambda fitting: asyncio.run_coroutine_threadsafe(
                        self._agree(fitting), loop
                    ).result(),
                )
            except BaseException:
                link.close()
                raise

        loads = [
            asyncio.ensure_future(rank.load(assignments[rank.rank], total.of(rank.rank)))
            for rank in self.ranks
        ]
        try:
            async with limit:
                self._runner = runner = await loop.run_in_executor(worker, load)
                found = await asyncio.gather(*loads)
        except TimeoutError:
            # Loads that were not done were cancelled with the wait. If all are done, rank 0 is late.
            late = [rank for rank, load in zip(self.ranks, loads, strict=True) if not _succeeded(load)]
            where = late[0].where if late else ""
            reason = f"it made no progress for {limit_s:g} s{where} (engine.parallel.start_timeout_s)"
            raise RankLost(late[0].rank if late else 0, reason) from None
        finally:
            waits = False
            for task in loads:
                task.cancel()
            await asyncio.wait(loads)
        ours = assignments[0].identity(config)
        for rank, theirs in zip(self.ranks, found, strict=True):
            check_identity(rank.rank, theirs, ours, rank.where)
        took_s = time.monotonic() - began_s
        log.info("%d ranks (%s) ready after %.2f s", self.world_size, assignment.plan, took_s)
        return runner

    async def _open_far(self, memory: GroupMemory, parallel: ParallelOptions) -> None:
        """Have each other machine create memory as this one has, and connect the boards. Raises RankLost."""
        first = range(parallel.ranks_per_host, self.world_size, parallel.ranks_per_host)
        creating = [
            self._in_time(rank, rank.create_memory(**memory.shape), "created no memory")
            for rank in (self.ranks[rank - 1] for rank in first)
        ]
        paths, board = await asyncio.gather(*creating), memory.board
        for rank, far in self.far.items():
            path, exchange = paths[rank // parallel.ranks_per_host - 1]
            memory.assignments[rank] = replace(
                memory.assignments[rank], board=path, exchange=exchange, address=far.address
            )
            far.board = board.as_rank(rank)
        board.remote_ranks = range(parallel.ranks_per_host, self.world_size)
        board.on_publish = [self.far[rank].publish for rank in first]
        board.on_beat = [self.far[rank].beat for rank in first]

    async def _agree(self, fitting: int) -> int:
        """Have all ranks make pools of the same number of blocks: the least of ``fitting``, rank 0's, and
        theirs. Raises RankLost."""
        least = min([fitting, *await asyncio.gather(*(rank.fitting_blocks() for rank in self.ranks))])
        for rank in self.ranks:
            rank.set_num_blocks(least)
        return least

    def serve(self) -> None:
        """From now on an exchange that takes ``timeout_s`` is lost: every kernel has been compiled."""
        assert self._runner is not None
        self._runner.serve()
        for rank in self.ranks:
            rank.serve()

    async def start_agents(
        self, options: TransferOptions, agent_id: str, epoch: int
    ) -> list[tuple[bytes, int]]:
        """Start a transfer agent over the pool of each other rank: (descriptor, region). A model must be
        open. Raises RankLost, also of a rank that does not answer within ``start_timeout_s``."""

        def start(rank: RankProcess) -> Awaitable[tuple[bytes, int]]:
            started = rank.start_agent(options, f"{agent_id}/{rank.rank}", epoch)
            return self._in_time(rank, started, "started no transfer agent")

        return await asyncio.gather(*map(start, self.ranks))

    async def _in_time(self, rank: RankProcess, answer: Awaitable[T], otherwise: str) -> T:
        """Raises RankLost, also when ``answer`` takes longer than ``start_timeout_s``."""
        try:
            async with asyncio.timeout(self._start_timeout_s):
                return await answer
        except TimeoutError:
            reason = f"it {otherwise} within {self._start_timeout_s:g} s{rank.where}"
            self.abort(error := RankLost(rank.rank, f"{reason} (engine.parallel.start_timeout_s)"))
            raise error from None

    async def refresh_expert_load(self) -> None:
        """Fetch the expert load of ranks without shared memory. A model must be open. Raises RankLost."""
        memory = self._memory
        if memory is not None and memory.expert_load is not None and not memory.pools:
            memory.set_remote_load(await asyncio.gather(*(rank.expert_load() for rank in self.ranks)))

    async def forget_expert_load(self) -> None:
        """Reset the counts. No step is running. Raises RankLost."""
        memory = self._memory
        if memory is None or memory.expert_load is None:
            return
        memory.uncounted = None
        await self.refresh_expert_load()
        memory.uncounted = memory.expert_load.tables[1:].clone()
        memory.expert_load.tables.zero_()

    async def switch_experts(self, layer: int, holders: Holders) -> None:
        """Have all ranks read their experts of a layer, and compute with them from the next step on. One call
        at a time. Raises ExpertsRefused, and nothing has changed, or RankLost. A cancellation waits until no
        rank reads any more; nothing has changed then."""
        runner = self._runner
        assert runner is not None, "a model is open"
        number = runner.expert_switch + 1
        own = asyncio.to_thread(runner.experts.prepare, number, layer, holders)
        others = (
            self._in_time(rank, rank.prepare_experts(number, layer, holders), "read no experts")
            for rank in self.ranks
        )
        reading = asyncio.gather(own, *others, return_exceptions=True)
        # A rank's late answer would be taken for that to the next call, which has the same number.
        found = await outlast(reading)
        for error in found:
            if isinstance(error, CheckpointError):
                raise ExpertsRefused(layer, str(error)) from error
            if isinstance(error, BaseException):
                raise error
        runner.expert_switch = number

    async def unload(self) -> None:
        """Have all ranks drop the model and wait for another. No step is running. Raises RankLost."""
        await self._stop_watching()
        if self._runner is not None and self.lost is None:
            self._runner.end_steps()
            await asyncio.gather(*(rank.ended() for rank in self.ranks))
        self._drop_model()

    async def close(self) -> None:
        """End all ranks. No step is running. Idempotent."""
        await self._stop_watching()
        self._close_listener("the node ended its ranks")
        await asyncio.gather(*(rank.close() for rank in self.ranks))
        self._drop_model()
        if self._listener is not None:
            await self._listener.wait_closed()

    async def _watch(self, board: SharedBoard) -> None:
        """Abort the group when a rank's heartbeat stops."""
        look_s = self._timeout_s / _CHECKS_PER_TIMEOUT
        while True:
            for rank in self.ranks:
                if board.silent_s(rank.rank) <= self._timeout_s:
                    continue
                # If this process was stopped, or the machine, heartbeats may wait to be read or sent.
                await asyncio.sleep(look_s)
                if (silent_s := board.silent_s(rank.rank)) > self._timeout_s:
                    self.abort(RankLost(rank.rank, f"it has been silent for {silent_s:.1f} s{rank.where}"))
                    return
            await asyncio.sleep(look_s)

    async def explain(self, error: RankLost) -> RankLost:
        """Abort the group and return its cause. For a broken connection between ranks this is the end of the
        process or machine, which becomes known a moment later."""
        ends_s = time.monotonic() + _CAUSE_KNOWN_S
        # The cause arrives as a call of ``abort``, so there is no event to wait for.
        while isinstance(error, LinkBroken) and self.lost is None and time.monotonic() < ends_s:  # noqa: ASYNC110
            await asyncio.sleep(_CAUSE_KNOWN_S / _CHECKS_PER_TIMEOUT)
        self.abort(error)
        assert self.lost is not None
        return self.lost if isinstance(error, LinkBroken) else error

    def abort(self, error: RankLost) -> None:
        """Kill all ranks and end every wait in the group with ``error``. Only the first call counts."""
        if self.lost is not None:
            return
        where = self.ranks[error.rank - 1].where if error.rank else ""
        if where and where not in str(error):
            failure = error.failure
            error = RankLost(error.rank, f"{error.reason}{where}")
            error.failure = failure
        self.lost = error
        log.error("%s; the group is torn down", error)
        if self._memory is not None:
            if error.rank:
                self.silent_s = self._memory.board.silent_s(error.rank)
            self._memory.board.abort(error.rank)
        self._close_listener(str(error))
        # A wait in torch.distributed does not read the board; it ends when the peer's process does.
        for rank in self.ranks:
            rank.kill()
        if self.on_lost is not None:
            self.on_lost(error)

    def _close_listener(self, reason: str) -> None:
        if self._listener is not None:
            self._listener.close(reason)

    async def _stop_watching(self) -> None:
        if self._heartbeat is not None:
            self._heartbeat.stop()
            self._heartbeat = None
        await cancel_and_wait(self._watcher)
        self._watcher = None

    def _drop_model(self) -> None:
        for far in self.far.values():
            far.board = None
        if self._runner is not None:
            self._runner.close()
        if self._memory is not None:
            self._memory.close()
        self._memory = self._runner = None


def _succeeded(load: asyncio.Future[dict[str, str]]) -> bool:
    return load.done() and not load.cancelled()

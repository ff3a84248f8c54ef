"""The ranks of one engine: started, given their parts, watched, ended."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch
from torch._C._distributed_c10d import TCPStore

from moonpool.engine.checkpoint.config import ModelConfig
from moonpool.engine.collectives.board import SharedBoard, SharedMemory
from moonpool.engine.collectives.exchange_clock import ExchangeClock
from moonpool.engine.device.device import Device
from moonpool.engine.device.selection import page_dtype
from moonpool.engine.errors import LinkBroken, RankLost
from moonpool.engine.experts.load import ExpertLoad
from moonpool.engine.ranks.assignment import Assignment, check_identity
from moonpool.engine.ranks.heartbeat import Heartbeat
from moonpool.engine.ranks.hosts.channel import PipeChannel
from moonpool.engine.ranks.hosts.listener import HostListener
from moonpool.engine.ranks.hosts.remote_host import RemoteHost
from moonpool.engine.ranks.leader import ParallelRunner
from moonpool.engine.ranks.link_factory import exchange_shape, open_link, open_store
from moonpool.engine.ranks.process_handle import RankProcess
from moonpool.engine.ranks.step_message import payload_nbytes
from moonpool.runtime.config.options import TransferOptions
from moonpool.runtime.service.load_progress import Progress, TotalProgress

log = logging.getLogger(__name__)

_LOOKS_PER_TIMEOUT = 20
# What ended a rank is known this soon after its connections break.
_HEARD_OF_S = 0.2


class RankGroup:
    """Rank 0 is this process; the others are its children, and go with it, or those of other machines' rank
    hosts, and go with the connections to these.

    ``start`` once, then ``open`` a model, and another one after ``leave``. When a rank is lost all waiting in
    the group ends with RankLost, ``on_lost`` is called on the loop, and the group can only be closed.
    """

    def __init__(
        self,
        world_size: int,
        timeout_s: float,
        hosts: HostListener | None = None,
        *,
        separate_pools: bool = False,
    ) -> None:
        """``hosts``: the listener for other machines, where ranks run there; the group opens and closes it.
        ``separate_pools``: share no pool memory with any rank; always so with several machines and on GPUs.
        """
        self.world_size = world_size
        self.remote_hosts: list[RemoteHost] = []
        self._door = hosts
        self.ranks = [RankProcess(rank) for rank in range(1, world_size)]
        self.on_lost: Callable[[RankLost], None] | None = None
        self.lost: RankLost | None = None
        self._pools: list[SharedMemory] = []  # of ranks 1 and up, while a model is open on CPUs
        self._timeout_s = timeout_s
        self._board: SharedBoard | None = None
        self._runner: ParallelRunner | None = None
        self._store: TCPStore | None = None
        self._memories: list[SharedMemory] = []
        self._separate_pools = separate_pools
        self._expert_load: ExpertLoad | None = None
        self._forgotten: torch.Tensor | None = None  # of it, what ranks apart still count
        self._watcher: asyncio.Task[None] | None = None
        self._beating: Heartbeat | None = None

    @property
    def pools(self) -> list[npt.NDArray[np.uint8]]:
        """The bytes of the other ranks' pools, as they see them; none where they are apart."""
        return [pool.array for pool in self._pools]

    async def start(self, threads: int) -> None:
        """Start the processes, once the machines are there that they are to run on, however long that takes.
        Call it on a thread that lives as long as they should: they are tied to it.

        Raises PortInUse, ConfigError: the door cannot be opened.
        """
        if self._door is not None:
            self._door.open()
            self.remote_hosts = await self._door.gather()
        per_host = self.world_size // (1 + len(self.remote_hosts))
        for rank in self.ranks:
            rank.on_end = self.lose
            if rank.rank < per_host:
                rank.start(await PipeChannel.start(rank.rank, threads))
            else:
                rank.start(self.remote_hosts[rank.rank // per_host - 1].start_rank(rank.rank, threads))

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
        """Load the model on all ranks; ``assignment``: the leader's, its paths still empty.

        Raises CheckpointError (of our own part), RankLost (with what was wrong with a rank's part, or that it
        did not come in time), RankRefused; the group can then only be closed.
        """
        if self.lost is not None:
            raise self.lost
        try:
            return await self._open(config, assignment, device, worker, pool_memory, progress)
        except BaseException as error:
            self.lose(error if isinstance(error, RankLost) else RankLost(0, str(error)))
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
        assignments = self._assign(config, assignment)
        board = self._board
        assert board is not None
        self._beating = Heartbeat(board)
        self._watcher = asyncio.create_task(self._watch(board), name="ranks")
        total = TotalProgress(progress, self.world_size)
        clock = ExchangeClock()

        def load() -> ParallelRunner:
            torch.set_num_threads(assignment.options.threads)
            link = open_link(assignments[0], config, board, clock)
            try:
                return ParallelRunner(
                    config,
                    assignments[0],
                    device,
                    board,
                    link,
                    clock,
                    self._expert_load,
                    pool_memory=pool_memory,
                    progress=total.of(0),
                )
            except BaseException:
                link.close()
                raise

        limit_s = assignment.options.parallel.start_timeout_s
        loads = [
            asyncio.ensure_future(rank.load(assignments[rank.rank], total.of(rank.rank)))
            for rank in self.ranks
        ]
        try:
            async with asyncio.timeout(limit_s):
                self._runner = runner = await asyncio.get_running_loop().run_in_executor(worker, load)
                found = await asyncio.gather(*loads)
        except TimeoutError:
            # Those that had not come were cancelled with the wait; where there is none, we are late.
            late = [rank.rank for rank, load in zip(self.ranks, loads, strict=True) if not _succeeded(load)]
            where = self.ranks[late[0] - 1].where if late else ""
            reason = f"it was not ready within {limit_s:g} s{where}"
            raise RankLost(late[0] if late else 0, reason) from None
        finally:
            for task in loads:
                task.cancel()
            await asyncio.wait(loads)
        ours = assignments[0].identity(config)
        for rank, theirs in zip(self.ranks, found, strict=True):
            check_identity(rank.rank, theirs, ours, rank.where)
        log.info(
            "%d ranks (%s) ready after %.2f s",
            self.world_size,
            assignment.plan,
            time.monotonic() - began_s,
        )
        return runner

    async def start_agents(
        self, options: TransferOptions, agent_id: str, epoch: int
    ) -> list[tuple[bytes, int]]:
        """A transfer agent in each other rank, over its pool: (descriptor, region). A model must be open.
        Raises RankLost."""
        return await asyncio.gather(
            *(rank.start_agent(options, f"{agent_id}/{rank.rank}", epoch) for rank in self.ranks)
        )

    async def refresh_expert_load(self) -> None:
        """Ask ranks apart what their experts were given, for ``ParallelRunner.expert_load``. A model must be
        open. Raises RankLost."""
        if self._expert_load is None or self._pools:
            return
        found = await asyncio.gather(*(rank.expert_load() for rank in self.ranks))
        tables = torch.tensor(found, dtype=torch.int64)
        self._expert_load.tables[1:] = tables if self._forgotten is None else tables - self._forgotten

    async def forget_expert_load(self) -> None:
        """Reset the counts. No step is running. Raises RankLost."""
        self._forgotten = None
        await self.refresh_expert_load()
        if self._expert_load is not None:
            self._forgotten = self._expert_load.tables[1:].clone()
            self._expert_load.tables.zero_()

    async def leave(self) -> None:
        """No step is running: the ranks let the model go and wait for another. Raises RankLost."""
        await self._stop_watching()
        if self._runner is not None and self.lost is None:
            self._runner.leave()
            await asyncio.gather(*(rank.ended() for rank in self.ranks))
        self._forget()

    async def close(self) -> None:
        """End all ranks. No step is running. Idempotent."""
        await self._stop_watching()
        self._shut_door("the node ended its ranks")
        await asyncio.gather(*(rank.close() for rank in self.ranks))
        self._forget()

    def assign(self, leader: Assignment, rank: int) -> Assignment:
        """Rank ``rank``'s assignment, of the leader's."""
        return replace(leader, rank=rank)

    def _assign(self, config: ModelConfig, leader: Assignment) -> list[Assignment]:
        plan, options = leader.plan, leader.options
        max_blocks = -(-leader.max_len // options.block_size)
        payload = payload_nbytes(
            max_tokens=options.max_batch_tokens, max_rows=leader.max_rows, max_blocks=max_blocks
        )
        self._board = SharedBoard.create(plan.world_size, payload, self._timeout_s)
        shape = exchange_shape(leader, config)
        exchange = SharedMemory.create("exchange", plan.world_size * shape.rank_nbytes)
        if self.remote_hosts:
            leader = replace(leader, address=self.remote_hosts[0].connection.address)
            self._open_remote(self._board, payload, exchange.array.nbytes)
        store = ""
        if leader.link != "shm":
            self._store = open_store(leader.address)
            store = f"{self._store.host}:{self._store.port}"
        leader = replace(leader, board=self._board.path, exchange=exchange.path, store=store)
        self._memories, self._pools = [exchange], []
        separate = self._separate_pools or leader.device != "cpu" or options.parallel.hosts > 1
        self._expert_load = self._forgotten = None
        if config.moe is not None:
            load = SharedMemory.create("expert-load", ExpertLoad.nbytes(config, plan.world_size))
            self._memories.append(load)
            self._expert_load = ExpertLoad(config, load.array, plan.world_size)
            if not separate:
                leader = replace(leader, expert_load=load.path)
        assignments = [leader]
        for rank in range(1, plan.world_size):
            assigned = self.assign(leader, rank)
            if not separate:
                pages = page_dtype(options, leader.dtype)
                layout = plan.shard(config, rank).layout(config, options.block_size, pages)
                pool = SharedMemory.create(f"pool-{rank}", leader.num_blocks * layout.block_nbytes)
                self._pools.append(pool)
                assigned = replace(assigned, pool=pool.path)
            assignments.append(assigned)
        return assignments

    def _open_remote(self, board: SharedBoard, payload_nbytes: int, exchange_nbytes: int) -> None:
        """Give the other machines memory of the same shape, and have their boards and ours say the same."""
        hosts = self.remote_hosts
        for host in hosts:
            host.open(board, payload_nbytes=payload_nbytes, exchange_nbytes=exchange_nbytes)
        board.remote_ranks = range(self.world_size // (1 + len(hosts)), self.world_size)

        def tell(step: int, batch: npt.NDArray[np.uint8]) -> None:
            for host in hosts:
                host.publish(step, batch)

        board.on_publish = tell

    async def _watch(self, board: SharedBoard) -> None:
        """Look whether the others' hearts beat."""
        while True:
            for rank in self.ranks:
                if (silent_s := board.silent_s(rank.rank)) > self._timeout_s:
                    self.lose(RankLost(rank.rank, f"it has been silent for {silent_s:.1f} s{rank.where}"))
                    return
            await asyncio.sleep(self._timeout_s / _LOOKS_PER_TIMEOUT)

    async def explain(self, error: RankLost) -> RankLost:
        """Lose the group by ``error``, and say what it was lost by: of a connection between ranks that broke,
        what the rank's process or machine is heard of a moment later."""
        ends_s = time.monotonic() + _HEARD_OF_S
        # Whoever hears of it calls ``lose``: there is nothing else to wait for.
        while isinstance(error, LinkBroken) and self.lost is None and time.monotonic() < ends_s:  # noqa: ASYNC110
            await asyncio.sleep(_HEARD_OF_S / _LOOKS_PER_TIMEOUT)
        self.lose(error)
        assert self.lost is not None
        return self.lost if isinstance(error, LinkBroken) else error

    def lose(self, error: RankLost) -> None:
        """A rank is of no use any more: the group is neither. Only the first time counts."""
        if self.lost is not None:
            return
        where = self.ranks[error.rank - 1].where if error.rank else ""
        if where and where not in str(error):
            error = RankLost(error.rank, f"{error.reason}{where}")
        self.lost = error
        log.error("%s; the group is torn down", error)
        if self._board is not None:
            self._board.abort(error.rank)
        self._shut_door(str(error))
        # What waits in torch.distributed hears no board, but that its peer has gone.
        for rank in self.ranks:
            rank.kill()
        if self.on_lost is not None:
            self.on_lost(error)

    def _shut_door(self, reason: str) -> None:
        if self._door is not None:
            self._door.close(reason)

    async def _stop_watching(self) -> None:
        if self._beating is not None:
            self._beating.stop()
            self._beating = None
        if self._watcher is not None:
            self._watcher.cancel()
            await asyncio.wait((self._watcher,))
            self._watcher = None

    def _forget(self) -> None:
        if self._runner is not None:
            self._runner.close()
        for memory in [*self._memories, *self._pools]:
            memory.close()
        if self._board is not None:
            self._board.close()
        self._memories, self._pools = [], []
        self._board, self._runner, self._store = None, None, None


def _succeeded(load: asyncio.Future[dict[str, str]]) -> bool:
    return load.done() and not load.cancelled()

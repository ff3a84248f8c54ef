"""``python -m moonpool.engine.ranks.worker``: a rank other than 0.

Its leader's child reads commands from stdin and writes reports to stdout, each a line of JSON. On another
machine a launcher starts it with ``--leader``, and both go over a call: see ``LeaderCall``. The main thread
runs the tensors, another thread reads commands.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import queue
import sys
import threading
import time
from base64 import b64encode
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moonpool.engine.adapters.packing import AdapterPacking
from moonpool.engine.adapters.pages import AdapterPages
from moonpool.engine.checkpoint.config import ModelConfig
from moonpool.engine.checkpoint.weights import Checkpoint
from moonpool.engine.collectives.board import SharedBoard, SharedMemory
from moonpool.engine.collectives.exchange_clock import ExchangeClock
from moonpool.engine.collectives.link import Link
from moonpool.engine.device.cuda import exact_products
from moonpool.engine.device.selection import TORCH_DTYPES, choose_device, page_dtype
from moonpool.engine.device.threads import use_threads
from moonpool.engine.errors import AdapterRefused, RankLost
from moonpool.engine.execution.gpu_memory import choose_num_blocks
from moonpool.engine.execution.runner import pool_tensor
from moonpool.engine.experts.load import ExpertLoad
from moonpool.engine.memory.block_bytes import device_checksums
from moonpool.engine.model.transformer import Model
from moonpool.engine.ranks.assignment import Assignment, unpack_transfer_options
from moonpool.engine.ranks.channel import RANK
from moonpool.engine.ranks.expert_switch import ExpertSwitches
from moonpool.engine.ranks.leader_call import LeaderCall, joined
from moonpool.engine.ranks.link_factory import open_link
from moonpool.engine.ranks.stage import RankStep, run_steps
from moonpool.engine.sharding.tensor_slices import TensorSlices
from moonpool.kvstore.remote.rank_reader import AgentReader, RankRead
from moonpool.runtime.config.options import LogOptions, SecurityOptions
from moonpool.runtime.errors import ConfigError, MoonpoolError
from moonpool.runtime.observing.log import setup_logging
from moonpool.runtime.security import process
from moonpool.runtime.security.roles import NODE, Caller
from moonpool.transfer import Span, TransferAgent, TransferError, WriteGrant

log = logging.getLogger(__name__)

_PROGRESS_S = 0.1
_MAX_LINE_NBYTES = 64 << 20


_reporting = threading.Lock()


def own_reports() -> Callable[[bytes], None]:
    """Keep stdout for reports alone: what libraries such as NCCL print there goes to stderr from now on.
    Return what writes a report there."""
    sys.stdout.flush()
    reports = os.fdopen(os.dup(1), "wb", buffering=0)
    reports.write(b"\n")  # ends what was printed until now
    os.dup2(2, 1)

    def write(line: bytes) -> None:
        with _reporting:
            left = memoryview(line)
            while left:
                left = left[reports.write(left) or 0 :]

    return write


_send: Callable[[bytes], None] = lambda line: None  # noqa: E731


def report(kind: str, **facts: object) -> None:
    """Send one report. From any thread."""
    _send(json.dumps({"kind": kind, **facts}).encode() + b"\n")


class LeaderCommands:
    """The thread that executes the leader's commands. Ends the process when the leader ends.

    link, pool, expert_load, experts, adapters: of the open model, set before "loaded" is reported.
    """

    def __init__(self, call: LeaderCall | None) -> None:
        """``call``: to a leader on another machine."""
        self.call = call
        self.address = ""  # of this machine, as its leader sees it; set with the assignment
        self.link: Link | None = None
        self.pool: SharedMemory | Tensor | None = None
        self.expert_load: Tensor | None = None
        self.experts: ExpertSwitches | None = None
        self.adapters: AdapterPages | None = None
        self._agent: TransferAgent | None = None
        self._reader: AgentReader | None = None
        self._writable: WriteGrant | None = None
        self._reads: dict[int, asyncio.Task[str]] = {}
        self._loads: set[asyncio.Task[None]] = set()
        self.assignments: queue.Queue[Assignment] = queue.Queue()
        self.nums_blocks: queue.Queue[int] = queue.Queue()
        threading.Thread(target=self._run, name="commands", daemon=True).start()

    def _run(self) -> None:
        """A rank that no longer listens must end: the leader would wait for its answers."""
        try:
            asyncio.run(self._listen())
        except BaseException as error:
            log.exception("this rank failed")
            report("failed", error=f"{type(error).__name__}: {error}")
            if self.call is not None:
                self.call.close()
            os._exit(1)

    async def _listen(self) -> None:
        loop = asyncio.get_running_loop()
        lines: AsyncIterator[bytes]
        if self.call is not None:
            lines = self.call.lines()
        else:
            lines = reader = asyncio.StreamReader(limit=_MAX_LINE_NBYTES)
            await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
        async for line in lines:
            command: dict[str, Any] = json.loads(line)
            match command:
                case {"load": words}:
                    assignment = Assignment.unpack(words)
                    self.address = assignment.address
                    self.assignments.put(assignment)
                case {"memory": words}:
                    assert self.call is not None
                    report("memory", **self.call.create_memory(**words))
                case {"num_blocks": num_blocks}:
                    self.nums_blocks.put(num_blocks)
                case {"serve": _}:
                    assert self.link is not None
                    self.link.serve()
                case {"agent": words}:
                    await self._start_agent(words)
                case {"grant": _}:
                    await self._grant()
                case {"expert_load": _}:
                    assert self.expert_load is not None
                    report("expert_load", table=self.expert_load.tolist())
                case {"experts": number, **words}:
                    self._begin(self._prepare_experts(number, words))
                case {"adapter": number, **words}:
                    self._begin(self._load_adapter(number, words))
                case {"read": number, **words}:
                    assert self._reader is not None
                    reading = loop.create_task(self._reader.read(RankRead.unpack(words["request"])))
                    self._reads[number] = reading
                    # Not by the task itself: a cancellation may come before its first line runs.
                    reading.add_done_callback(partial(self._read_ended, number))
                case {"cancel": number}:
                    if number in self._reads:
                        self._reads[number].cancel()
        # A launcher starts a rank again that failed.
        os._exit(0 if self.call is None else 1)

    def _begin(self, load: Coroutine[Any, Any, None]) -> None:
        """Run a load beside the commands."""
        task = asyncio.create_task(load)
        self._loads.add(task)
        task.add_done_callback(self._loads.discard)

    async def _start_agent(self, words: dict[str, Any]) -> None:
        if self._agent is not None:
            await self._agent.close()
        options, security = unpack_transfer_options(words["options"]), process.current().options
        if self.call is not None:
            options = self.call.transfer_options(self.address)
        else:
            security = SecurityOptions(**words["security"])
        process.use(process.Security(security, Caller(NODE, words["agent_id"])))
        self._agent = agent = await TransferAgent.start(
            options, agent_id=words["agent_id"], epoch=words["epoch"]
        )
        pool = self.pool
        assert pool is not None
        if isinstance(pool, SharedMemory):
            region = agent.register_shared(pool.fd, "pool")
        else:
            hasher = device_checksums(pool, choose_device(str(pool.device)))
            region = agent.register(pool.view(torch.uint8), name="pool", checksums=hasher)
        self._reader = AgentReader(agent, region)
        self._writable = None
        report("agent", descriptor=b64encode(agent.describe().pack()).decode(), region=region.id)

    async def _grant(self) -> None:
        """Let the leader write the pool, under a new grant. No write under the former one lands any more."""
        assert self._agent is not None
        assert self._reader is not None
        if self._writable is not None:
            await self._writable.end()
        region = self._reader.region
        self._writable = self._agent.grant_writes([Span(region.id, 0, region.nbytes)])
        report("grant", grant=self._writable.id)

    async def _load_adapter(self, number: int, words: dict[str, Any]) -> None:
        """Know an adapter that is in our blocks, or load it from its files, beside the steps. One command at
        a time."""
        pages = self.adapters
        assert pages is not None
        path, ranks = words.get("path", ""), np.array(words["ranks"], np.int32)
        load = partial(pages.load, Path(path), words["digest"]) if path else pages.place
        try:
            await asyncio.to_thread(load, ranks, number, words["blocks"])
        except AdapterRefused as error:
            report("adapter", number=number, path=str(error.path), error=error.reason)
        except Exception as error:
            log.exception("an adapter was not loaded: a defect")
            report("adapter", number=number, path=path, error=f"{type(error).__name__}: {error}")
        else:
            report("adapter", number=number)

    async def _prepare_experts(self, number: int, words: dict[str, Any]) -> None:
        """Read a layer's experts beside the steps. One command at a time."""
        assert self.experts is not None
        holders = tuple(map(tuple, words["holders"]))
        try:
            await asyncio.to_thread(self.experts.prepare, number, words["layer"], holders)
        except Exception as error:
            log.exception("experts were not read")
            report("experts", error=f"{type(error).__name__}: {error}")
        else:
            report("experts")

    def _read_ended(self, number: int, reading: asyncio.Task[str]) -> None:
        del self._reads[number]
        error = TransferError("cancelled") if reading.cancelled() else reading.exception()
        if error is None:
            report("read", number=number, transport=reading.result())
            return
        if not isinstance(error, TransferError):
            log.error("a read failed: a defect", exc_info=error)
            error = TransferError(f"{type(error).__name__}: {error}")
        report("read", number=number, error=error.facts())


def serve(assignment: Assignment, commands: LeaderCommands) -> None:
    """Load the assigned part, report it, and run steps until the leader ends them.

    Raises RankLost when the group is aborted, MoonpoolError when loading fails.
    """
    options, parallel = assignment.options, assignment.options.parallel
    use_threads(options)
    board = SharedBoard(
        SharedMemory.open(assignment.board), assignment.rank, assignment.plan.world_size, parallel.timeout_s
    )
    if commands.call is not None:
        commands.call.attach(board)
    heartbeat = board.start_heartbeat()
    try:
        _run(assignment, board, commands)
    finally:
        heartbeat.stop()
    report("ended")


def _run(assignment: Assignment, board: SharedBoard, commands: LeaderCommands) -> None:
    options = assignment.options
    config = ModelConfig.from_checkpoint(Path(assignment.model)).for_length(assignment.model_len)
    config = config.with_weights(options.weights)
    shard, device = assignment.shard(config), assignment.torch_device()
    if device.type == "cuda":
        torch.cuda.set_device(device)
        exact_products()
    clock = ExchangeClock()
    commands.link = link = open_link(assignment, config, board, clock)
    reported_s = 0.0

    def progress(done: int, total: int, name: str) -> None:
        nonlocal reported_s
        if done == total or time.monotonic() - reported_s > _PROGRESS_S:
            reported_s = time.monotonic()
            report("progress", done=done, total=total, name=name)

    model = Model(
        config,
        Checkpoint(config.path, progress, TensorSlices(config, shard)),
        dtype=TORCH_DTYPES[assignment.dtype],
        device=device,
        max_len=assignment.max_len,
        shard=shard,
        link=link,
        expert_load=_expert_load(assignment, config),
    )
    layout = shard.layout(config, options.block_size, page_dtype(options, assignment.dtype))
    num_blocks = choose_num_blocks(
        model, choose_device(str(device)), options, layout, assignment.num_blocks, is_single_rank=False
    )
    if assignment.num_blocks is None:
        report("fits", num_blocks=num_blocks)
        num_blocks = commands.nums_blocks.get()
    memory = None
    if device.type == "cpu":
        memory = _pool_memory(assignment, num_blocks * layout.block_nbytes)
    pool = pool_tensor(layout, num_blocks, device, None if memory is None else memory.array)
    commands.pool = pool if memory is None else memory
    commands.expert_load = model.expert_load
    packing = AdapterPacking(config, shard, TORCH_DTYPES[assignment.dtype], layout.block_nbytes)
    commands.adapters = model.adapters = AdapterPages(packing, pool)
    rank_step = RankStep(model, pool, link, board, clock, assignment)
    commands.experts = rank_step.experts
    report("loaded", identity=assignment.identity(config))
    try:
        run_steps(rank_step, board, device)
    finally:
        link.close()
        if memory is not None:
            memory.close()


def _pool_memory(assignment: Assignment, nbytes: int) -> SharedMemory:
    """Open the leader's memory for this pool, or create memory where the leader shares none."""
    if assignment.pool:
        return SharedMemory.open(assignment.pool)
    return SharedMemory.create(f"pool-{assignment.rank}", nbytes)


def _expert_load(assignment: Assignment, config: ModelConfig) -> Tensor | None:
    if not assignment.expert_load:
        return None
    memory = SharedMemory.open(assignment.expert_load).array
    return ExpertLoad(config, memory, assignment.plan.world_size).tables[assignment.rank]


def main(argv: Sequence[str] | None = None) -> int:
    """Return 1; the thread of the commands ends the process when the leader does."""
    global _send
    call = None
    if (rank := os.environ.get(RANK)) is not None:
        setup_logging(LogOptions(), f"rank {rank}")
        _send = own_reports()
    else:
        try:
            call = joined(argv)
        except ConfigError as error:
            print(f"moonpool ranks: {error}", file=sys.stderr)
            return 2
        _send = call.report
    try:
        return _serve_models(LeaderCommands(call))
    finally:
        if call is not None:
            call.close()


def _serve_models(commands: LeaderCommands) -> int:
    while True:
        try:
            serve(commands.assignments.get(), commands)
        except RankLost as error:
            log.warning("%s; this rank ends", error)
            return 1
        except MoonpoolError as error:
            report("failed", error=str(error))
            log.error("%s", error)
            return 1
        except Exception as error:
            log.exception("this rank failed")
            report("failed", error=f"{type(error).__name__}: {error}")
            return 1


if __name__ == "__main__":
    sys.exit(main())

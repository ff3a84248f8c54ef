"""The engine of a node: sequences in, events out, step by step."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from moonpool.engine.adapters.loader import AdapterLoader
from moonpool.engine.adapters.packing import AdapterPacking
from moonpool.engine.adapters.residency import AdapterResidency
from moonpool.engine.adapters.shapes import AdapterKeys, AdapterShapes
from moonpool.engine.batching.reservations import AdapterRoom, Reservations, Reserving
from moonpool.engine.batching.scheduler import Scheduler
from moonpool.engine.batching.sequence import FinishReason, Sequence, State
from moonpool.engine.batching.step_plan import StepEvent
from moonpool.engine.checkpoint.config import ModelConfig
from moonpool.engine.collectives.exchange_clock import ExchangeClock
from moonpool.engine.device.device import Device
from moonpool.engine.device.selection import TORCH_DTYPES
from moonpool.engine.device.threads import use_threads
from moonpool.engine.errors import DeviceLost, DuplicateSequence, EngineClosed, RankLost
from moonpool.engine.execution.cost_profile import NOT_MEASURED, StepCosts, measure
from moonpool.engine.execution.runner import ModelRunner
from moonpool.engine.execution.step_loop import StepLoop
from moonpool.engine.memory.block_pool import BlockPool
from moonpool.engine.ranks.group import RankGroup
from moonpool.engine.ranks.leader import ParallelRunner, StepTimes
from moonpool.engine.ranks.rank_listener import RankListener
from moonpool.engine.ranks.rank_times import RankTimes
from moonpool.engine.setup import EngineSetup
from moonpool.engine.sharding.expert_placement import ExpertPlacement
from moonpool.engine.speculation.draft_model import DraftModel
from moonpool.engine.speculation.draft_setup import choose_draft
from moonpool.engine.speculation.speculator import Speculator
from moonpool.engine.stats import EngineStats
from moonpool.runtime.config.options import EngineOptions, ModelOptions
from moonpool.runtime.errors import ConfigError
from moonpool.runtime.machine.processor import usable_cores
from moonpool.runtime.service.load_progress import Progress

# How often an adapter looks whether a sequence that is too long beside adapters has ended.
_POLL_S = 0.05


class Engine:
    """Continuous batching of one model over one paged pool, inside an asyncio loop.

    All bookkeeping happens on the loop's thread; a worker thread runs the tensors of one step. Set
    ``on_step`` before ``start``: it is called on the loop after each step with all its events, in order, and
    must not block. An exception it raises stops the engine; ``wait`` raises it.

    A sequence is added, yields events, and ends with a ``finish_reason``, which releases its blocks. A
    ``prefill_only`` sequence ends with its first token and keeps its blocks until ``release``. A decode node
    calls ``reserve``, fills the blocks from a peer, calls ``seal_received``, appends the first token, and
    then adds the sequence.
    """

    def __init__(
        self,
        model: Path | ModelConfig,
        options: EngineOptions,
        model_options: ModelOptions | None = None,
        *,
        pool_memory: npt.NDArray[np.uint8] | None = None,
        device: Device | None = None,
        clock: Callable[[], float] = time.monotonic,
        ranks: RankGroup | None = None,
        listener: RankListener | None = None,
        separate_pools: bool = False,
        decodes: bool = True,
        experts: ExpertPlacement | None = None,
    ) -> None:
        """Read the checkpoint's configuration; ``start`` reads the weights.

        ``ranks``: a started group of another engine that has closed; None: start one where the plan needs it.
        ``separate_pools``: see ``RankGroup``. ``listener``: for ranks of other machines, needed with
        ``options.parallel.hosts``. ``decodes``: see ``EngineSetup.choose``. ``experts``: see
        ``EngineSetup.placing``.

        ``pool_memory``: uint8, memory for rank 0's part of the KV pool on a CPU; None: allocated here, from
        ``options.pool_nbytes`` for all ranks. ``device``: None: the one ``model_options`` name.

        On a GPU with ``options.pool_nbytes`` 0 the pool is sized after loading: ``pool`` and
        ``max_model_len`` exist from ``start`` on.

        Raises CheckpointError, UnsupportedModel, PoolTooSmall, or ConfigError for a device that does not
        exist or a draft model of other tokens.
        """
        chosen = model_options or ModelOptions()
        setup = EngineSetup.choose(model, options, chosen, device, decodes=decodes)
        self.setup = setup = setup.placing(experts)
        self._draft = choose_draft(setup, chosen) if options.speculative.method == "draft" else None
        self.config, self.options, self.device = setup.config, setup.options, setup.device
        self.dtype, self.plan = setup.dtype, setup.plan
        self.layout = setup.whole_layout
        self.shards = self.plan.shards(self.config)
        self.rank_layouts = setup.rank_layouts
        self.ranks = ranks
        self._keep_ranks = ranks is not None
        self._listener = listener
        self._separate_pools = separate_pools
        self.model_fingerprint = setup.fingerprint()
        self.on_step: Callable[[list[StepEvent]], None] | None = None
        self._pool_memory = pool_memory
        self._clock = clock
        self._num_blocks = setup.num_blocks(pool_memory)
        if self._num_blocks is not None:
            self._create_pool(self._num_blocks)
        self._reservations = Reservations(self._take, self._give_back, self._wake_loop)
        self._num_expected_blocks = 0
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="moonpool-step")
        self.adapter_reader = ThreadPoolExecutor(1, thread_name_prefix="moonpool-adapters")
        self._packings = [
            AdapterPacking(self.config, shard, TORCH_DTYPES[self.dtype], layout.block_nbytes)
            for shard, layout in zip(self.shards, self.rank_layouts, strict=True)
        ]
        self.adapter_shapes = AdapterShapes(self._packings)
        self._loop: StepLoop | None = None
        self._task: asyncio.Task[None] | None = None
        self._placing = asyncio.Lock()
        self.num_moved_layers = 0  # layers with experts that were placed anew
        self._closed = False

    def _create_pool(self, num_blocks: int) -> None:
        options = self.options
        self.max_model_len = min(self.setup.max_len, num_blocks * options.block_size)
        self.pool = BlockPool(num_blocks, options.block_size, on_release=self._wake_loop)
        self._scheduler = Scheduler(
            self.pool,
            max_batch_size=options.max_batch_size,
            max_batch_tokens=options.max_batch_tokens,
            max_len=self.max_model_len,
            window=self.config.widest_window,
            packing=self.setup.packing,
            num_micro_batches=self.setup.steps_in_flight,
        )

    def observe_full_blocks(self, observe: Callable[[Sequence, int], None]) -> None:
        """Call ``observe`` before full blocks are sealed, with the sequence and the index of the first of
        them. Started."""
        self._scheduler.on_full = observe

    @property
    def pool_tensor(self) -> Tensor:
        """The pool's bytes on the device, uint8 [num_blocks, block_nbytes]. From ``start`` on."""
        assert self._loop is not None, "the pool exists from start on"
        pool = self._loop.runner.pool
        return pool.view(torch.uint8).view(pool.shape[0], -1)

    async def start(self, progress: Progress | None = None) -> None:
        """Load the weights, create the pool, measure the step costs, begin stepping.

        ``progress(nbytes_done, nbytes_total, tensor_name)`` is called on the loop's thread while loading.
        Raises CheckpointError, which names the bad tensor, or GpuMemoryShort where the pool does not fit. The
        engine can then only be closed.
        """
        # Steps run on this thread and on the worker.
        use_threads(self.options)
        loop = asyncio.get_running_loop()

        def report(done: int, total: int, name: str) -> None:
            if progress is not None:
                loop.call_soon_threadsafe(progress, done, total, name)

        # Before the model: on a GPU its pool takes the memory that is left.
        draft = await loop.run_in_executor(self._worker, self._load_draft)
        if self.plan.world_size == 1:
            runner = await loop.run_in_executor(
                self._worker, self.setup.load, self._num_blocks, self._pool_memory, report
            )
        else:
            runner = await self._open_group(report)
        costs = await loop.run_in_executor(self._worker, measure, runner, self._clock)
        runner.forget_expert_load()
        if self.ranks is not None:
            await self.ranks.forget_expert_load()
            self.ranks.serve()
        if self._num_blocks is None:
            self._create_pool(runner.num_blocks)
        self._scheduler.timely_tokens = costs.timely_tokens
        if self.options.speculative.method != "off":
            self._scheduler.speculator = self._speculator(costs, draft)
        self._loop = StepLoop(
            self._scheduler, self._reservations, runner, costs, self._worker, self._clock, self._report_step
        )
        self.adapter_loader = AdapterLoader(
            runner.adapters,
            self.adapter_shapes,
            self._adapter_keys(),
            self.ranks.ranks if self.ranks is not None else (),
            self.shards,
            self.adapter_reader,
        )
        self.adapters = AdapterResidency(
            self.pool, self.adapter_loader, self._adapter_room, clock=self._clock
        )
        if self.ranks is not None:
            self.ranks.on_lost = self._loop.fail
        self._task = loop.create_task(self._run(self._loop), name="engine")

    def _adapter_keys(self) -> AdapterKeys | None:
        """Return the keys of adapters in the node's store. None: it takes ranks with the same KV for copies
        of one another, but their rows differ; or blocks do not begin at a line, which moves the rows."""
        nbytes = sum(layout.block_nbytes for layout in self.rank_layouts)
        if nbytes != self.layout.block_nbytes or not all(one.starts_at_lines for one in self._packings):
            return None
        return AdapterKeys(self.config, self.layout, self.dtype, self.shards)

    def _load_draft(self) -> DraftModel | None:
        if self._draft is None:
            return None
        runner = self._draft.load(self._draft.num_blocks(None), None)
        return DraftModel(runner, measure(runner, self._clock), self._clock)

    def _speculator(self, costs: StepCosts, draft: DraftModel | None) -> Speculator:
        def row_cost(decodes: list[Sequence]) -> float:
            return costs.draft_row_cost(decodes, draft.step_s(decodes) if draft is not None else 0.0)

        return Speculator(self.options.speculative, row_cost, costs.decode_s, draft)

    async def _open_group(self, progress: Progress) -> ModelRunner:
        """Load all ranks' parts at once: ours here, the others in their processes."""
        parallel = self.options.parallel
        assignment = self.setup.assignment(self._num_blocks)
        if self.ranks is None:
            assert parallel.hosts == 1 or self._listener is not None, "several hosts need a listener"
            self.ranks = RankGroup(
                self.plan.world_size, parallel.timeout_s, self._listener, separate_pools=self._separate_pools
            )
            await self.ranks.start(self.options.compute_threads(usable_cores()))
        return await self.ranks.open(
            self.config,
            assignment,
            self.device,
            self._worker,
            pool_memory=self._pool_memory,
            progress=progress,
        )

    def observe_steps(self, observe: Callable[[StepTimes], None] | None) -> ExchangeClock:
        """Call ``observe`` with the times of each step, in the worker's thread. Several ranks, started.
        Returns the clock of rank 0's exchanges."""
        assert self._loop is not None
        assert isinstance(self._loop.runner, ParallelRunner)
        self._loop.runner.on_times = observe
        return self._loop.runner.clock

    def expert_load(self) -> npt.NDArray[np.int64]:
        """Return the rows computed by each expert since the start, [num_layers, num_experts]: a token is a
        row of each of its top_k experts. Dense layers are 0. Started. Ranks without shared memory count as
        of the last ``refresh_expert_load``."""
        assert self._loop is not None
        return self._loop.runner.expert_load()[:, :-1]

    def num_dropped_choices(self) -> int:
        """Return the choices of experts that were dropped since the start, for ``expert_capacity``: counted
        as ``expert_load``."""
        assert self._loop is not None
        return int(self._loop.runner.expert_load()[:, -1:].sum())

    async def refresh_expert_load(self) -> None:
        """Fetch the expert load of ranks without shared memory. Started. Raises RankLost."""
        if self.ranks is not None:
            await self.ranks.refresh_expert_load()

    async def place_experts(self, placement: ExpertPlacement) -> int:
        """Move experts to the ranks of ``placement`` while steps run. Returns how many layers changed.

        A layer after the other: each rank reads its own, and all switch at the beginning of a step and drop
        those before. Started. Another engine begins without it, unless it is given as ``experts``.

        Raises ConfigError for a placement of other layers, experts or ranks, before anything has changed;
        ExpertsRefused when a rank cannot read them, or RankLost: layers that were moved stay so.
        """
        moe = self.config.moe
        if self.plan.ep == 1 or self.ranks is None or moe is None:
            raise ConfigError(
                "engine.parallel.ep is 1: all experts are on each rank and cannot be moved",
                "engine.parallel.ep",
            )
        placement.check(self.config.num_layers, moe.num_experts, self.plan.ep)
        async with self._placing:
            before, changed = list(self.expert_placement.layers), 0
            for layer in moe.layers:
                if before[layer] == placement.layers[layer]:
                    continue
                await self.ranks.switch_experts(layer, placement.layers[layer])
                before[layer] = placement.layers[layer]
                self.plan = replace(self.plan, experts=ExpertPlacement(self.plan.ep, tuple(before)))
                changed += 1
                self.num_moved_layers += 1
        return changed

    @property
    def remote_hosts(self) -> list[str]:
        """The names of the other machines with ranks. From ``start`` on."""
        far = self.ranks.far.values() if self.ranks is not None else ()
        return list(dict.fromkeys(rank.where for rank in far))

    @property
    def expert_placement(self) -> ExpertPlacement:
        """The ranks of each expert."""
        return self.plan.expert_placement(self.config)

    def exchange_clock(self) -> ExchangeClock | None:
        """Return the times of rank 0's exchanges; None with a single rank. Started."""
        assert self._loop is not None
        runner = self._loop.runner
        return runner.clock if isinstance(runner, ParallelRunner) else None

    def rank_times(self) -> RankTimes | None:
        """Return the times of all ranks; None with a single rank, or while no model is loaded."""
        runner = self._loop.runner if self._loop is not None else None
        return runner.rank_times if isinstance(runner, ParallelRunner) else None

    async def _run(self, loop: StepLoop) -> None:
        try:
            await loop.run()
        except (RankLost, DeviceLost) as error:
            lost: RankLost | DeviceLost = error
            if self.ranks is not None and isinstance(error, RankLost):
                lost = await self.ranks.explain(error)
            self._report_step(
                [
                    StepEvent(sequence, 0, error=str(lost), ended_life=True, lost=lost.failure)
                    for sequence in loop.ended_in
                ]
            )
            if lost is not error:
                raise lost from error
            raise

    async def halt(self) -> None:
        """Wait for the running step and end every sequence as CANCELLED. Blocks stay readable until
        ``close``. Idempotent."""
        self._closed = True
        if self._loop is not None and self._task is not None:
            self._loop.closing = True
            self._loop.wake()
            await asyncio.wait((self._task,))

    async def close(self) -> None:
        """``halt``, and free everything. Idempotent."""
        await self.halt()
        if self.ranks is not None:
            self.ranks.on_lost = None
            if self._keep_ranks and self.ranks.lost is None:
                await self.ranks.unload()
            else:
                await self.ranks.close()
        self._worker.shutdown(wait=False)
        self.adapter_reader.shutdown(wait=False)
        self._reservations.close()

    async def wait(self) -> None:
        """Return when the engine is closed. Raises the error that stopped it, such as RankLost or DeviceLost.

        Before these two, ``on_step`` has got an ``ended_life`` event for each sequence of the step that ended
        in them."""
        if self._task is not None:
            await asyncio.shield(self._task)

    def add(self, sequence: Sequence, *, prefill_only: bool = False) -> None:
        """Queue the sequence; its events begin with the next step.

        The engine takes over the blocks in its ``block_table`` (from ``reserve`` or from ``pool``). With
        ``num_computed_tokens == num_tokens - 1`` it joins the decode batch at once; otherwise the remaining
        tokens are computed, except those of further cached blocks.

        Raises SequenceTooLong, UnknownToken, DuplicateSequence or EngineClosed; the sequence and its blocks
        are unchanged then.
        """
        loop = self._running()
        if sequence.key in loop.sequences:
            raise DuplicateSequence(*sequence.key)
        sequence.check(self.max_model_len, self.config.vocab_size)
        assert sequence.sampling.structure is None or sequence.automaton is not None
        sequence.prefill_only = prefill_only
        stop_ids = sequence.sampling.stop_token_ids
        if not sequence.sampling.ignore_eos:
            stop_ids |= self.config.eos_token_ids
        # A token that cannot occur stops nothing.
        sequence.stop_ids = frozenset(i for i in stop_ids if i < self.config.vocab_size)
        loop.sequences[sequence.key] = sequence
        self._scheduler.add(sequence)
        loop.wake()

    def cancel(self, request_id: str, attempt: int) -> bool:
        """Stop a sequence; its blocks are released at once, or after the running step.

        The next ``on_step`` reports it as CANCELLED. Return False for an unknown sequence.
        """
        loop = self._loop
        sequence = None if loop is None else loop.sequences.get((request_id, attempt))
        if loop is None or sequence is None or sequence.cancelled:
            return False
        if loop.is_stepping(sequence):
            sequence.cancelled = True
        else:
            self._scheduler.finish(sequence, FinishReason.CANCELLED, loop.outbox)
            del loop.sequences[sequence.key]
            loop.wake()
        return True

    def withdraw(self, sequence: Sequence) -> bool:
        """Take a decoding sequence out of the batch, with its blocks, for ``resume`` or ``release``.

        Return True if it is done. False: its step runs; once it has ended, ``on_step`` reports the sequence
        as KEPT_FOR_TRANSFER, or finished. The state of any other sequence is unchanged, with False.
        """
        loop = self._loop
        if loop is None or sequence.state is not State.DECODING or sequence.cancelled:
            return False
        if loop.is_stepping(sequence):
            sequence.withdrawn = True
            return False
        self._scheduler.withdraw(sequence)
        return True

    def resume(self, sequence: Sequence) -> None:
        """Undo ``withdraw``: the sequence goes on where it was. Others, and ended ones, are unchanged."""
        sequence.withdrawn = False
        if sequence.state is State.KEPT_FOR_TRANSFER and self._loop is not None and not self._closed:
            self._scheduler.add(sequence)
            self._loop.wake()

    def release(self, sequence: Sequence) -> None:
        """Release the blocks of a reserved, withdrawn or ``prefill_only`` sequence. Idempotent."""
        if sequence.state in (State.NEW, State.KEPT_FOR_TRANSFER):
            self._scheduler.release(sequence)
            if self._loop is not None and self._loop.sequences.get(sequence.key) is sequence:
                del self._loop.sequences[sequence.key]

    def take_prefilled(self, sequence: Sequence, prefilled: Sequence) -> None:
        """Move the blocks of ``prefilled``, a ``prefill_only`` sequence that has its first token, to
        ``sequence``, a new one of the same tokens without that token. Nothing is copied; ``prefilled`` ends.
        """
        assert sequence.state is State.NEW and not sequence.block_table
        assert prefilled.state is State.KEPT_FOR_TRANSFER
        sequence.take_blocks(prefilled)
        self.release(prefilled)

    def reserve(self, sequence: Sequence) -> bool:
        """Allocate blocks for the sequence's tokens and one more, cached ones first, without queueing it.

        Afterwards ``num_computed_tokens`` counts the cached tokens; the caller fills the blocks after them.
        Return False and change nothing when there is no room, or others wait for room (see ``reserved``).
        """
        if self._reservations or self._scheduler.waiting:
            return False
        return self._take_blocks(sequence)

    async def reserved(self, sequence: Sequence) -> None:
        """Wait until ``reserve`` succeeds, in the order of turns.

        Raises as ``add``; EngineClosed also when the engine stops meanwhile. After an error or a cancellation
        the sequence has no blocks.
        """
        loop = self._running()
        sequence.check(self.max_model_len, self.config.vocab_size)
        if not self.reserve(sequence):
            loop.wake()  # there may be room, and its turn before the others'
            await self._reservations.wait(sequence)

    def extend(self, sequence: Sequence) -> bool:
        """Allocate blocks for tokens appended to a reserved sequence, as ``reserve`` does."""
        return self._scheduler.extend(sequence)

    @contextmanager
    def expecting(self, sequence: Sequence) -> Iterator[None]:
        """Count the sequence's blocks as expected in ``stats``, inside the ``with``."""
        num_blocks = -(-(sequence.num_tokens + 1) // self.pool.block_size)
        self._num_expected_blocks += num_blocks
        try:
            yield
        finally:
            self._num_expected_blocks -= num_blocks

    def seal_received(self, sequence: Sequence, num_tokens: int) -> None:
        """Seal the full blocks of a reserved sequence after the KV of its first ``num_tokens`` tokens
        arrived.

        Where the pool has an equal block already, that one replaces ours in the block table.
        """
        assert sequence.state is State.NEW
        assert num_tokens <= sequence.num_tokens
        sequence.num_computed_tokens = max(num_tokens, sequence.num_computed_tokens)
        self._scheduler.seal_computed(sequence)

    def stats(self) -> EngineStats:
        return EngineStats.collect(
            self._scheduler, self._loop, len(self._reservations), self._num_expected_blocks
        )

    def profile(self) -> dict[str, float]:
        """Return the fields of ``protos.Profile``: measured at the start, corrected by every step."""
        return self._costs.coefficients()

    def published_profile(self) -> dict[str, float]:
        """Return the fields of ``protos.Profile`` as conductors get them: measured at the start."""
        return self._costs.published()

    @property
    def _costs(self) -> StepCosts:
        return self._loop.costs if self._loop else NOT_MEASURED

    def _running(self) -> StepLoop:
        if self._loop is None or self._task is None or self._task.done() or self._closed:
            raise EngineClosed("the engine is not running")
        return self._loop

    async def _adapter_room(self, num_blocks: int, request: Sequence) -> list[int]:
        """See ``AdapterResidency``. Raises EngineClosed."""
        loop = self._running()
        while not self._leave_room_for_adapters(loop):  # until the end of a sequence  # noqa: ASYNC110
            await asyncio.sleep(_POLL_S)
        room = AdapterRoom(num_blocks, self.plan.cp, request.tenant, request.rank, request.order)
        if self._reservations or self._scheduler.waiting or not room.take(self.pool):
            loop.wake()
            try:
                await self._reservations.wait(room)
            finally:
                # The room may have exchanged its turn; the request's former one is another's then.
                request.order = room.order
        return room.block_ids

    def _leave_room_for_adapters(self, loop: StepLoop) -> bool:
        """Once there are adapters, no sequence may be longer than what they leave of the pool. Return False
        while one is, from before."""
        limit = (self.pool.num_blocks - self.adapters.most_blocks) * self.pool.block_size
        self.max_model_len = min(self.max_model_len, limit)
        longest = max((sequence.num_tokens for sequence in loop.sequences.values()), default=0)
        if max(longest, self._reservations.longest) >= limit:
            return False
        self._scheduler.max_len = self.max_model_len
        return True

    def _take(self, one: Reserving) -> bool:
        return one.take(self.pool) if isinstance(one, AdapterRoom) else self._take_blocks(one)

    def _give_back(self, one: Reserving) -> None:
        if isinstance(one, AdapterRoom):
            self.pool.release(one.block_ids)
        else:
            self.release(one)

    def _take_blocks(self, sequence: Sequence) -> bool:
        return self._scheduler.take_blocks(sequence, sequence.num_tokens + 1, sequence.num_tokens)

    def _report_step(self, events: list[StepEvent]) -> None:
        if self.on_step is not None:
            self.on_step(events)

    def _wake_loop(self) -> None:
        if self._loop is not None:
            self._loop.wake()

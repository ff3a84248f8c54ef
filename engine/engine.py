"""The engine of a node: sequences in, events out, one step after the other."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from moonpool.engine.batching.events import StepEvent
from moonpool.engine.batching.reservations import Reservations
from moonpool.engine.batching.scheduler import Scheduler
from moonpool.engine.batching.sequence import FinishReason, Sequence, State
from moonpool.engine.checkpoint.config import ModelConfig
from moonpool.engine.checkpoint.weights import fingerprint
from moonpool.engine.collectives.exchange_clock import ExchangeClock
from moonpool.engine.device.device import Device
from moonpool.engine.device.selection import choose_device, choose_dtype, page_dtype
from moonpool.engine.errors import (
    DuplicateSequence,
    EngineClosed,
    PoolTooSmall,
    RankLost,
    SequenceTooLong,
    UnknownToken,
)
from moonpool.engine.execution.cost_profile import NOT_MEASURED, measure
from moonpool.engine.execution.runner import ModelRunner
from moonpool.engine.execution.step_loop import StepLoop
from moonpool.engine.memory.block_pool import BlockPool
from moonpool.engine.ranks.assignment import Assignment
from moonpool.engine.ranks.group import RankGroup
from moonpool.engine.ranks.hosts.listener import HostListener
from moonpool.engine.ranks.leader import ParallelRunner, StepTimes
from moonpool.engine.ranks.link_factory import choose_link
from moonpool.engine.sharding.expert_placement import ExpertPlacement
from moonpool.engine.sharding.parallel_plan import ParallelPlan
from moonpool.kvstore.blocks.layout import KVLayout
from moonpool.runtime.config.options import EngineOptions, ModelOptions
from moonpool.runtime.errors import ConfigError
from moonpool.runtime.service.load_progress import Progress


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counts at one moment; totals are since the start."""

    num_running: int
    num_waiting: int  # queued, and waiting for blocks to be reserved
    num_queued_tokens: int  # prompt tokens still to compute
    num_blocks: int
    num_free_blocks: int  # cached ones included: they can be evicted
    num_expected_blocks: int  # that will be reserved soon
    num_used_blocks: int
    num_cached_blocks: int
    num_steps: int
    num_failed_steps: int
    num_preemptions: int
    step_s: float  # the last step

    @property
    def num_available_blocks(self) -> int:
        """For those who are not expected yet."""
        return max(self.num_free_blocks - self.num_expected_blocks, 0)


class Engine:
    """Continuous batching of one model over one paged pool, inside an asyncio loop.

    All bookkeeping happens on the loop's thread; a worker thread only ever runs the tensors of one step. Set
    ``on_step`` before ``start``: it is called on the loop after each step with all its events, in order, and
    must not block. An exception it raises stops the engine (``wait`` raises it): its owner can no longer be
    told anything.

    A sequence's life: ``add`` → events … → an event with a finish_reason, after which its blocks are
    released. A ``prefill_only`` sequence ends with its first token instead, and holds its blocks until
    ``release``. A decode node first takes blocks by ``reserve``, fills them from a peer, tells so by
    ``seal_received``, appends the token that came with them, and then adds the sequence.
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
        hosts: HostListener | None = None,
        separate_pools: bool = False,
    ) -> None:
        """Reads the checkpoint's configuration, not yet its weights.

        ``ranks``: a started group of another engine that has closed; None: start one where the plan needs it.
        ``separate_pools``: see ``RankGroup``. ``hosts``: the listener for the other machines, needed with
        ``options.parallel.hosts``.

        ``pool_memory``: uint8, the memory the KV pool (rank 0's part) lives in (on a CPU; rounded down to
        whole blocks); None: the engine's own, ``options.pool_nbytes`` for all ranks. ``device``: None means
        what ``model_options`` say.

        On a GPU with ``options.pool_nbytes`` 0, ``pool`` and ``max_model_len`` exist from ``start`` on: what
        fits is known with the weights loaded.

        Raises CheckpointError, UnsupportedModel, PoolTooSmall, or ConfigError for a device that is not there.
        """
        self.config = model if isinstance(model, ModelConfig) else ModelConfig.from_checkpoint(model)
        self.options = options
        model_options = model_options or ModelOptions()
        self.device = choose_device(model_options.device) if device is None else device
        self.dtype = choose_dtype(model_options.dtype, self.config, self.device)
        self.layout = KVLayout(
            num_layers=self.config.num_layers,
            num_kv_heads=self.config.num_kv_heads,
            block_size=options.block_size,
            head_dim=self.config.head_dim,
            dtype=page_dtype(options, self.dtype),
        )
        self.plan = ParallelPlan.from_options(options.parallel, self.config, self.device.torch)
        self.shards = self.plan.shards(self.config)
        self.rank_layouts = [
            shard.layout(self.config, options.block_size, self.layout.dtype) for shard in self.shards
        ]
        self.ranks = ranks
        self._keep_ranks = ranks is not None
        self._hosts = hosts
        self._separate_pools = separate_pools
        self.model_fingerprint = fingerprint(self.config.path)
        self.on_step: Callable[[list[StepEvent]], None] | None = None
        self._on_full: Callable[[Sequence, int], None] | None = None
        self._pool_memory = pool_memory
        self._clock = clock
        self._longest = min(model_options.max_model_len or self.config.max_position, self.config.max_position)
        self._num_blocks = self._known_num_blocks()
        if self._num_blocks is not None:
            self._divide_pool(self._num_blocks)
        self._reservations = Reservations(self._take_for, self.release)
        self._num_expected_blocks = 0
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="moonpool-step")
        self._loop: StepLoop | None = None
        self._task: asyncio.Task[None] | None = None
        self._closed = False

    def _known_num_blocks(self) -> int | None:
        """None: as many as will fit. Raises PoolTooSmall."""
        block_nbytes = sum(layout.block_nbytes for layout in self.rank_layouts)
        if self._pool_memory is not None:
            nbytes, block_nbytes = self._pool_memory.nbytes, self.rank_layouts[0].block_nbytes
        elif self.device.memory() is None:
            nbytes = self.options.host_pool_nbytes
        elif not self.options.pool_nbytes:
            if self.plan.world_size > 1:
                # Every rank must have as many, and none knows what the others have room for.
                raise ConfigError(
                    "engine.pool_nbytes must be set where engine.parallel is", "engine.pool_nbytes"
                )
            return None
        else:
            nbytes = self.options.pool_nbytes
        if nbytes < block_nbytes:
            raise PoolTooSmall(nbytes, block_nbytes)
        return nbytes // block_nbytes

    def _divide_pool(self, num_blocks: int) -> None:
        options = self.options
        self.max_model_len = min(self._longest, num_blocks * options.block_size)
        self.pool = BlockPool(num_blocks, options.block_size, on_release=self._freed)
        self._scheduler = Scheduler(
            self.pool,
            max_batch_size=options.max_batch_size,
            max_batch_tokens=options.max_batch_tokens,
            max_len=self.max_model_len,
        )
        self._scheduler.on_full = self._on_full

    @property
    def on_full(self) -> Callable[[Sequence, int], None] | None:
        """Called with a sequence and the first of its blocks that are full now, before they are sealed."""
        return self._on_full

    @on_full.setter
    def on_full(self, callback: Callable[[Sequence, int], None] | None) -> None:
        self._on_full = self._scheduler.on_full = callback

    @property
    def pool_tensor(self) -> Tensor:
        """The pool's bytes where they are: uint8 [num_blocks, block_nbytes]. From ``start`` on."""
        assert self._loop is not None, "the pool is laid out by start"
        pool = self._loop.runner.pool
        return pool.view(torch.uint8).view(pool.shape[0], -1)

    async def start(self, progress: Progress | None = None) -> None:
        """Load the weights, lay the pool out, measure the cost profile, begin stepping.

        ``progress(nbytes_done, nbytes_total, tensor_name)`` is called on the loop's thread while loading.
        Raises CheckpointError naming the tensor that is missing, truncated or of the wrong shape; the engine
        can then only be closed. So it does GpuMemoryShort where the pool does not fit beside them.
        """
        # OpenMP keeps its thread count per calling thread, and steps run on this one and on the worker.
        torch.set_num_threads(self.options.threads)
        loop = asyncio.get_running_loop()

        def report(done: int, total: int, name: str) -> None:
            if progress is not None:
                loop.call_soon_threadsafe(progress, done, total, name)

        if self.plan.world_size == 1:
            runner = await loop.run_in_executor(self._worker, self._load, report)
        else:
            runner = await self._open_group(report)
        costs = await loop.run_in_executor(self._worker, measure, runner, self._clock)
        runner.forget_expert_load()
        if self.ranks is not None:
            await self.ranks.forget_expert_load()
        if self._num_blocks is None:
            self._divide_pool(runner.num_blocks)
        self._loop = StepLoop(
            self._scheduler, self._reservations, runner, costs, self._worker, self._clock, self._report
        )
        if self.ranks is not None:
            self.ranks.on_lost = self._loop.fail
        self._task = loop.create_task(self._run(self._loop), name="engine")

    def _load(self, progress: Progress) -> ModelRunner:
        return ModelRunner(
            self.config,
            self.options,
            dtype=self.dtype,
            device=self.device,
            num_blocks=self._num_blocks,
            max_len=self._longest,
            pool_memory=self._pool_memory,
            progress=progress,
        )

    async def _open_group(self, progress: Progress) -> ModelRunner:
        """Have the other ranks load their parts while we load ours."""
        assert self._num_blocks is not None
        parallel = self.options.parallel
        assignment = Assignment(
            rank=0,
            tp=self.plan.tp,
            pp=self.plan.pp,
            cp=self.plan.cp,
            ep=self.plan.ep,
            model=str(self.config.path.resolve()),
            dtype=self.dtype,
            device=self.device.torch.type,
            link=choose_link(parallel.link, self.device.torch, parallel.hosts),
            options=self.options,
            num_blocks=self._num_blocks,
            max_len=self.max_model_len,
            first_device=self.device.torch.index or 0,
            experts=asdict(self.plan.experts) if self.plan.experts is not None else None,
        )
        if self.ranks is None:
            assert parallel.hosts == 1 or self._hosts is not None, "nobody can come in"
            self.ranks = RankGroup(
                self.plan.world_size, parallel.timeout_s, self._hosts, separate_pools=self._separate_pools
            )
            await self.ranks.start(self.options.threads)
        return await self.ranks.open(
            self.config,
            assignment,
            self.device,
            self._worker,
            pool_memory=self._pool_memory,
            progress=progress,
        )

    def observe_steps(self, observe: Callable[[StepTimes], None] | None) -> ExchangeClock:
        """Have ``observe`` called with where each step's time went, in the worker's thread; of the clock
        returned, what this rank's exchanges with others took. Started, and with several ranks."""
        assert self._loop is not None
        runner = self._loop.runner
        assert isinstance(runner, ParallelRunner)
        runner.on_times = observe
        return runner.clock

    def expert_load(self) -> npt.NDArray[np.int64]:
        """Rows that each expert of each layer was given since the start, [num_layers, num_experts]: a row is
        one of the experts that a token chose. 0 in dense layers. Of ranks that share no memory with us, as it
        was at the last ``refresh_expert_load``. Started."""
        assert self._loop is not None
        return self._loop.runner.expert_load()

    async def refresh_expert_load(self) -> None:
        """Ask the ranks that share no memory with us for theirs. Started. Raises RankLost."""
        if self.ranks is not None:
            await self.ranks.refresh_expert_load()

    @property
    def remote_hosts(self) -> list[str]:
        """The machines of our ranks, but for this one. From ``start`` on."""
        return [host.name for host in self.ranks.remote_hosts] if self.ranks is not None else []

    @property
    def expert_placement(self) -> ExpertPlacement:
        """Which ranks hold which experts."""
        return self.plan.expert_placement(self.config)

    def exchange_clock(self) -> ExchangeClock | None:
        """What rank 0's exchanges with others took; None where it is alone. Started."""
        assert self._loop is not None
        runner = self._loop.runner
        return runner.clock if isinstance(runner, ParallelRunner) else None

    async def _run(self, loop: StepLoop) -> None:
        try:
            await loop.run()
        except RankLost as error:
            if self.ranks is not None:
                lost = await self.ranks.explain(error)
                if lost is not error:
                    raise lost from error
            raise

    async def halt(self) -> None:
        """Let the step in flight end, finish every sequence as CANCELLED. The blocks stay, wherever they are,
        until ``close``. Idempotent."""
        self._closed = True
        if self._loop is not None and self._task is not None:
            self._loop.closing = True
            self._loop.wake()
            await asyncio.wait((self._task,))

    async def close(self) -> None:
        """``halt``, and let everything go. Idempotent."""
        await self.halt()
        if self.ranks is not None:
            self.ranks.on_lost = None
            if self._keep_ranks and self.ranks.lost is None:
                await self.ranks.leave()
            else:
                await self.ranks.close()
        self._worker.shutdown(wait=False)
        self._reservations.close()

    async def wait(self) -> None:
        """Return when the engine was closed; raise what stopped it otherwise, such as RankLost."""
        if self._task is not None:
            await asyncio.shield(self._task)

    def add(self, sequence: Sequence, *, prefill_only: bool = False) -> None:
        """Queue the sequence; its events begin with the next step.

        Blocks in its ``block_table`` (from ``reserve``, or acquired and allocated from ``pool``) become the
        engine's to release. With ``num_computed_tokens == num_tokens - 1`` it joins the decode batch at once;
        with less, the rest is computed, after whatever more of its prefix the pool holds.

        Raises SequenceTooLong, UnknownToken, DuplicateSequence or EngineClosed; the sequence, and its blocks,
        are then untouched.
        """
        loop = self._running()
        if sequence.key in loop.sequences:
            raise DuplicateSequence(*sequence.key)
        self._check(sequence)
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
        """Stop a sequence wherever it is; its blocks are released at once, or after the step it is in.

        The next ``on_step`` reports it as CANCELLED. False when the engine does not know it (any more).
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

    def release(self, sequence: Sequence) -> None:
        """Let go of the blocks of a sequence only reserved, or prefilled only. Idempotent."""
        if sequence.state in (State.NEW, State.KEPT_FOR_TRANSFER):
            self._scheduler.release(sequence)
            if self._loop is not None:
                self._loop.sequences.pop(sequence.key, None)

    def reserve(self, sequence: Sequence) -> bool:
        """Take blocks for the sequence's tokens and one more, cached ones first, without queueing it.

        Afterwards ``num_computed_tokens`` counts what the pool had already; the blocks after that are to be
        filled. False, and nothing changed, when there is no room now or others wait for room (see
        ``reserved``).
        """
        if self._reservations or self._scheduler.waiting:
            return False
        return self._take_for(sequence)

    async def reserved(self, sequence: Sequence) -> None:
        """Wait until ``reserve`` succeeds, in order of (priority, arrival). Cancelled, it holds nothing.

        Raises as ``add`` does, EngineClosed also when the engine stops meanwhile; nothing is held then.
        """
        self._running()
        self._check(sequence)
        if not self.reserve(sequence):
            await self._reservations.wait(sequence)

    @contextmanager
    def expecting(self, sequence: Sequence) -> Iterator[None]:
        """Blocks for the sequence will be reserved later: until then ``stats`` counts them as expected."""
        num_blocks = -(-(sequence.num_tokens + 1) // self.pool.block_size)
        self._num_expected_blocks += num_blocks
        try:
            yield
        finally:
            self._num_expected_blocks -= num_blocks

    def seal_received(self, sequence: Sequence, num_tokens: int) -> None:
        """The KV of the first ``num_tokens`` tokens has arrived in the blocks of a reserved sequence.

        Full blocks become findable; where an equal block was in the pool already, the table names that one
        now.
        """
        assert sequence.state is State.NEW
        assert num_tokens <= sequence.num_tokens
        sequence.num_computed_tokens = max(num_tokens, sequence.num_computed_tokens)
        self._scheduler.seal_computed(sequence)

    def stats(self) -> EngineStats:
        scheduler, pool, loop = self._scheduler, self.pool, self._loop
        queued = sum(s.num_tokens - s.num_computed_tokens for s in scheduler.waiting + scheduler.prefilling)
        return EngineStats(
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting + len(self._reservations),
            num_queued_tokens=queued,
            num_blocks=pool.num_blocks,
            num_free_blocks=pool.num_free,
            num_expected_blocks=self._num_expected_blocks,
            num_used_blocks=pool.num_used,
            num_cached_blocks=pool.num_cached,
            num_steps=loop.num_steps if loop else 0,
            num_failed_steps=loop.num_failed_steps if loop else 0,
            num_preemptions=scheduler.num_preemptions,
            step_s=loop.step_s if loop else 0.0,
        )

    def profile(self) -> dict[str, float]:
        """The fields of ``protos.Profile``: measured at the start, corrected by every step since."""
        return (self._loop.costs if self._loop else NOT_MEASURED).coefficients()

    def _running(self) -> StepLoop:
        if self._loop is None or self._task is None or self._task.done() or self._closed:
            raise EngineClosed("the engine is not running")
        return self._loop

    def _check(self, sequence: Sequence) -> None:
        """Refuse what would fail the whole batch it ran in."""
        if sequence.num_tokens >= self.max_model_len:
            raise SequenceTooLong(sequence.num_tokens, self.max_model_len)
        vocab_size = self.config.vocab_size
        for token_id in (int(sequence.token_ids.min()), int(sequence.token_ids.max())):
            if not 0 <= token_id < vocab_size:
                raise UnknownToken(token_id, vocab_size, "token")
        for token_id in sequence.sampling.logit_bias:
            if not 0 <= token_id < vocab_size:
                raise UnknownToken(token_id, vocab_size, "logit_bias for token")

    def _take_for(self, sequence: Sequence) -> bool:
        return self._scheduler.take_blocks(sequence, sequence.num_tokens + 1, sequence.num_tokens)

    def _report(self, events: list[StepEvent]) -> None:
        if self.on_step is not None:
            self.on_step(events)

    def _freed(self) -> None:
        if self._loop is not None:
            self._loop.wake()

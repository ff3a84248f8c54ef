"""A simulated node: engine, memory, and the view that placement gets."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from moonpool.conductor.costs.model import CostModel
from moonpool.conductor.placing.load_ledger import LoadLedger
from moonpool.conductor.placing.node_view import NodeView
from moonpool.simulator.cluster.adapters import Adapters
from moonpool.simulator.cluster.clock import Clock
from moonpool.simulator.cluster.conductor import Member
from moonpool.simulator.cluster.job import Job
from moonpool.simulator.cluster.memory import NodeMemory, PinnedBlocks
from moonpool.simulator.cluster.reality import NodeIndex, Reality
from moonpool.simulator.cluster.step_engine import StepEngine
from moonpool.simulator.cluster.steps import Decode, Prefill
from moonpool.simulator.inputs.hardware import Hardware
from moonpool.simulator.inputs.scenario import Scenario

OnJob = Callable[[Job], None]


class Node:
    """A node of any role. It calls ``on_prefilled`` and ``on_decoded`` when a job's stage ends."""

    def __init__(
        self,
        node_id: str,
        hardware: Hardware,
        scenario: Scenario,
        clock: Clock,
        index: NodeIndex,
        parents: Mapping[bytes, bytes],
        costs: Sequence[CostModel],
        reality: Reality,
        *,
        on_prefilled: OnJob,
        on_decoded: OnJob,
        on_load: Callable[[Member], None],
    ) -> None:
        """``hardware``: as believed. ``costs``: of each conductor. ``on_load``: a member has changed."""
        self.node_id = node_id
        self.hardware = hardware
        self.alive = True
        self.failed = False  # it ended without notice: what others still read of it does not arrive
        self.jobs: dict[Job, None] = {}  # placed here
        self.memory = NodeMemory(
            index,
            parents,
            blocks=scenario.blocks(hardware),
            policies=("lru", scenario.host_policy, scenario.ssd_policy),
        )
        self._reality = reality
        role = node_id.rpartition("-")[0]
        self._step_factor = 1.0 if role == "prefill" else reality.node_factor("decode")
        prefill_factor = 1.0 if role == "decode" else reality.node_factor("prefill")
        true = hardware.scaled(prefill=prefill_factor, decode=self._step_factor)
        self.engine = StepEngine(
            clock,
            true.profile,
            self,
            chunk_tokens=hardware.chunk_tokens,
            max_batch_size=hardware.max_batch_size,
            block_tokens=scenario.block_tokens,
            tbt_s=scenario.slo.tbt_s,
            adapter_s=hardware.adapter_step_s,
        )
        self.members: list[Member] = []
        for number, model in enumerate(costs):
            view = NodeView(
                node_id,
                model.node(hardware.profile, clock.now_s),
                num_blocks=self.memory.pool.capacity,
                chunk_tokens=hardware.chunk_tokens,
            )
            self.members.append(Member(view, number, model, clock, on_load))
        self.adapters = Adapters(
            clock,
            self.memory,
            [member.view for member in self.members],
            num_blocks=-(-hardware.adapter_nbytes // (scenario.block_tokens * hardware.kv_token_nbytes)),
            load_s=hardware.adapter_nbytes / (hardware.host_load_nbytes_per_s or math.inf),
        )
        self._clock = clock
        self._scenario = scenario
        self._on_prefilled = on_prefilled
        self._on_decoded = on_decoded
        self._waiting_for_blocks: deque[tuple[Job, OnJob]] = deque()
        self._queued: dict[Job, None] = {}  # wait for their prefill, and have pinned blocks
        self._load_ends_s = 0.0
        self._index = index

    # ------------------------------------------------------------------ what conductors know of it

    @property
    def view(self) -> NodeView:
        """The first conductor's."""
        return self.members[0].view

    @property
    def load(self) -> LoadLedger:
        """The first conductor's."""
        return self.members[0].load

    def of(self, job: Job) -> Member:
        """The member of the job's conductor."""
        return self.members[job.conductor]

    # ------------------------------------------------------------------ prefill

    def load_s(self, host_blocks: int, ssd_blocks: int) -> float:
        """Queue a load of blocks from the slower tiers; returns the seconds until it ends."""
        now_s, hardware = self._clock.now_s, self.hardware
        nbytes = self._scenario.block_tokens * hardware.kv_token_nbytes
        seconds = 0.0
        if host_blocks:
            seconds += host_blocks * nbytes / hardware.host_load_nbytes_per_s
        if ssd_blocks:
            seconds += ssd_blocks * nbytes / hardware.ssd_load_nbytes_per_s
        if not seconds:
            return 0.0
        self._load_ends_s = max(self._load_ends_s, now_s) + seconds
        return self._load_ends_s - now_s

    def queue_prefill(self, job: Job, order_s: float) -> None:
        self._queued[job] = None
        self.engine.add_prefill(Prefill(job, order_s, job.attempt))

    def start_prefill(self, prefill: Prefill) -> bool:
        job, size = prefill.job, self._scenario.block_tokens
        hits = self.memory.pin(job.hold, job.keys[: (job.num_tokens - 1) // size])
        # A node of both roles decodes in the same blocks.
        total = job.num_tokens + (job.remaining if job.decodes_in_place else 0)
        if not self._reserve(job.hold, job.keys[hits:], -(-total // size) - hits, job):
            return False
        del self._queued[job]
        self.memory.use(job.keys)
        job.computing_s = self._clock.now_s
        prefill.num_cached = hits * size
        prefill.num_tokens = job.num_tokens - prefill.num_cached
        prefill.factor = self._reality.work_factor("prefill", prefill.num_tokens, prefill.num_cached)
        self._count(job, hits)
        return True

    def _reserve(self, hold: PinnedBlocks, keys: list[bytes], num_blocks: int, job: Job) -> bool:
        if self._reserve_beside_adapters(hold, keys, num_blocks):
            return True
        if any(other not in self._queued for other in self.jobs):
            return False  # a running job will free blocks
        # The waiting jobs block each other: the others release their pinned blocks.
        for other in self._queued:
            if other is not job:
                self.memory.release(other.hold)
        return self._reserve_beside_adapters(hold, keys, num_blocks)

    def _reserve_beside_adapters(self, hold: PinnedBlocks, keys: list[bytes], num_blocks: int) -> bool:
        """Reserve blocks; adapters without users give way."""
        while not self.memory.reserve(hold, keys, num_blocks):
            if not self.adapters.evict():
                return False
        return True

    def _count(self, job: Job, hits: int) -> None:
        """Count the prompt's tokens by source, in the first attempt that computes."""
        if job.use["computed"]:
            return
        size = self._scenario.block_tokens
        peer = min(job.fetched_blocks, hits)
        ssd = min(job.slow[1], hits - peer)
        host = min(job.slow[0], hits - peer - ssd)
        pool = hits - peer - ssd - host
        job.use.update(pool=pool * size, host=host * size, ssd=ssd * size, peer=peer * size)
        job.use["computed"] = job.num_tokens - hits * size

    def prefilled(self, prefill: Prefill) -> None:
        job, now_s = prefill.job, self._clock.now_s
        member = self.of(job)
        if self._scenario.errors and member.load.prefilled_alone(job):
            tokens = prefill.num_tokens, prefill.num_cached
            member.breaker.took(member.view.cost.prefill_s(*tokens, now_s), prefill.busy_s)
            member.costs.observe_prefill(
                member.view.cost,
                uncached_tokens=prefill.num_tokens,
                cached_tokens=prefill.num_cached,
                actual_s=prefill.busy_s,
                now_s=now_s,
            )
        member.breaker.succeeded()
        full = min(job.num_tokens // self._scenario.block_tokens, len(job.keys))
        self.memory.commit(job.hold, job.keys[len(job.hold.pinned) : full])
        self._on_prefilled(job)

    # ------------------------------------------------------------------ decode

    def fits(self, job: Job) -> bool:
        """Whether the prompt and all output fit into an empty pool."""
        size = self._scenario.block_tokens
        return -(-(job.num_tokens + job.remaining) // size) <= self.memory.pool.capacity

    def add_incoming(self, job: Job, starts_in_s: float, expected_tokens: int) -> None:
        """Count a job that was placed to decode here."""
        view = self.refresh(job.conductor)
        num_tokens, size = job.num_tokens, self._scenario.block_tokens
        step_s = view.cost.step_s(
            view.num_running + 1, view.num_context_tokens + num_tokens, self._clock.now_s
        )
        job.num_delivered = 0
        self.of(job).load.begin_decode(
            job,
            num_tokens,
            expected_tokens=expected_tokens,
            num_blocks=-(-(num_tokens + expected_tokens) // size),
            starts_in_s=starts_in_s,
            lasts_s=expected_tokens * step_s,
            tbt_s=job.slo(self._scenario.slo).tbt_s,
        )

    def when_blocks_free(self, job: Job, granted: OnJob) -> None:
        """Call ``granted`` once ``job.decode_hold`` has blocks for the prompt and the whole output.

        The real engine takes blocks step by step and preempts; the simulated one never preempts.
        """
        self._waiting_for_blocks.append((job, granted))
        self._grant()

    def _grant(self) -> None:
        while self._waiting_for_blocks:
            job, granted = self._waiting_for_blocks[0]
            if (hold := self.reserve_for(job)) is None:
                return
            self._waiting_for_blocks.popleft()
            self.memory.use(job.keys)
            job.decode_hold = hold
            granted(job)

    def forget(self, job: Job, hold: PinnedBlocks | None) -> None:
        """Release the job's blocks and drop it from the queues. Idempotent."""
        self.jobs.pop(job, None)
        self._queued.pop(job, None)
        load = self.of(job).load
        load.end_prefill(job)
        self.refresh(job.conductor)
        load.end_decode(job, job.num_delivered)
        if not self.alive:
            return
        if hold is not None:
            self.memory.release(hold)
        self.adapters.leave(job)
        if self._waiting_for_blocks:
            others = (entry for entry in self._waiting_for_blocks if entry[0] is not job)
            self._waiting_for_blocks = deque(others)
        self.on_blocks_released()

    def on_blocks_released(self) -> None:
        """Let waiting jobs take blocks that have become free."""
        self.adapters.grant()
        self._grant()
        self.engine.resume()

    def decode(self, job: Job) -> None:
        job.num_delivered = 1  # the token of its prefill
        self._report(self.of(job), 1)
        self.engine.join(Decode(job, job.num_tokens, job.remaining, job.since_s))

    def stepped(self, expected_s: float, actual_s: float) -> None:
        if self._scenario.errors:
            plain_s = expected_s / self._step_factor
            now_s = self._clock.now_s
            for member in self.members:
                member.costs.observe_steps(member.view.cost, plain_s=plain_s, actual_s=actual_s, now_s=now_s)

    def work_factor(self, num_sequences: int, context_tokens: int) -> float:
        return self._reality.work_factor("decode", num_sequences, context_tokens)

    def reserve_for(self, job: Job) -> PinnedBlocks | None:
        """Blocks for a job that another node decodes, and all its output; None: there is no room."""
        hold = PinnedBlocks()
        hits = self.memory.pin(hold, job.keys)
        blocks = -(-(job.num_tokens + job.remaining) // self._scenario.block_tokens) - hits
        if self._reserve_beside_adapters(hold, job.keys[hits:], blocks):
            return hold
        self.memory.release(hold)
        return None

    def take_over(self, job: Job) -> None:
        """Go on with a job whose blocks have arrived."""
        job.num_delivered = 0
        self.of(job).load.decoding(job)
        self.engine.join(Decode(job, job.num_tokens, job.remaining, job.since_s))

    def waiting_for_blocks(self) -> list[Job]:
        """Prefilled elsewhere, without room here yet."""
        return [job for job, _ in self._waiting_for_blocks]

    def decoded(self, decode: Decode, gaps_s: npt.NDArray[np.float64]) -> None:
        job = decode.job
        job.add_tokens(gaps_s)
        job.num_delivered += len(gaps_s)
        member = self.of(job)
        member.num_ended += len(gaps_s)
        member.breaker.succeeded()
        self._on_decoded(job)

    # ------------------------------------------------------------------ what placement sees

    def refresh(self, conductor: int = 0) -> NodeView:
        """Bring the ``view`` of a conductor up to date and return it."""
        member = self.members[conductor]
        num_produced, view = self._num_produced(member), member.view
        waits, available = len(self._waiting_for_blocks), self._num_available
        same = view.num_waiting == waits and view.num_free_blocks == available
        if not same or num_produced != member.num_reported or len(self.members) > 1:
            num_new = num_produced - member.num_reported
            member.num_reported = num_produced
            self._report(member, num_new)
        return view

    def _num_produced(self, member: Member) -> int:
        """Tokens that decoding has produced so far for requests of one conductor."""
        if len(self.members) == 1:
            return self.engine.num_produced()
        own = (count for job, count in self.engine.decoding() if job.conductor == member.conductor)
        return member.num_ended + sum(own)

    def _report(self, member: Member, num_delivered: int) -> None:
        # Only where there are other conductors, the batch has sequences that are not its own.
        num_running, num_context_tokens = self.engine.batch() if len(self.members) > 1 else (0, 0)
        member.load.on_step(
            num_delivered=num_delivered,
            num_waiting=len(self._waiting_for_blocks),
            num_free_blocks=self._num_available,
            num_running=num_running,
            num_context_tokens=num_context_tokens,
        )

    @property
    def _num_available(self) -> int:
        return self.memory.num_available + self.adapters.num_idle_blocks

    def stop(self) -> None:
        """Stop for good; all blocks are lost. The jobs keep the tokens that the batch has produced."""
        self.alive = False
        for member in self.members:
            member.alive = False
        self._index.leave()
        for decode, gaps_s in self.engine.stop():
            decode.job.add_tokens(gaps_s)

"""Statistics of an engine at one moment."""

from __future__ import annotations

from dataclasses import dataclass

from moonpool.engine.batching.scheduler import Scheduler
from moonpool.engine.execution.step_loop import StepLoop


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Current counts; totals are since the start."""

    num_running: int
    num_waiting: int  # queued, or waiting for a reservation
    num_queued_tokens: int  # prompt tokens still to compute
    num_context_tokens: int  # of KV that the decoding sequences attend over
    num_blocks: int
    num_free_blocks: int  # including cached ones, which can be evicted
    num_expected_blocks: int  # to be reserved soon
    num_used_blocks: int
    num_cached_blocks: int
    num_packed_blocks: int  # of running sequences: only what full layers keep of them is left, in packs
    num_steps: int
    num_failed_steps: int
    num_preemptions: int
    step_s: float  # the last step
    busy_s: float  # with work to do

    @property
    def num_available_blocks(self) -> int:
        """Free blocks that no expected request needs."""
        return max(self.num_free_blocks - self.num_expected_blocks, 0)

    @classmethod
    def collect(
        cls, scheduler: Scheduler, loop: StepLoop | None, num_reservations: int, num_expected_blocks: int
    ) -> EngineStats:
        pool = scheduler.pool
        queued = sum(s.num_tokens - s.num_computed_tokens for s in scheduler.waiting + scheduler.prefilling)
        return cls(
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting + num_reservations,
            num_queued_tokens=queued,
            num_context_tokens=sum([sequence.num_tokens for sequence in scheduler.decoding]),
            num_blocks=pool.num_blocks,
            num_free_blocks=pool.num_free,
            num_expected_blocks=num_expected_blocks,
            num_used_blocks=pool.num_used,
            num_cached_blocks=pool.num_cached,
            num_packed_blocks=sum([len(s.packed) for s in scheduler.decoding + scheduler.prefilling]),
            num_steps=loop.num_steps if loop else 0,
            num_failed_steps=loop.num_failed_steps if loop else 0,
            num_preemptions=scheduler.num_preemptions,
            step_s=loop.step_s if loop else 0.0,
            busy_s=loop.busy_s if loop else 0.0,
        )

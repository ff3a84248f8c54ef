"""Several steps in flight, each of another micro-batch: the same tokens, no block lost, no row stale."""

from __future__ import annotations

from collections import deque

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from moonpool.engine.batching.scheduler import Scheduler
from moonpool.engine.batching.sequence import FinishReason, State
from moonpool.engine.batching.step_plan import StepEvent, StepOutput, StepPlan
from moonpool.engine.device.device import CpuDevice
from moonpool.engine.execution.input_builder import InputBuilder
from moonpool.engine.memory.block_pool import BlockPool
from tests.engine.test_scheduler import BLOCK_SIZE, REQUESTS, HashModel, next_token, sequence


class Pipeline:
    """A scheduler whose steps end later than they are launched, in order."""

    def __init__(self, num_blocks: int, max_batch_size: int, num_micro_batches: int) -> None:
        self.pool = BlockPool(num_blocks, BLOCK_SIZE)
        self.model = HashModel(num_blocks)
        words = {"max_batch_tokens": 8, "max_len": num_blocks * BLOCK_SIZE}
        self.scheduler = Scheduler(
            self.pool, max_batch_size=max_batch_size, num_micro_batches=num_micro_batches, **words
        )
        self.builders = [
            InputBuilder(max_batch_size=8, block_size=BLOCK_SIZE, device=CpuDevice(), **words)
            for _ in range(num_micro_batches)
        ]
        self.flights: deque[tuple[StepPlan, StepOutput]] = deque()
        self.events: list[StepEvent] = []
        self.most_in_flight = 0

    def launch(self) -> bool:
        if len(self.flights) == len(self.builders):
            return False
        in_flight = [plan for plan, _ in self.flights]
        plan = self.scheduler.schedule(in_flight)
        if plan is None:
            return False
        assert plan.micro_batch not in {other.micro_batch for other in in_flight}
        assert not {id(s) for s in plan.sequences()} & {id(s) for p in in_flight for s in p.sequences()}
        assert [s.row for s in plan.decodes] == list(range(len(plan.decodes)))
        inputs = self.builders[plan.micro_batch].prepare(plan)
        for s, row in zip(plan.decodes, inputs.decode_table.tolist(), strict=True):
            assert row[: len(s.block_table)] == s.block_table, "the row has another sequence's blocks"
        self.flights.append((plan, self.model.execute(plan)))
        self.most_in_flight = max(self.most_in_flight, len(self.flights))
        return True

    def end(self) -> bool:
        if not self.flights:
            return False
        self.events += self.scheduler.postprocess(*self.flights.popleft(), 0.0)
        self.pool.check_integrity()
        return True

    def cancel(self, one) -> None:
        if any(s is one for plan, _ in self.flights for s in plan.sequences()):
            one.cancelled = True
        else:
            self.scheduler.finish(one, FinishReason.CANCELLED, self.events)

    def run(self) -> None:
        for _ in range(3000):
            if not self.launch() and not self.end():
                return
        raise AssertionError("the scheduler goes round in circles")


@settings(max_examples=120, deadline=None)
@given(
    requests=REQUESTS,
    num_blocks=st.integers(8, 24),
    max_batch_size=st.integers(1, 6),
    num_micro_batches=st.integers(1, 4),
    launches=st.lists(st.booleans(), min_size=80, max_size=80),
)
def test_every_sequence_gets_its_tokens(
    requests, num_blocks, max_batch_size, num_micro_batches, launches
) -> None:
    pipeline, sequences = Pipeline(num_blocks, max_batch_size, num_micro_batches), {}
    for step, launch_first in enumerate(launches):
        for i, (prompt, max_tokens, priority, tenant, arrives, cancelled) in enumerate(requests):
            if arrives == step:
                sequences[i] = sequence(f"r{i}", prompt, max_tokens, priority, float(step), tenant=tenant)
                pipeline.scheduler.add(sequences[i])
            if cancelled == step and i in sequences and sequences[i].state is not State.FINISHED:
                pipeline.cancel(sequences[i])
        if launch_first:
            pipeline.launch()
        else:
            pipeline.end()
    pipeline.run()
    assert pipeline.pool.num_used == 0
    assert pipeline.scheduler.num_running == pipeline.scheduler.num_waiting == 0
    for i, (prompt, max_tokens, *_) in enumerate(requests):
        events = [event for event in pipeline.events if event.sequence is sequences[i]]
        expected = list(prompt)
        for _ in range(max_tokens):
            expected.append(next_token(np.array(expected)))
        finishes = [event.finish_reason for event in events if event.finish_reason]
        assert len(finishes) == 1, "every sequence ends exactly once"
        if finishes == [FinishReason.LENGTH]:
            assert [e.token_id for e in events if e.token_id >= 0] == expected[len(prompt) :]


def test_sequences_are_divided_evenly_also_when_others_have_ended() -> None:
    pipeline = Pipeline(32, 8, 2)
    for i, max_tokens in enumerate((9, 2, 9, 2, 9, 2)):  # by turns, so that those of one micro-batch end
        pipeline.scheduler.add(sequence(f"r{i}", [i % 2], max_tokens, 0, float(i)))
    sizes = []
    while pipeline.launch() or pipeline.end():
        sizes.append(tuple(map(len, pipeline.scheduler.micro_batches)))
    assert pipeline.most_in_flight == 2
    assert sizes.count((3, 3)) > 2
    assert sizes.count((3, 0)) <= 2, "the next step of three gives one away"
    assert sizes.count((2, 1)) > 10

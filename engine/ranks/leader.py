"""The leader's runner: publishes each batch to all ranks, computes its part, samples.

With several micro-batches it launches a step before it finishes the one before: see ``StepLoop``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from moonpool.engine.batching.step_plan import StepOutput, StepPlan
from moonpool.engine.checkpoint.config import ModelConfig
from moonpool.engine.collectives.board import SharedBoard, StepWord
from moonpool.engine.collectives.exchange_clock import ExchangeClock
from moonpool.engine.collectives.link import Link
from moonpool.engine.device.device import Device, Launched
from moonpool.engine.errors import DeviceLost, RankDiverged, RankLost
from moonpool.engine.execution.logit_rows import logit_rows
from moonpool.engine.execution.runner import ModelRunner, Step
from moonpool.engine.experts.load import ExpertLoad
from moonpool.engine.model.inputs import StepInputs
from moonpool.engine.ranks.assignment import Assignment
from moonpool.engine.ranks.expert_switch import ExpertSwitches
from moonpool.engine.ranks.rank_times import RankTimes
from moonpool.engine.ranks.stage import RankStep, StepWork
from moonpool.engine.ranks.step_message import chain_digest, pack
from moonpool.runtime.service.load_progress import Progress


@dataclass(slots=True)
class StepTimes:
    """Times of one step in seconds; lists are per rank, [world_size]."""

    step_s: float  # since its launch or the end of the step before, whichever is later
    publish_s: float  # packing and publishing the batch
    settle_s: float  # from the last token until all ranks are done and compared
    num_exchanges: int  # of rank 0
    exchanged_nbytes: int
    compute_s: list[float]
    collective_s: list[float]
    exchange_s: list[float]  # of collective_s: the rank's own part, without waiting for others
    bubble_s: list[float]
    all_to_all_s: list[float]  # of collective_s


@dataclass(slots=True)
class _Flight:
    """A published step with our part of its layers computed. See ``Launched``: ``wait`` samples tokens."""

    plan: StepPlan
    began_s: float
    finish: Callable[[_Flight], Step]
    masks: Callable[[], object]
    inputs: StepInputs | None = None
    work: StepWork | None = None
    rounds: list[list[int]] = field(default_factory=list)  # of logits, not requested yet
    publish_s: float = 0.0
    sampling_s: float = 0.0

    @property
    def result(self) -> Step:
        raise AssertionError("the tokens are sampled by wait")

    def wait(self) -> Step:
        return self.finish(self)


class ParallelRunner(ModelRunner):
    """See ``ModelRunner``. Any error ends the group, because the state of the other ranks is unknown then."""

    is_single_rank = False

    def __init__(
        self,
        config: ModelConfig,
        assignment: Assignment,
        device: Device,
        board: SharedBoard,
        link: Link,
        clock: ExchangeClock,
        expert_load: ExpertLoad | None,
        *,
        pool_memory: npt.NDArray[np.uint8] | None = None,
        progress: Progress | None = None,
        agree: Callable[[int], int] | None = None,
    ) -> None:
        super().__init__(
            config,
            assignment.options,
            dtype=assignment.dtype,
            device=device,
            num_blocks=assignment.num_blocks,
            max_len=assignment.max_len,
            pool_memory=pool_memory,
            progress=progress,
            shard=assignment.shard(config),
            link=link,
            expert_load=expert_load.tables[0] if expert_load and device.torch.type == "cpu" else None,
            agree=agree,
        )
        self._expert_load = expert_load
        self.clock = clock
        self._plan = assignment.plan
        self._shards = assignment.plan.shards(config)
        self.rank_times = self._new_times()
        self._board = board
        self._link = link
        self._rank_step = RankStep(self.model, self.pool, link, board, clock, assignment)
        self._inputs |= {number: self._input_builder() for number in range(1, assignment.steps_in_flight)}
        self.expert_switch = 0  # that all ranks have prepared: the next step uses it
        self._flight: _Flight | None = None  # whose tensors are computed now
        self._logits_end_s = self._ended_s = 0.0
        self.on_times: Callable[[StepTimes], None] | None = None

    def launch(self, plan: StepPlan, sampled: Tensor | None = None) -> Launched[Step]:
        """Publish the step and compute our part of its layers; the others compute theirs. Up to
        ``Assignment.steps_in_flight`` steps may be launched and not finished. Raises as ``finish``."""
        with self._errors_end_the_group():
            flight = _Flight(plan, time.perf_counter(), self._sampled, self._masks.begin(plan))
            self.device.run(lambda: self._publish(flight))
        return flight

    def finish(self, launched: Callable[[], Launched[Step]]) -> StepOutput:
        """Wait for the tokens of the step launched first, and until all ranks are done with it.

        Raises RankLost, also for errors here, RankDiverged or DeviceLost. The group is unusable then.
        """
        with self._errors_end_the_group():
            flight = launched()
            assert isinstance(flight, _Flight)
            output = super().finish(lambda: flight)
            assert flight.work is not None
            sampled_s, work = time.perf_counter(), flight.work
            self._rank_step.end(work)
            for rank in range(1, self._board.world_size):
                self._board.wait_done(rank, work.step)
                if (digest := self._board.of_step(rank, work.step, StepWord.DIGEST)) != work.digest:
                    raise RankDiverged(rank, work.step, digest, work.digest)
        flight.sampling_s += sampled_s - self._logits_end_s
        times = self._times(flight, work, sampled_s)
        output.exchange_s = times.collective_s[0] + times.bubble_s[0]
        self._observe(times, flight.sampling_s)
        if self.on_times is not None:
            self.on_times(times)
        return output

    @contextmanager
    def _errors_end_the_group(self) -> Iterator[None]:
        try:
            yield
        except RankLost as error:
            self._board.abort(error.rank)
            raise
        except DeviceLost:
            self._board.abort(0)
            raise
        except Exception as error:
            self._board.abort(0)
            raise RankLost(0, f"{type(error).__name__}: {error}") from error

    def _new_times(self) -> RankTimes:
        return RankTimes(self._plan.stage_layers(self.config), self._plan.tp * self._plan.cp)

    def _observe(self, times: StepTimes, sampling_s: float) -> None:
        compute_s = times.compute_s
        if self.device.torch.type == "cpu":  # a GPU may still compute while rank 0 samples
            compute_s = [max(compute_s[0] - sampling_s, 0.0), *compute_s[1:]]
        self.rank_times.observe(compute_s, times.exchange_s, times.collective_s, times.bubble_s)

    def expert_load(self) -> npt.NDArray[np.int64]:
        """See ``ModelRunner``. Ranks without shared memory count as of the last refresh."""
        if self._expert_load is None:
            return super().expert_load()
        if self.model.expert_load.is_cuda:
            self._expert_load.tables[0] = self.model.expert_load.cpu()
        # All tp ranks count the same rows.
        counting = [shard.rank for shard in self._shards if shard.tp_rank == 0]
        return self._expert_load.tables[counting].sum(0).numpy()

    def forget_expert_load(self) -> None:
        super().forget_expert_load()
        if self._expert_load is not None:
            self._expert_load.tables.zero_()

    @property
    def experts(self) -> ExpertSwitches:
        """Rank 0's."""
        return self._rank_step.experts

    def serve(self) -> None:
        """See ``Link.serve``. The times of the ranks' first steps, which compile, are forgotten."""
        self.rank_times = self._new_times()
        self._link.serve()

    def end_steps(self) -> None:
        """End the step loops of the other ranks. No step is running."""
        self._board.publish(self._rank_step.step + 1, 0)

    def close(self) -> None:
        """Close the link. No step is running or will run."""
        self._link.close()

    @torch.inference_mode()
    def _publish(self, flight: _Flight) -> None:
        inputs, step = self._inputs[flight.plan.micro_batch].prepare(flight.plan), self._rank_step
        began_s, flight.inputs = time.perf_counter(), inputs
        flight.rounds = logit_rows(flight.plan, inputs)
        payload = self._board.payload(step.step + 1)
        step.experts.use(self.expert_switch)
        nbytes = pack(inputs, flight.rounds, self.options.block_size, payload, step.experts.used)
        flight.work = step.begin(chain_digest(step.digest, payload[:nbytes]))
        self._board.publish(step.step, nbytes)
        flight.publish_s = time.perf_counter() - began_s
        step.forward(flight.work, inputs)
        step.pause(flight.work)

    @torch.inference_mode()
    def _sampled(self, flight: _Flight) -> Step:
        assert flight.inputs is not None
        inputs, self._flight = flight.inputs, flight
        self._rank_step.resume()
        self._logits_end_s = time.perf_counter()
        # Other ranks may have the last hidden states: only their number matters here.
        hidden = torch.empty(1, 1).expand(len(inputs.token_ids), 1)
        return self.device.run(lambda: self._sample(flight.plan, inputs, hidden, flight.masks)).wait()

    def _logits(self, hidden: Tensor, rows: Tensor | None) -> Tensor:
        """Return the logits of the next published round."""
        flight = self._flight
        assert flight is not None and flight.work is not None
        wanted = flight.rounds.pop(0)
        flight.sampling_s += time.perf_counter() - self._logits_end_s
        assert len(wanted) == (len(hidden) if rows is None else len(rows)), "other rows than published"
        logits = self._rank_step.logits(flight.work, torch.tensor(wanted))
        assert logits is not None
        self._logits_end_s = time.perf_counter()
        return logits

    def _times(self, flight: _Flight, work: StepWork, sampled_s: float) -> StepTimes:
        before_s, self._ended_s = self._ended_s, time.perf_counter()

        def seconds(word: StepWord) -> list[float]:
            ranks = range(self._board.world_size)
            return [self._board.of_step(rank, work.step, word) / 1e9 for rank in ranks]

        return StepTimes(
            self._ended_s - max(flight.began_s, before_s),
            flight.publish_s,
            self._ended_s - sampled_s,
            work.spent.num_collectives,
            work.spent.collective_nbytes,
            seconds(StepWord.COMPUTE_NS),
            seconds(StepWord.COLLECTIVE_NS),
            seconds(StepWord.EXCHANGE_NS),
            seconds(StepWord.BUBBLE_NS),
            seconds(StepWord.ALL_TO_ALL_NS),
        )

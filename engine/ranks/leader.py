"""The leader's runner: publishes each batch to all ranks, computes its part, samples."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from moonpool.engine.batching.step_plan import StepOutput, StepPlan
from moonpool.engine.checkpoint.config import ModelConfig
from moonpool.engine.collectives.board import BoardWord, SharedBoard
from moonpool.engine.collectives.exchange_clock import ExchangeClock
from moonpool.engine.collectives.link import Link
from moonpool.engine.device.device import Device
from moonpool.engine.errors import DeviceLost, RankDiverged, RankLost
from moonpool.engine.execution.logit_rows import logit_rows
from moonpool.engine.execution.runner import ModelRunner
from moonpool.engine.experts.load import ExpertLoad
from moonpool.engine.model.inputs import StepInputs
from moonpool.engine.ranks.assignment import Assignment
from moonpool.engine.ranks.rank_times import RankTimes
from moonpool.engine.ranks.stage import RankStep
from moonpool.engine.ranks.step_message import chain_digest, pack
from moonpool.runtime.service.load_progress import Progress


@dataclass(slots=True)
class StepTimes:
    """Times of one step in seconds; lists are per rank, [world_size]."""

    step_s: float
    publish_s: float  # packing and publishing the batch
    settle_s: float  # from the last token until all ranks are done and compared
    num_exchanges: int  # of rank 0
    exchanged_nbytes: int
    compute_s: list[float]
    collective_s: list[float]
    exchange_s: list[float]  # of collective_s: the rank's own part, without waiting for others
    bubble_s: list[float]
    all_to_all_s: list[float]  # of collective_s


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
        self._rank_step = RankStep(self.model, self.pool, link, board, clock, assignment.options.parallel)
        self._rounds: list[list[int]] = []
        self._hidden: Tensor | None = None
        self._publish_s = self._sampling_s = self._logits_end_s = 0.0
        self.on_times: Callable[[StepTimes], None] | None = None

    def execute(self, plan: StepPlan) -> StepOutput:
        """Compute the plan's tokens on all ranks.

        Raises RankLost, also for errors here, RankDiverged or DeviceLost. The group is unusable then.
        """
        began_s = time.perf_counter()
        before = self.clock.num_collectives, self.clock.collective_nbytes
        try:
            output = super().execute(plan)
            sampled_s = time.perf_counter()
            self._rank_step.end()
            for rank in range(1, self._board.world_size):
                self._board.wait_done(rank, self._rank_step.step)
                if (digest := self._board.count(rank, BoardWord.DIGEST)) != self._rank_step.digest:
                    raise RankDiverged(rank, self._rank_step.step, digest, self._rank_step.digest)
        except RankLost as error:
            self._board.abort(error.rank)
            raise
        except DeviceLost:
            self._board.abort(0)
            raise
        except Exception as error:
            self._board.abort(0)
            raise RankLost(0, f"{type(error).__name__}: {error}") from error
        times = self._times(began_s, sampled_s, *before)
        output.exchange_s = times.collective_s[0] + times.bubble_s[0]
        self._observe(times, sampled_s)
        if self.on_times is not None:
            self.on_times(times)
        return output

    def _new_times(self) -> RankTimes:
        return RankTimes(self._plan.stage_layers(self.config), self._plan.tp * self._plan.cp)

    def _observe(self, times: StepTimes, sampled_s: float) -> None:
        compute_s = times.compute_s
        if self.device.torch.type == "cpu":  # a GPU may still compute while rank 0 samples
            sampling_s = self._sampling_s + sampled_s - self._logits_end_s
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

    def _forward(self, plan: StepPlan, inputs: StepInputs) -> Tensor:
        began_s = time.perf_counter()
        self._rounds = logit_rows(plan, inputs)
        nbytes = pack(inputs, self._rounds, self.options.block_size, self._board.payload)
        self._rank_step.begin(chain_digest(self._rank_step.digest, self._board.payload[:nbytes]))
        self._board.publish(self._rank_step.step, nbytes)
        self._publish_s = time.perf_counter() - began_s
        self._hidden = self._rank_step.forward(inputs.to(self.device.torch))
        self._sampling_s, self._logits_end_s = 0.0, time.perf_counter()
        # Other ranks may have these rows: only their number matters here.
        return torch.empty(1, 1).expand(len(inputs.token_ids), 1)

    def _logits(self, hidden: Tensor, rows: Tensor | None) -> Tensor:
        """Return the logits of the next published round."""
        wanted = self._rounds.pop(0)
        self._sampling_s += time.perf_counter() - self._logits_end_s
        assert len(wanted) == (len(hidden) if rows is None else len(rows)), "other rows than published"
        logits = self._rank_step.logits(self._hidden, torch.tensor(wanted))
        assert logits is not None
        self._logits_end_s = time.perf_counter()
        return logits

    def _times(self, began_s: float, sampled_s: float, num_before: int, nbytes_before: int) -> StepTimes:
        ended_s = time.perf_counter()

        def seconds(word: BoardWord) -> list[float]:
            return [self._board.count(rank, word) / 1e9 for rank in range(self._board.world_size)]

        return StepTimes(
            ended_s - began_s,
            self._publish_s,
            ended_s - sampled_s,
            self.clock.num_collectives - num_before,
            self.clock.collective_nbytes - nbytes_before,
            seconds(BoardWord.COMPUTE_NS),
            seconds(BoardWord.COLLECTIVE_NS),
            seconds(BoardWord.EXCHANGE_NS),
            seconds(BoardWord.BUBBLE_NS),
            seconds(BoardWord.ALL_TO_ALL_NS),
        )

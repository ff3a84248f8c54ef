"""One rank's part of a step: its layers over the micro-batches, and the exchanges with other ranks."""

from __future__ import annotations

import time
from dataclasses import astuple, dataclass, field
from operator import add, sub

import torch
from torch import Tensor

from moonpool.engine.collectives.board import SharedBoard, StepWord
from moonpool.engine.collectives.exchange_clock import ExchangeClock
from moonpool.engine.collectives.link import Link
from moonpool.engine.model.inputs import StepInputs
from moonpool.engine.model.transformer import Model
from moonpool.engine.ranks.assignment import Assignment
from moonpool.engine.ranks.expert_switch import ExpertSwitches
from moonpool.engine.ranks.partition.batch_slice import micro_batches
from moonpool.engine.ranks.partition.context_parallel import ContextStep
from moonpool.engine.ranks.step_message import chain_digest, unpack


@dataclass(frozen=True, slots=True)
class StepSpent:
    """What a rank spent, as counts since its start or for one step."""

    took_ns: int = 0
    waited_ns: int = 0  # for other ranks, bubbles included
    collective_ns: int = 0
    bubble_ns: int = 0
    all_to_all_ns: int = 0
    num_collectives: int = 0
    collective_nbytes: int = 0

    def __sub__(self, before: StepSpent) -> StepSpent:
        return StepSpent(*map(sub, astuple(self), astuple(before)))

    def __add__(self, more: StepSpent) -> StepSpent:
        return StepSpent(*map(add, astuple(self), astuple(more)))


@dataclass(slots=True)
class StepWork:
    """One rank's work on one step. digest: of all batches up to it. tokens: of its cp rank, once computed."""

    step: int
    digest: int
    late_ns: int
    spent: StepSpent = field(default_factory=StepSpent)
    tokens: ContextStep | None = None
    hidden: Tensor | None = None


class RankStep:
    """A rank's model, pool and link. Every rank makes the same calls for every step, in the order of steps;
    only the leader begins steps before the one before has ended.

    step: the number of the newest step. digest: of all batches up to it. experts: that this rank takes over.
    """

    def __init__(
        self,
        model: Model,
        pool: Tensor,
        link: Link,
        board: SharedBoard,
        clock: ExchangeClock,
        assignment: Assignment,
    ) -> None:
        self.model = model
        self.experts = ExpertSwitches(model)
        self._pool = pool
        self._link = link
        self._board = board
        self._clock = clock
        self._decode_parts = assignment.decode_parts
        self._micro_batch_tokens = assignment.options.parallel.micro_batch_tokens
        self._cp_min_tokens = assignment.options.parallel.cp_min_tokens
        self.step = self.digest = 0
        self._resumed = StepSpent()

    def begin(self, digest: int, late_ns: int = 0) -> StepWork:
        """Begin the next step, and count the time for it. ``digest``: with its batch. ``late_ns``: since the
        batch was published and this rank waited for it."""
        self.step += 1
        self.digest = digest
        work = StepWork(self.step, digest, late_ns)
        self.resume()
        return work

    def resume(self) -> None:
        """Count the time from here on for the step that is paused or ended next."""
        self._resumed = self._counts()

    def pause(self, work: StepWork) -> None:
        """Stop counting the time for this step."""
        work.spent += self._counts() - self._resumed

    def _counts(self) -> StepSpent:
        clock = self._clock
        return StepSpent(
            time.perf_counter_ns(),
            self._board.waited_ns,
            clock.collective_ns,
            clock.bubble_ns,
            clock.all_to_all_ns,
            clock.num_collectives,
            clock.collective_nbytes,
        )

    def forward(self, work: StepWork, inputs: StepInputs) -> None:
        """Run the batch through this rank's layers."""
        shard = self.model.shard
        work.tokens = tokens = ContextStep(
            inputs,
            shard.cp_rank,
            shard.cp,
            block_size=self._pool.shape[4],
            min_tokens=self._cp_min_tokens,
            windows={layer.window for layer in self.model.layers},
        )
        results = []
        max_tokens = self._micro_batch_tokens if shard.pp > 1 else 0
        for micro_batch in micro_batches(inputs, self._decode_parts, max_tokens):
            part = tokens.inputs_for(micro_batch).to(self._pool.device)
            hidden = None if shard.is_first else self._link.receive(len(part.token_ids))
            # Tokens computed by all cp ranks count once, on cp rank 0.
            is_split = part.context is not None and part.context.counts
            counted = self.model.expert_load.clone() if shard.cp_rank and not is_split else None
            hidden = self.model.forward(part, self._pool, hidden)
            if counted is not None:
                self.model.expert_load.copy_(counted)
            if shard.is_last:
                results.append(hidden)
            else:
                self._link.send(hidden)
        if shard.is_last:  # [tokens of the cp rank, hidden]
            work.hidden = results[0] if len(results) == 1 else torch.cat(results)

    def logits(self, work: StepWork, rows: Tensor) -> Tensor | None:
        """Compute logits of ``rows`` (in main memory). Return [len(rows), vocab_size] on rank 0."""
        shard = self.model.shard
        if not shard.is_last:
            return self._link.gather(None, len(rows)) if shard.rank == 0 else None
        assert work.hidden is not None
        assert work.tokens is not None
        wanted = work.tokens.gather_rows(work.hidden, rows, self._link)
        if shard.cp_rank:
            return None
        return self._link.gather(self.model.logits(wanted), len(rows))

    def end(self, work: StepWork) -> None:
        """Post the digest and the times of the step, then that it is done."""
        self.pause(work)
        spent, step = work.spent, work.step
        exchange_ns = spent.collective_ns + work.late_ns
        post = self._board.post_of_step
        post(step, StepWord.DIGEST, work.digest)
        post(step, StepWord.COMPUTE_NS, spent.took_ns - spent.collective_ns - spent.bubble_ns)
        post(step, StepWord.COLLECTIVE_NS, exchange_ns)
        post(step, StepWord.EXCHANGE_NS, exchange_ns - (spent.waited_ns - spent.bubble_ns))
        post(step, StepWord.BUBBLE_NS, spent.bubble_ns)
        post(step, StepWord.ALL_TO_ALL_NS, spent.all_to_all_ns)
        self._board.post_done(step)


def run_steps(rank_step: RankStep, board: SharedBoard, device: torch.device) -> None:
    """Run steps until the leader publishes an empty one. Raises RankLost when the group is aborted."""
    with torch.inference_mode():
        while True:
            waits_ns = time.perf_counter_ns()
            step = board.wait_step(rank_step.step)
            batch = board.batch(step)
            if not len(batch):
                return
            late_ns = time.perf_counter_ns() - max(board.published_ns(step), waits_ns)
            work = rank_step.begin(chain_digest(rank_step.digest, batch), late_ns)
            inputs, rounds, expert_switch = unpack(batch)
            rank_step.experts.use(expert_switch)
            rank_step.forward(work, inputs)
            for rows in rounds:
                rank_step.logits(work, rows)
            if device.type == "cuda":
                # Peers read the blocks after the step is posted as done.
                torch.cuda.current_stream(device).synchronize()
            rank_step.end(work)

"""One rank's part of a step: its layers over the micro-batches, and the exchanges with other ranks."""

from __future__ import annotations

import time

import torch
from torch import Tensor

from moonpool.engine.collectives.board import BoardWord, SharedBoard
from moonpool.engine.collectives.exchange_clock import ExchangeClock
from moonpool.engine.collectives.link import Link
from moonpool.engine.model.inputs import StepInputs
from moonpool.engine.model.transformer import Model
from moonpool.engine.ranks.partition.batch_slice import micro_batches
from moonpool.engine.ranks.partition.context_parallel import ContextStep
from moonpool.engine.ranks.step_message import chain_digest, unpack
from moonpool.runtime.config.options import ParallelOptions


class RankStep:
    """A rank's model, pool and link. Every rank makes the same calls for every step.

    step: the number of the current step. digest: of all batches up to it.
    """

    def __init__(
        self,
        model: Model,
        pool: Tensor,
        link: Link,
        board: SharedBoard,
        clock: ExchangeClock,
        options: ParallelOptions,
    ) -> None:
        self.model = model
        self._pool = pool
        self._link = link
        self._board = board
        self._clock = clock
        self._micro_batch_tokens = options.micro_batch_tokens
        self._cp_min_tokens = options.cp_min_tokens
        self.step = self.digest = 0
        self._begun_ns = self._late_ns = 0
        # Counts when the step began.
        self._collective_ns = self._bubble_ns = self._all_to_all_ns = self._waited_ns = 0
        self._tokens: ContextStep | None = None

    def begin(self, digest: int, late_ns: int = 0) -> None:
        """Begin the next step. ``digest``: with its batch. ``late_ns``: since the batch was published."""
        self.step += 1
        self.digest = digest
        self._begun_ns, self._late_ns = time.perf_counter_ns(), late_ns
        self._waited_ns = self._board.waited_ns
        self._collective_ns, self._bubble_ns = self._clock.collective_ns, self._clock.bubble_ns
        self._all_to_all_ns = self._clock.all_to_all_ns

    def forward(self, inputs: StepInputs) -> Tensor | None:
        """Run the batch through this rank's layers. Return [tokens of the cp rank, hidden] on the last
        stage."""
        shard = self.model.shard
        self._tokens = tokens = ContextStep(
            inputs, shard.cp_rank, shard.cp, block_size=self._pool.shape[4], min_tokens=self._cp_min_tokens
        )
        results = []
        for micro_batch in micro_batches(inputs, shard.pp, self._micro_batch_tokens):
            part = tokens.inputs_for(micro_batch)
            hidden = None if shard.is_first else self._link.receive(len(part.token_ids))
            # Tokens computed by all cp ranks count once, on cp rank 0.
            counted = self.model.expert_load.clone() if shard.cp_rank and not part.others else None
            hidden = self.model.forward(part, self._pool, hidden)
            if counted is not None:
                self.model.expert_load.copy_(counted)
            if shard.is_last:
                results.append(hidden)
            else:
                self._link.send(hidden)
        if not shard.is_last:
            return None
        return results[0] if len(results) == 1 else torch.cat(results)

    def logits(self, hidden: Tensor | None, rows: Tensor) -> Tensor | None:
        """Compute logits of ``rows`` (in main memory). Return [len(rows), vocab_size] on rank 0."""
        shard = self.model.shard
        if not shard.is_last:
            return self._link.gather(None, len(rows)) if shard.rank == 0 else None
        assert hidden is not None
        assert self._tokens is not None
        wanted = self._tokens.gather_rows(hidden, rows, self._link)
        if shard.cp_rank:
            return None
        return self._link.gather(self.model.logits(wanted), len(rows))

    def end(self) -> None:
        """Post the digest and the times of the step, then that it is done."""
        took_ns = time.perf_counter_ns() - self._begun_ns
        collective_ns = self._clock.collective_ns - self._collective_ns
        bubble_ns = self._clock.bubble_ns - self._bubble_ns
        waited_ns = self._board.waited_ns - self._waited_ns - bubble_ns
        post = self._board.post
        post(BoardWord.DIGEST, self.digest)
        post(BoardWord.COMPUTE_NS, took_ns - collective_ns - bubble_ns)
        post(BoardWord.COLLECTIVE_NS, collective_ns + self._late_ns)
        post(BoardWord.EXCHANGE_NS, collective_ns + self._late_ns - waited_ns)
        post(BoardWord.BUBBLE_NS, bubble_ns)
        post(BoardWord.ALL_TO_ALL_NS, self._clock.all_to_all_ns - self._all_to_all_ns)
        self._board.post_done(self.step)


def run_steps(rank_step: RankStep, board: SharedBoard, device: torch.device) -> None:
    """Run steps until the leader publishes an empty one. Raises RankLost when the group is aborted."""
    with torch.inference_mode():
        while True:
            step = board.wait_step(rank_step.step)
            # The leader writes the next batch after all ranks are done with this one.
            batch = board.batch()
            if not len(batch):
                return
            assert step == rank_step.step + 1, f"step {step} follows {rank_step.step} here"
            late_ns = time.perf_counter_ns() - board.published_ns
            rank_step.begin(chain_digest(rank_step.digest, batch), late_ns)
            inputs, rounds = unpack(batch)
            hidden = rank_step.forward(inputs.to(device))
            for rows in rounds:
                rank_step.logits(hidden, rows)
            if device.type == "cuda":
                # Peers read the blocks after the step is posted as done.
                torch.cuda.current_stream(device).synchronize()
            rank_step.end()

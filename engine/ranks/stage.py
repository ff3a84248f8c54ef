"""One rank's part in a step: its layers, over the pieces of the batch, and what the others need of it."""

from __future__ import annotations

import time

import torch
from torch import Tensor

from moonpool.engine.collectives.board import BoardWord, SharedBoard
from moonpool.engine.collectives.exchange_clock import ExchangeClock
from moonpool.engine.collectives.link import Link
from moonpool.engine.model.inputs import StepInputs
from moonpool.engine.model.transformer import Model
from moonpool.engine.ranks.partition.context_step import ContextStep
from moonpool.engine.ranks.partition.micro_batches import cut
from moonpool.engine.ranks.step_message import chain_digest, unpack
from moonpool.runtime.config.options import ParallelOptions


class RankStep:
    """A rank's model, pool and link. Every rank makes the same calls for every step."""

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
        self._step = self._digest = 0
        self._begun_ns = self._collective_ns = self._bubble_ns = self._all_to_all_ns = 0
        self._tokens: ContextStep | None = None

    def begin(self, batch_digested: int) -> None:
        """A step begins whose batch makes the digest ``batch_digested``."""
        self._step += 1
        self._digest = batch_digested
        self._begun_ns = time.perf_counter_ns()
        self._collective_ns, self._bubble_ns = self._clock.collective_ns, self._clock.bubble_ns
        self._all_to_all_ns = self._clock.all_to_all_ns

    @property
    def step(self) -> int:
        return self._step

    @property
    def digest(self) -> int:
        return self._digest

    def forward(self, inputs: StepInputs) -> Tensor | None:
        """The batch through this rank's layers. The last stage's ranks get [their share's tokens, hidden]."""
        shard = self.model.shard
        self._tokens = tokens = ContextStep(
            inputs, shard.cp_rank, shard.cp, block_size=self._pool.shape[4], min_tokens=self._cp_min_tokens
        )
        results = []
        for piece in cut(inputs, shard.pp, self._micro_batch_tokens):
            part = tokens.take(piece)
            hidden = None if shard.is_first else self._link.receive(len(part.token_ids))
            # Tokens that every share computes are the first one's to count.
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
        """Of ``rows`` (in main memory) of the step: rank 0 gets them whole, [len(rows), vocab_size]."""
        shard = self.model.shard
        if not shard.is_last:
            return self._link.gather(None, len(rows)) if shard.rank == 0 else None
        assert hidden is not None
        assert self._tokens is not None
        wanted = self._tokens.collect(hidden, rows, self._link)
        if shard.cp_rank:
            return None
        return self._link.gather(self.model.logits(wanted), len(rows))

    def end(self) -> None:
        """Post that the step is done, and what it took here."""
        took_ns = time.perf_counter_ns() - self._begun_ns
        collective_ns = self._clock.collective_ns - self._collective_ns
        bubble_ns = self._clock.bubble_ns - self._bubble_ns
        post = self._board.post
        post(BoardWord.DIGEST, self._digest)
        post(BoardWord.COMPUTE_NS, took_ns - collective_ns - bubble_ns)
        post(BoardWord.COLLECTIVE_NS, collective_ns)
        post(BoardWord.BUBBLE_NS, bubble_ns)
        post(BoardWord.ALL_TO_ALL_NS, self._clock.all_to_all_ns - self._all_to_all_ns)
        self._board.post_done(self._step)


def run_steps(stage: RankStep, board: SharedBoard, device: torch.device) -> None:
    """The life of a rank that does not lead: step after step, until the leader publishes an empty one.

    Raises RankLost when the group is aborted.
    """
    with torch.inference_mode():
        while True:
            step = board.wait_step(stage.step)
            # The leader writes the next batch only when all are done with this one.
            batch = board.batch()
            if not len(batch):
                return
            assert step == stage.step + 1, f"step {step} follows {stage.step} here"
            stage.begin(chain_digest(stage.digest, batch))
            inputs, rounds = unpack(batch)
            hidden = stage.forward(inputs.to(device))
            for rows in rounds:
                stage.logits(hidden, rows)
            if device.type == "cuda":
                # Who hears that the step is done reads its blocks.
                torch.cuda.current_stream(device).synchronize()
            stage.end()

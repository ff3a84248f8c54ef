"""Ranks of one machine exchanging tensors through memory they share."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.config import ModelConfig
from engine.parallel.board import Board, Count, SharedMemory
from engine.parallel.clock import ExchangeClock
from engine.parallel.plan import ParallelPlan, Shard


@dataclass(frozen=True, slots=True)
class ExchangeShape:
    """The largest things a rank writes for others, in elements."""

    hidden: int  # of one forward pass: tokens × hidden size
    logits: int  # of one gather: rows × words of the largest shard
    hidden_size: int
    dtype: torch.dtype

    @classmethod
    def of(
        cls, config: ModelConfig, plan: ParallelPlan, *, max_tokens: int, max_rows: int, dtype: torch.dtype
    ) -> ExchangeShape:
        words = max(len(shard.vocab) for shard in plan.shards(config))
        return cls(max_tokens * config.hidden_size, max_rows * words, config.hidden_size, dtype)

    @property
    def rank_nbytes(self) -> int:
        """What is written while it was read by all is written again only after the other half was: twice of
        each, for all-reduces, sends and gathers."""
        return 2 * (2 * self.hidden + self.logits) * self.dtype.itemsize


class ShmLink:
    """See ``Link``. A rank writes into its own half-buffers, posts its count, and reads those of the
    others."""

    def __init__(
        self,
        board: Board,
        memory: SharedMemory,
        shape: ExchangeShape,
        config: ModelConfig,
        plan: ParallelPlan,
        shard: Shard,
        clock: ExchangeClock,
    ) -> None:
        """memory: at least ``shape.rank_nbytes`` for each rank, the same on all."""
        self._board = board
        self._shape = shape
        self._shard = shard
        self._clock = clock
        self._num_reduced = self._num_sent = self._num_received = self._num_gathered = 0
        self._heads = [(s.rank, len(s.vocab)) for s in plan.head_shards(config)]
        sizes = [shape.hidden] * 4 + [shape.logits] * 2
        whole = torch.from_numpy(memory.array).view(shape.dtype)
        # For each rank: the halves for all-reduces, for sends and for gathers.
        self._areas: list[list[Tensor]] = []
        end = 0
        for _ in range(plan.world_size):
            areas = []
            for size in sizes:
                first, end = end, end + size
                areas.append(whole[first:end])
            self._areas.append(areas)

    def all_reduce(self, part: Tensor) -> Tensor:
        began_ns = time.perf_counter_ns()
        self._num_reduced = k = self._num_reduced + 1
        n, half, board = part.numel(), k & 1, self._board
        flat = part.view(-1)
        # Everybody who began exchange k - 1 has read k - 2, whose half this is.
        self._areas[self._shard.rank][half][:n].copy_(flat)
        board.post(Count.REDUCED, k)
        parts = []
        for rank in self._shard.tensor_ranks:
            if rank != self._shard.rank:
                board.wait(rank, Count.REDUCED, k)
            parts.append(self._areas[rank][half][:n])
        if len(parts) == 2:
            torch.add(parts[0], parts[1], out=flat)
        else:
            total = parts[0].float() + parts[1]
            for other in parts[2:]:
                total += other
            flat.copy_(total)
        self._clock.collective(began_ns, part.nbytes)
        return part

    def send(self, hidden: Tensor) -> None:
        began_ns = time.perf_counter_ns()
        self._num_sent = k = self._num_sent + 1
        self._board.wait(self._shard.rank + self._shard.stage_size, Count.RECEIVED, k - 2)
        self._areas[self._shard.rank][2 + (k & 1)][: hidden.numel()].copy_(hidden.view(-1))
        self._board.post(Count.SENT, k)
        self._clock.collective(began_ns, hidden.nbytes)

    def receive(self, num_tokens: int) -> Tensor:
        began_ns = time.perf_counter_ns()
        self._num_received = k = self._num_received + 1
        source = self._shard.rank - self._shard.stage_size
        self._board.wait(source, Count.SENT, k)
        width = self._shape.hidden_size
        hidden = self._areas[source][2 + (k & 1)][: num_tokens * width].view(num_tokens, width).clone()
        self._board.post(Count.RECEIVED, k)
        self._clock.bubble(began_ns)
        return hidden

    def gather(self, logits: Tensor | None, num_rows: int) -> Tensor | None:
        began_ns = time.perf_counter_ns()
        self._num_gathered = k = self._num_gathered + 1
        rank, half, board = self._shard.rank, 4 + (k & 1), self._board
        if rank:
            assert logits is not None
            board.wait(0, Count.GATHERED, k - 2)
            self._areas[rank][half][: logits.numel()].copy_(logits.view(-1))
            board.post(Count.GATHERED, k)
            self._clock.collective(began_ns, logits.nbytes)
            return None
        parts = []
        for other, words in self._heads:
            if other == 0:
                assert logits is not None
                parts.append(logits)
                continue
            board.wait(other, Count.GATHERED, k)
            parts.append(self._areas[other][half][: num_rows * words].view(num_rows, words))
        whole = torch.cat(parts, dim=1)
        board.post(Count.GATHERED, k)
        self._clock.collective(began_ns, whole.nbytes)
        return whole

    def close(self) -> None:
        self._areas = []

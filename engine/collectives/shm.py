"""Exchanges between ranks of one machine through shared memory."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from moonpool.engine.checkpoint.config import ModelConfig
from moonpool.engine.collectives.board import BoardWord, SharedBoard, SharedMemory
from moonpool.engine.collectives.exchange_buffer import ExchangeBuffer, lines
from moonpool.engine.collectives.exchange_clock import ExchangeClock
from moonpool.engine.sharding.parallel_plan import ParallelPlan, Shard


@dataclass(frozen=True, slots=True)
class ExchangeShape:
    """The largest tensors a rank writes for others, in bytes."""

    shared_nbytes: int  # one exchange with the tp ranks
    hidden_nbytes: int  # one send: tokens × hidden size
    logits_nbytes: int  # one gather: rows × words of the largest shard
    tokens_nbytes: int  # one exchange with the cp ranks: Q, K and V, attention, or rows for logits
    num_gathers: int  # that the last stage may post before rank 0 takes them, at least 2
    hidden_size: int
    dtype: torch.dtype

    @classmethod
    def of(
        cls,
        config: ModelConfig,
        plan: ParallelPlan,
        *,
        max_tokens: int,
        max_rows: int,
        dtype: torch.dtype,
        steps_in_flight: int,
    ) -> ExchangeShape:
        words = max(len(shard.vocab) for shard in plan.shards(config))
        hidden = lines(max_tokens * config.hidden_size * dtype.itemsize)
        logits = lines(max_rows * words * dtype.itemsize)
        # The worst case of an all-to-all: one rank computes all of a step's tokens and returns them.
        choices = config.moe.top_k if config.moe and plan.ep > 1 else 1
        shared = lines(choices * hidden) + _starts_nbytes(plan.tp)
        shard, widest = plan.shard(config, 0), 0
        if plan.cp > 1:
            num_heads = len(shard.heads)
            num_kept = 1 if config.latent is not None else 2 * len(shard.kv_heads)
            # Attention comes with a float32 for each head.
            qkv, attended = num_heads + num_kept, num_heads + -(-4 * num_heads // config.head_dim)
            widest = max(max_tokens * max(qkv, attended) * config.head_dim, max_rows * config.hidden_size)
        tokens = lines(widest * dtype.itemsize)
        num_gathers = max(2, steps_in_flight)
        return cls(shared, hidden, logits, tokens, num_gathers, config.hidden_size, dtype)

    @property
    def areas(self) -> list[int]:
        """Buffers, in this order: two of tp exchanges, of sends and of cp exchanges, and the gathers."""
        sizes = (self.shared_nbytes, self.hidden_nbytes, self.tokens_nbytes)
        return [size for size in sizes for _ in range(2)] + [self.logits_nbytes] * self.num_gathers

    @property
    def rank_nbytes(self) -> int:
        return sum(self.areas)


class ShmLink:
    """See ``Link``. A rank writes to its own buffers, posts its count, and reads the buffers of others.

    All exchanges between tp ranks go through one ``ExchangeBuffer``, those between cp ranks through another.
    """

    def __init__(
        self,
        board: SharedBoard,
        memory: SharedMemory,
        shape: ExchangeShape,
        config: ModelConfig,
        plan: ParallelPlan,
        shard: Shard,
        clock: ExchangeClock,
    ) -> None:
        """memory: at least ``shape.rank_nbytes`` for each rank, the same memory on all."""
        self._board = board
        self._shape = shape
        self._shard = shard
        self._clock = clock
        self._num_sent = self._num_received = self._num_gathered = 0
        self._heads = [(s.rank, len(s.vocab)) for s in plan.head_shards(config)]
        whole = torch.from_numpy(memory.array)
        # For each rank its ``ExchangeShape.areas``.
        self._areas: list[list[Tensor]] = []
        end = 0
        for _ in range(plan.world_size):
            areas = []
            for size in shape.areas:
                first, end = end, end + size
                areas.append(whole[first:end])
            self._areas.append(areas)
        buffers = {rank: self._areas[rank][:2] for rank in shard.tensor_ranks}
        self._tp = ExchangeBuffer(board, BoardWord.EXCHANGED, shard.tensor_ranks, buffers)
        buffers = {rank: self._areas[rank][4:6] for rank in shard.context_ranks}
        self._cp = ExchangeBuffer(board, BoardWord.CP_EXCHANGED, shard.context_ranks, buffers)

    def all_reduce(self, part: Tensor) -> Tensor:
        began_ns = time.perf_counter_ns()
        flat, n = part.view(-1), part.numel()
        k = self._tp.write(part)
        parts = [self._tp.read(rank, k, part.dtype, 0, n) for rank in self._tp.ranks]
        if len(parts) == 2:
            torch.add(parts[0], parts[1], out=flat)
        else:
            flat.copy_(_total(parts))
        self._clock.collective("all_reduce", began_ns, part.nbytes)
        return part

    def all_gather(self, part: Tensor, counts: Sequence[int]) -> Tensor:
        began_ns = time.perf_counter_ns()
        width = part.shape[1:].numel()
        k = self._tp.write(part)
        parts = [
            self._tp.read(rank, k, part.dtype, 0, n * width)
            for rank, n in zip(self._tp.ranks, counts, strict=True)
        ]
        whole = torch.cat(parts).view(-1, *part.shape[1:])
        self._clock.collective("all_gather", began_ns, part.nbytes)
        return whole

    def reduce_scatter(self, whole: Tensor, counts: Sequence[int]) -> Tensor:
        began_ns = time.perf_counter_ns()
        width, tp_rank = whole.shape[1:].numel(), self._shard.tp_rank
        first, n = sum(counts[:tp_rank]) * width, counts[tp_rank] * width
        k = self._tp.write(whole)
        total = _total([self._tp.read(rank, k, whole.dtype, first, n) for rank in self._tp.ranks])
        self._clock.collective("reduce_scatter", began_ns, whole.nbytes)
        return total.to(whole.dtype).view(counts[tp_rank], *whole.shape[1:])

    def all_to_all(self, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        began_ns = time.perf_counter_ns()
        width, tp_rank = rows.shape[1:].numel(), self._shard.tp_rank
        # The offsets of each reader's rows precede them.
        starts = torch.tensor([0, *accumulate(sent)])
        k = self._tp.write(rows, starts)
        behind = _starts_nbytes(self._shard.tp) // rows.itemsize
        parts = []
        for rank, n in zip(self._tp.ranks, received, strict=True):
            start, end = self._tp.read(rank, k, torch.int64, tp_rank, 2).tolist()
            assert end - start == n, f"rank {rank} sent {end - start} rows, expected {n}"
            parts.append(self._tp.read(rank, k, rows.dtype, behind + start * width, n * width))
        arrived = torch.cat(parts).view(-1, *rows.shape[1:])
        self._clock.all_to_all(began_ns, rows.nbytes)
        return arrived

    def gather_cp(self, part: Tensor, counts: Sequence[int]) -> list[Tensor]:
        return self._from_cp_ranks("gather_cp", part, [range(n) for n in counts])

    def scatter_cp(self, whole: Tensor, counts: Sequence[int]) -> list[Tensor]:
        first, cp_rank = sum(counts[: self._shard.cp_rank]), self._shard.cp_rank
        own = range(first, first + counts[cp_rank])
        return self._from_cp_ranks("scatter_cp", whole, [own] * len(counts))

    def _from_cp_ranks(self, name: str, part: Tensor, rows: Sequence[range]) -> list[Tensor]:
        """Give ``part`` and take these rows of what each cp rank gives."""
        began_ns, width = time.perf_counter_ns(), part.shape[1]
        k = self._cp.write(part)
        parts = [
            self._cp.read(rank, k, part.dtype, some.start * width, len(some) * width).view(len(some), width)
            for rank, some in zip(self._cp.ranks, rows, strict=True)
        ]
        self._clock.collective(name, began_ns, part.nbytes)
        return parts

    def send(self, hidden: Tensor) -> None:
        began_ns = time.perf_counter_ns()
        self._num_sent = k = self._num_sent + 1
        self._board.wait(self._shard.rank + self._shard.stage_size, BoardWord.RECEIVED, k - 2)
        self._area(self._shard.rank, 2, k, hidden.dtype)[: hidden.numel()].copy_(hidden.view(-1))
        self._board.advance(BoardWord.SENT, k)
        self._clock.collective("send", began_ns, hidden.nbytes)

    def receive(self, num_tokens: int) -> Tensor:
        began_ns = time.perf_counter_ns()
        self._num_received = k = self._num_received + 1
        source, waited_ns = self._shard.rank - self._shard.stage_size, self._board.waited_ns
        self._board.wait(source, BoardWord.SENT, k)
        waited_ns = self._board.waited_ns - waited_ns
        width = self._shape.hidden_size
        area = self._area(source, 2, k, self._shape.dtype)
        hidden = area[: num_tokens * width].view(num_tokens, width).clone()
        self._board.advance(BoardWord.RECEIVED, k)
        self._clock.received(began_ns, waited_ns, hidden.nbytes)
        return hidden

    def gather(self, logits: Tensor | None, num_rows: int) -> Tensor | None:
        began_ns = time.perf_counter_ns()
        self._num_gathered = k = self._num_gathered + 1
        rank, board = self._shard.rank, self._board
        if rank:
            assert logits is not None
            board.wait(0, BoardWord.GATHERED, k - self._shape.num_gathers)
            self._gathered(rank, k, logits.dtype)[: logits.numel()].copy_(logits.view(-1))
            board.advance(BoardWord.GATHERED, k)
            self._clock.collective("gather", began_ns, logits.nbytes)
            return None
        parts = []
        for other, words in self._heads:
            if other == 0:
                assert logits is not None
                parts.append(logits)
                continue
            board.wait(other, BoardWord.GATHERED, k)
            area = self._gathered(other, k, self._shape.dtype)
            parts.append(area[: num_rows * words].view(num_rows, words))
        whole = torch.cat(parts, dim=1)
        board.advance(BoardWord.GATHERED, k)
        self._clock.collective("gather", began_ns, whole.nbytes)
        return whole

    def serve(self) -> None:
        """Nothing changes: waits have no limit, the board knows which rank is lost."""

    def close(self) -> None:
        self._areas = []
        self._tp.close()
        self._cp.close()

    def _area(self, rank: int, first: int, k: int, dtype: torch.dtype) -> Tensor:
        """Return the buffer for number ``k``, one of the areas ``first`` and ``first + 1``."""
        return self._areas[rank][first + (k & 1)].view(dtype)

    def _gathered(self, rank: int, k: int, dtype: torch.dtype) -> Tensor:
        return self._areas[rank][6 + k % self._shape.num_gathers].view(dtype)


def _total(parts: Sequence[Tensor]) -> Tensor:
    """Sum in rank order, in float32."""
    total = parts[0].float() + parts[1] if len(parts) > 1 else parts[0].float()
    for other in parts[2:]:
        total += other
    return total


def _starts_nbytes(num_ranks: int) -> int:
    """Return the bytes of an all-to-all's offsets: int64 [num_ranks + 1]."""
    return lines(8 * (num_ranks + 1))

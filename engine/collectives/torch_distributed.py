"""Exchanges through torch.distributed: NCCL between GPUs, Gloo without shared memory."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moonpool.engine.checkpoint.config import ModelConfig
from moonpool.engine.collectives.exchange_clock import ExchangeClock
from moonpool.engine.collectives.process_group import ProcessGroup, raising_rank_lost
from moonpool.engine.sharding.parallel_plan import ParallelPlan, Shard

# Tensors of a rank in transit, at least: the next one is computed meanwhile.
_LEAST_SENDS = 2


def _named(*names: str) -> Any:
    """Return the first of these functions of torch.distributed: versions of torch name them differently."""
    return next(found for name in names if (found := getattr(dist, name, None)) is not None)


# The second name is that of torch before 2.13.
_all_gather = _named("all_gather_single", "all_gather_into_tensor")
_reduce_scatter = _named("reduce_scatter_single", "reduce_scatter_tensor")


class TorchLink:
    """See ``Link``. All ranks construct it at once, which makes a group of tp ranks for each stage and cp
    rank."""

    def __init__(
        self,
        ranks: ProcessGroup,
        config: ModelConfig,
        plan: ParallelPlan,
        shard: Shard,
        dtype: torch.dtype,
        device: torch.device,
        clock: ExchangeClock,
        *,
        within_stages: bool = True,
        steps_in_flight: int = 1,
    ) -> None:
        """within_stages: False where all ranks call only ``send``, ``receive`` and ``gather``.
        steps_in_flight: the last stage can send the logits of so many before rank 0 takes the first."""
        self._ranks = ranks
        self._shard = shard
        self._clock = clock
        self._dtype = dtype
        self._device = device
        self._hidden_size = config.hidden_size
        self._heads = [(s.rank, len(s.vocab)) for s in plan.head_shards(config)]
        self._max_sends = max(_LEAST_SENDS, steps_in_flight)
        self._sent: deque[tuple[dist.Work | None, Tensor]] = deque()
        if within_stages:
            self._tensor_group = ranks.groups(dict.fromkeys(s.tensor_ranks for s in plan.shards(config)))

    def all_reduce(self, part: Tensor) -> Tensor:
        began_ns = time.perf_counter_ns()
        self._finish(dist.all_reduce(part, group=self._tensor_group, async_op=True))
        self._clock.collective("all_reduce", began_ns, part.nbytes)
        return part

    def all_gather(self, part: Tensor, counts: Sequence[int]) -> Tensor:
        began_ns = time.perf_counter_ns()
        # Padded to equal lengths: neither Gloo nor NCCL gathers or scatters different ones.
        longest = max(counts)
        padded = part.new_zeros((longest, *part.shape[1:]))
        padded[: len(part)] = part
        whole = part.new_empty((len(counts) * longest, *part.shape[1:]))
        self._finish(_all_gather(whole, padded, group=self._tensor_group, async_op=True))
        runs = [
            run[:n] for run, n in zip(torch.split(whole, longest) if longest else (), counts, strict=False)
        ]
        self._clock.collective("all_gather", began_ns, part.nbytes)
        return torch.cat(runs) if runs else whole

    def reduce_scatter(self, whole: Tensor, counts: Sequence[int]) -> Tensor:
        began_ns = time.perf_counter_ns()
        longest = max(counts)
        padded = whole.new_zeros((len(counts), longest, *whole.shape[1:]))
        for run, rows in zip(padded, torch.split(whole, list(counts)), strict=True):
            run[: len(rows)] = rows
        total = whole.new_empty((longest, *whole.shape[1:]))
        flat = padded.flatten(0, 1)
        self._finish(_reduce_scatter(total, flat, group=self._tensor_group, async_op=True))
        self._clock.collective("reduce_scatter", began_ns, whole.nbytes)
        return total[: counts[self._shard.tp_rank]]

    def all_to_all(self, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        began_ns = time.perf_counter_ns()
        arrived = rows.new_empty((sum(received), *rows.shape[1:]))
        lengths = list(received), list(sent)
        self._finish(dist.all_to_all_single(arrived, rows, *lengths, group=self._tensor_group, async_op=True))
        self._clock.all_to_all(began_ns, rows.nbytes)
        return arrived

    def gather_cp(self, part: Tensor, counts: Sequence[int]) -> list[Tensor]:
        copy = part.clone(memory_format=torch.contiguous_format)
        return self._exchange_cp("gather_cp", [copy] * len(counts), counts)

    def scatter_cp(self, whole: Tensor, counts: Sequence[int]) -> list[Tensor]:
        given = list(torch.split(whole.clone(memory_format=torch.contiguous_format), list(counts)))
        return self._exchange_cp("scatter_cp", given, [counts[self._shard.cp_rank]] * len(counts))

    def _exchange_cp(self, name: str, given: Sequence[Tensor], counts: Sequence[int]) -> list[Tensor]:
        """Give each cp rank its rows, and take ``counts`` rows of each."""
        began_ns = time.perf_counter_ns()
        own, ranks = self._shard.cp_rank, self._shard.context_ranks
        taken = [
            given[i] if i == own else given[i].new_empty((n, given[i].shape[1])) for i, n in enumerate(counts)
        ]
        others = [i for i in range(len(counts)) if i != own]
        operations = [dist.P2POp(dist.isend, given[i], ranks[i]) for i in others if len(given[i])]
        operations += [dist.P2POp(dist.irecv, taken[i], ranks[i]) for i in others if counts[i]]
        with raising_rank_lost(self._shard.rank):
            works = dist.batch_isend_irecv(operations) if operations else []
        for work in works:
            self._ranks.finish(ranks[others[0]], work)
        self._clock.collective(name, began_ns, sum(given[i].nbytes for i in others))
        return taken

    def send(self, hidden: Tensor) -> None:
        began_ns = time.perf_counter_ns()
        self._isend(hidden, self._shard.rank + self._shard.stage_size)
        self._clock.collective("send", began_ns, hidden.nbytes)

    def receive(self, num_tokens: int) -> Tensor:
        began_ns, waited_ns = time.perf_counter_ns(), self._ranks.board.waited_ns
        hidden = self._recv(self._shard.rank - self._shard.stage_size, num_tokens, self._hidden_size)
        self._clock.received(began_ns, self._ranks.board.waited_ns - waited_ns, hidden.nbytes)
        return hidden

    def gather(self, logits: Tensor | None, num_rows: int) -> Tensor | None:
        began_ns = time.perf_counter_ns()
        if self._shard.rank:
            assert logits is not None
            self._isend(logits, 0)
            self._clock.collective("gather", began_ns, logits.nbytes)
            return None
        parts = []
        for rank, words in self._heads:
            part = self._recv(rank, num_rows, words) if rank else logits
            assert part is not None
            parts.append(part)
        whole = torch.cat(parts, dim=1)
        self._clock.collective("gather", began_ns, whole.nbytes)
        return whole

    def serve(self) -> None:
        self._ranks.limit_steps()

    def close(self) -> None:
        self._sent.clear()
        self._ranks.close()

    def _finish(self, work: dist.Work | None) -> None:
        self._ranks.finish(self._shard.rank, work)

    def _isend(self, tensor: Tensor, rank: int) -> None:
        """Begin to send a copy: Gloo moves it when the receiver asks for it, which may be later."""
        if len(self._sent) == self._max_sends:
            work, _ = self._sent.popleft()
            self._ranks.finish(rank, work)
        copy = tensor.clone(memory_format=torch.contiguous_format)
        with raising_rank_lost(rank):
            self._sent.append((dist.isend(copy, rank), copy))

    def _recv(self, rank: int, *shape: int) -> Tensor:
        taken = torch.empty(shape, dtype=self._dtype, device=self._device)
        with raising_rank_lost(rank):
            work = dist.irecv(taken, rank)
        self._ranks.finish(rank, work)
        return taken

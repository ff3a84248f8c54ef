"""Ranks exchanging tensors through torch.distributed: NCCL between GPUs, Gloo where memory is not shared."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store

from engine.config import ModelConfig
from engine.errors import RankLost
from engine.parallel.clock import ExchangeClock
from engine.parallel.plan import ParallelPlan, Shard


class TorchLink:
    """See ``Link``. One group for each share of each stage and one of all; made by all ranks at once."""

    def __init__(
        self,
        backend: str,
        store: Store,
        timeout_s: float,
        start_timeout_s: float,
        config: ModelConfig,
        plan: ParallelPlan,
        shard: Shard,
        dtype: torch.dtype,
        device: torch.device,
        clock: ExchangeClock,
    ) -> None:
        """store: the one all ranks were told of, used for nothing else.

        Raises RankLost when the others do not come within ``start_timeout_s``.
        """
        self._shard = shard
        self._clock = clock
        self._dtype = dtype
        self._device = device
        self._hidden_size = config.hidden_size
        self._heads = [(s.rank, len(s.vocab)) for s in plan.head_shards(config)]
        with _losing(shard.rank):
            # From here on ``timeout_s`` holds, and other ranks may still be importing.
            store.set(f"here/{shard.rank}", "")
            everybody = [f"here/{rank}" for rank in range(plan.world_size)]
            store.wait(everybody, timedelta(seconds=start_timeout_s))
            dist.init_process_group(
                backend,
                store=store,
                rank=shard.rank,
                world_size=plan.world_size,
                timeout=timedelta(seconds=timeout_s),
                device_id=device if device.type == "cuda" else None,
            )
            for ranks in dict.fromkeys(s.tensor_ranks for s in plan.shards(config)):
                # Every rank makes every group, also those it is not in.
                group = dist.new_group(list(ranks), timeout=timedelta(seconds=timeout_s))
                if shard.rank in ranks:
                    self._tensor_group = group

    def all_reduce(self, part: Tensor) -> Tensor:
        began_ns = time.perf_counter_ns()
        with _losing(self._shard.rank):
            dist.all_reduce(part, group=self._tensor_group)
        self._clock.collective(began_ns, part.nbytes)
        return part

    def all_gather(self, part: Tensor, counts: Sequence[int]) -> Tensor:
        began_ns = time.perf_counter_ns()
        # Runs of different lengths are padded: neither Gloo nor NCCL gathers or scatters them as they are.
        longest = max(counts)
        given = part.new_zeros((longest, *part.shape[1:]))
        given[: len(part)] = part
        whole = part.new_empty((len(counts) * longest, *part.shape[1:]))
        with _losing(self._shard.rank):
            dist.all_gather_single(whole, given, group=self._tensor_group)
        runs = [
            run[:n] for run, n in zip(torch.split(whole, longest) if longest else (), counts, strict=False)
        ]
        self._clock.collective(began_ns, part.nbytes)
        return torch.cat(runs) if runs else whole

    def reduce_scatter(self, whole: Tensor, counts: Sequence[int]) -> Tensor:
        began_ns = time.perf_counter_ns()
        longest = max(counts)
        given = whole.new_zeros((len(counts), longest, *whole.shape[1:]))
        for run, rows in zip(given, torch.split(whole, list(counts)), strict=True):
            run[: len(rows)] = rows
        total = whole.new_empty((longest, *whole.shape[1:]))
        with _losing(self._shard.rank):
            dist.reduce_scatter_single(total, given.flatten(0, 1), group=self._tensor_group)
        self._clock.collective(began_ns, whole.nbytes)
        return total[: counts[self._shard.place]]

    def all_to_all(self, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        began_ns = time.perf_counter_ns()
        arrived = rows.new_empty((sum(received), *rows.shape[1:]))
        with _losing(self._shard.rank):
            dist.all_to_all_single(arrived, rows, list(received), list(sent), group=self._tensor_group)
        self._clock.all_to_all(began_ns, rows.nbytes)
        return arrived

    def swap(self, part: Tensor, counts: Sequence[int]) -> Callable[[int], Tensor]:
        began_ns = time.perf_counter_ns()
        ours, ranks = self._shard.share, self._shard.context_ranks
        given = part.clone(memory_format=torch.contiguous_format)
        taken = [part.new_empty((n, *part.shape[1:])) for n in counts]
        others = [share for share in range(len(counts)) if share != ours]
        operations = [dist.P2POp(dist.isend, given, ranks[share]) for share in others if counts[ours]]
        operations += [
            dist.P2POp(dist.irecv, taken[share], ranks[share]) for share in others if counts[share]
        ]
        with _losing(self._shard.rank):
            works = dist.batch_isend_irecv(operations) if operations else []
        self._clock.collective(began_ns, part.nbytes)

        def take(share: int) -> Tensor:
            began_ns = time.perf_counter_ns()
            with _losing(ranks[share]):
                while works:
                    works.pop().wait()
            self._clock.went_on(began_ns)
            return taken[share]

        return take

    def send(self, hidden: Tensor) -> None:
        began_ns = time.perf_counter_ns()
        with _losing(self._shard.rank):
            dist.send(hidden, self._shard.rank + self._shard.stage_size)
        self._clock.collective(began_ns, hidden.nbytes)

    def receive(self, num_tokens: int) -> Tensor:
        began_ns = time.perf_counter_ns()
        hidden = torch.empty((num_tokens, self._hidden_size), dtype=self._dtype, device=self._device)
        with _losing(self._shard.rank):
            dist.recv(hidden, self._shard.rank - self._shard.stage_size)
        self._clock.bubble(began_ns)
        return hidden

    def gather(self, logits: Tensor | None, num_rows: int) -> Tensor | None:
        began_ns = time.perf_counter_ns()
        if self._shard.rank:
            assert logits is not None
            with _losing(self._shard.rank):
                dist.send(logits, 0)
            self._clock.collective(began_ns, logits.nbytes)
            return None
        parts = []
        for rank, words in self._heads:
            part = logits
            if rank:
                part = torch.empty((num_rows, words), dtype=self._dtype, device=self._device)
                with _losing(rank):
                    dist.recv(part, rank)
            assert part is not None
            parts.append(part)
        whole = torch.cat(parts, dim=1)
        self._clock.collective(began_ns, whole.nbytes)
        return whole

    def close(self) -> None:
        dist.destroy_process_group()


@contextmanager
def _losing(rank: int) -> Iterator[None]:
    """torch.distributed's errors become RankLost; ``rank``: the one that may be to blame."""
    try:
        yield
    except RuntimeError as error:
        raise RankLost(rank, f"torch.distributed: {error}") from error

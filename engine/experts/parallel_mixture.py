"""Expert parallelism: a mixture with its experts distributed over the tp ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from moonpool.engine.collectives.link import Link
from moonpool.engine.experts.capacity import CapacityRouter
from moonpool.engine.experts.group_router import GroupRouter
from moonpool.engine.experts.mixture import Router, SharedExpert
from moonpool.engine.sharding.parallel_plan import Shard
from moonpool.kernels.dispatch import combine_experts, group_by_expert

# An all-to-all moves top_k rows per token, a sum moves more with more ranks. At 2 × top_k ranks the
# all-to-all was still slower (docs/decisions/ranks.md), so it starts at 4 × top_k.
_RANKS_PER_CHOICE = 4
_MIN_TOKENS = 256
_NEVER = 1 << 62


def min_exchange_tokens(num_ranks: int, top_k: int) -> int:
    """Return the default for the smallest step with an all-to-all, in tokens."""
    return _MIN_TOKENS if num_ranks >= _RANKS_PER_CHOICE * top_k else _NEVER


class ExpertParallelMixture:
    """Two forms with equal results except for the order of a sum. Without a ``CapacityRouter`` no expert has
    a row limit; with it ``exchange`` counts the rows of each rank's own tokens for itself.

    A call computes this rank's experts for all tokens: x [n, hidden] → a summand. ``exchange`` sends each
    rank's own tokens to their experts and back. With copies of an expert, token i goes to copy i % copies on
    all ranks.
    """

    def __init__(
        self,
        router: Router | GroupRouter | CapacityRouter,
        experts: Callable[[Tensor, Tensor], Tensor],
        shared_parts: Sequence[SharedExpert],
        load: Tensor,
        layer: int,
        shard: Shard,
        link: Link | None,
    ) -> None:
        """experts: as ``Experts``, the shard's in order of their ids. shared_parts: the shared expert's
        summands by tp rank, if it exists. load: int64 [num_experts + 1], counts the rows of all tokens, and
        the choices that were dropped."""
        self.router = router
        self._experts = experts
        self._shared_parts = shared_parts
        self._load = load
        self._shard = shard
        self._link = link
        self._num_ranks = shard.ep
        holders, own = shard.expert_placement.layers[layer], shard.experts(layer)
        self._num_own = len(own)
        device = load.device
        # The last one stands for dropped choices, which no rank computes.
        holders = (*holders, (self._num_ranks,))
        self._num_copies = torch.tensor([len(ranks) for ranks in holders], device=device)
        most = int(self._num_copies.max())
        self._copies = torch.tensor(
            [[ranks[i % len(ranks)] for i in range(most)] for ranks in holders], device=device
        )
        # Local index by expert; experts of other ranks have an index after all local ones.
        self._numbers = torch.full((len(holders),), len(own), dtype=torch.int32, device=device)
        self._numbers[list(own)] = torch.arange(len(own), dtype=torch.int32, device=device)

    def __call__(self, x: Tensor) -> Tensor:
        weights, ids = self.router(x)
        self._count(ids)
        ours = self._ranks(ids) == self._shard.expert_rank
        numbers = self._numbers[ids.long()].masked_fill_(~ours, self._num_own)
        order, offsets = group_by_expert(numbers, self._num_own + 1)
        offsets = offsets[:-1]
        num_rows = int(offsets[-1])
        rows = x.new_zeros((len(order), x.shape[1]))
        rows[:num_rows] = self._experts(x[order[:num_rows] // self.router.top_k], offsets)
        out = combine_experts(rows, order, weights)
        return out.add_(self._shared_parts[self._shard.tp_rank](x)) if self._shared_parts else out

    def worth_exchanging(self, num_tokens: int) -> bool:
        """Return whether a step of ``num_tokens`` uses the all-to-all."""
        least = self._shard.all_to_all_tokens or min_exchange_tokens(self._shard.tp, self.router.top_k)
        return num_tokens >= least

    def exchange(self, x: Tensor, counts: Sequence[int]) -> Tensor:
        """x: [counts[tp_rank], hidden], this rank's tokens → their complete results."""
        assert self._link is not None
        weights, ids = self.router(x)
        # With all choices every rank knows the sources of its rows, so rows carry no metadata.
        all_ids = self._link.all_gather(ids, counts)
        self._count(all_ids)
        ranks = self._ranks(all_ids)
        first = sum(counts[: self._shard.tp_rank])
        order, offsets = group_by_expert(ranks[first : first + len(x)].int(), self._num_ranks + 1)
        num_rows = int(offsets[self._num_ranks])
        sent, received = self._num_rows(ranks, counts)
        own = x[order[:num_rows] // self.router.top_k]
        rows = self._link.all_to_all(self._for_each(own, sent), sent, received)
        # They arrive in the order of all tokens.
        numbers = self._numbers[all_ids[ranks == self._shard.expert_rank].long()]
        here, offsets = group_by_expert(numbers[:, None], self._num_own)
        back = torch.empty_like(rows)
        back[here] = self._experts(rows[here], offsets)
        results = self._summed(self._link.all_to_all(back, received, sent), sent)
        if num_rows < len(order):
            results = pad(results, (0, 0, 0, len(order) - num_rows))
        out = combine_experts(results, order, weights)
        for part in self._shared_parts:
            out.add_(part(x))
        return out

    def _ranks(self, ids: Tensor) -> Tensor:
        """ids: [n, top_k], from the step's first token → the rank that computes each, [n, top_k]; one beyond
        the last for dropped choices."""
        wide = ids.long()
        tokens = torch.arange(len(ids), device=ids.device)[:, None]
        return self._copies[wide, tokens % self._num_copies[wide]]

    def _count(self, ids: Tensor) -> None:
        self._load += torch.bincount(ids.flatten(), minlength=len(self._load))

    @property
    def _column_ranks(self) -> int:
        """The number of tp ranks that split the columns of the same experts."""
        return self._shard.tp // self._num_ranks

    def _num_rows(self, ranks: Tensor, counts: Sequence[int]) -> tuple[list[int], list[int]]:
        """Return the rows to each tp rank, and from each."""
        tp_ranks = torch.arange(len(counts), device=ranks.device)
        source = torch.repeat_interleave(tp_ranks, torch.tensor(counts, device=ranks.device))
        width = self._num_ranks + 1
        pairs = (source[:, None] * width + ranks).flatten()
        table = torch.bincount(pairs, minlength=len(counts) * width).view(-1, width)[:, : self._num_ranks]
        sent = table[self._shard.tp_rank].repeat_interleave(self._column_ranks)
        return sent.tolist(), table[:, self._shard.expert_rank].tolist()

    def _for_each(self, rows: Tensor, sent: Sequence[int]) -> Tensor:
        """Repeat rows, grouped by rank, for each tp rank that computes with them."""
        if self._column_ranks == 1:
            return rows
        groups = torch.split(rows, list(sent[:: self._column_ranks]))
        return torch.cat([group for group in groups for _ in range(self._column_ranks)])

    def _summed(self, parts: Tensor, sent: Sequence[int]) -> Tensor:
        """Sum the results of tp ranks that split the columns of the same experts."""
        n = self._column_ranks
        if n == 1:
            return parts
        groups = torch.split(parts, list(sent))
        return torch.cat([torch.stack(groups[i : i + n]).sum(0) for i in range(0, len(groups), n)])

"""A mixture of experts whose experts are dealt out to the ranks of a stage."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from moonpool.engine.collectives.link import Link
from moonpool.engine.experts.mixture import Router, SharedExpert
from moonpool.engine.sharding.parallel_plan import Shard
from moonpool.kernels import combine_experts, group_by_expert

# All-to-all moves top_k rows a token over the ranks, a sum what grows with the ranks: at twice as many ranks
# as choices it was not faster yet (docs/decisions/engine.md), so it is left to four times as many.
_RANKS_PER_CHOICE = 4
_LEAST_TOKENS = 256
_NEVER = 1 << 62


def min_exchange_tokens(num_ranks: int, top_k: int) -> int:
    """From how many tokens on a step sends them to their experts, where the options do not say."""
    return _LEAST_TOKENS if num_ranks >= _RANKS_PER_CHOICE * top_k else _NEVER


class ExpertParallelMixture:
    """Two forms, which give the same but for the order of a sum; no expert has a limit of rows, so no token
    is ever dropped.

    Called, as any MLP: x [n, hidden], all the stage's tokens → this rank's part of a sum, that of its own
    experts. ``exchange``: tokens are the ranks' own, and go to where their experts are and back.

    Where an expert has copies, token i of the step goes to copy i % copies: the same on all ranks.
    """

    def __init__(
        self,
        router: Router,
        experts: Callable[[Tensor, Tensor], Tensor],
        shared_parts: Sequence[SharedExpert],
        load: Tensor,
        layer: int,
        shard: Shard,
        link: Link | None,
    ) -> None:
        """experts: as ``Experts``, of those that the shard holds, in the order of their ids. shared_parts: of
        all places, whose sum is the shared expert; none where there is none. load: int64 [num_experts],
        counts the rows of all tokens of the stage."""
        self.router = router
        self._experts = experts
        self._shared_parts = shared_parts
        self._load = load
        self._shard = shard
        self._link = link
        self._num_ranks = shard.ep
        holders, held = shard.expert_placement.layers[layer], shard.experts(layer)
        self._num_held = len(held)
        device = load.device
        self._num_copies = torch.tensor([len(ranks) for ranks in holders], device=device)
        most = int(self._num_copies.max())
        self._copies = torch.tensor(
            [[ranks[i % len(ranks)] for i in range(most)] for ranks in holders], device=device
        )
        # By expert, its number here; those of other ranks come behind all of ours.
        self._numbers = torch.full((len(holders),), len(held), dtype=torch.int32, device=device)
        self._numbers[list(held)] = torch.arange(len(held), dtype=torch.int32, device=device)

    def __call__(self, x: Tensor) -> Tensor:
        weights, ids = self.router(x)
        self._count(ids)
        ours = self._ranks(ids) == self._shard.expert_rank
        numbers = self._numbers[ids.long()].masked_fill_(~ours, self._num_held)
        order, offsets = group_by_expert(numbers, self._num_held + 1)
        offsets = offsets[:-1]
        num_rows = int(offsets[-1])
        rows = x.new_zeros((len(order), x.shape[1]))
        rows[:num_rows] = self._experts(x[order[:num_rows] // self.router.top_k], offsets)
        out = combine_experts(rows, order, weights)
        return out.add_(self._shared_parts[self._shard.tp_rank](x)) if self._shared_parts else out

    def worth_exchanging(self, num_tokens: int) -> bool:
        """Whether a step of so many tokens exchanges them."""
        least = self._shard.all_to_all_tokens or min_exchange_tokens(self._shard.tp, self.router.top_k)
        return num_tokens >= least

    def exchange(self, x: Tensor, counts: Sequence[int]) -> Tensor:
        """x: [counts[place], hidden], this rank's run of the step's tokens → their results, whole."""
        assert self._link is not None
        weights, ids = self.router(x)
        # With everybody's choices each rank knows what comes from where, and nothing has to be told with it.
        all_ids = self._link.all_gather(ids, counts)
        self._count(all_ids)
        ranks = self._ranks(all_ids)
        first = sum(counts[: self._shard.tp_rank])
        order, _ = group_by_expert(ranks[first : first + len(x)].int(), self._num_ranks)
        sent, received = self._num_rows(ranks, counts)
        rows = self._link.all_to_all(self._for_each(x[order // self.router.top_k], sent), sent, received)
        # They came in the order of their tokens, of all tokens.
        numbers = self._numbers[all_ids[ranks == self._shard.expert_rank].long()]
        here, offsets = group_by_expert(numbers[:, None], self._num_held)
        back = torch.empty_like(rows)
        back[here] = self._experts(rows[here], offsets)
        results = self._summed(self._link.all_to_all(back, received, sent), sent)
        out = combine_experts(results, order, weights)
        for part in self._shared_parts:
            out.add_(part(x))
        return out

    def _ranks(self, ids: Tensor) -> Tensor:
        """ids: [n, top_k], of the step's tokens from the first on → which rank computes each, [n, top_k]."""
        wide = ids.long()
        tokens = torch.arange(len(ids), device=ids.device)[:, None]
        return self._copies[wide, tokens % self._num_copies[wide]]

    def _count(self, ids: Tensor) -> None:
        self._load += torch.bincount(ids.flatten(), minlength=len(self._load))

    @property
    def _sharers(self) -> int:
        """Neighbours that share the columns of the same experts."""
        return self._shard.tp // self._num_ranks

    def _num_rows(self, ranks: Tensor, counts: Sequence[int]) -> tuple[list[int], list[int]]:
        """Rows from us to each place, and to us from each."""
        places = torch.arange(len(counts), device=ranks.device)
        source = torch.repeat_interleave(places, torch.tensor(counts, device=ranks.device))
        pairs = (source[:, None] * self._num_ranks + ranks).flatten()
        table = torch.bincount(pairs, minlength=len(counts) * self._num_ranks).view(-1, self._num_ranks)
        sent = table[self._shard.tp_rank].repeat_interleave(self._sharers)
        return sent.tolist(), table[:, self._shard.expert_rank].tolist()

    def _for_each(self, rows: Tensor, sent: Sequence[int]) -> Tensor:
        """Rows grouped by rank, as often as there are places that compute with them."""
        if self._sharers == 1:
            return rows
        groups = torch.split(rows, list(sent[:: self._sharers]))
        return torch.cat([group for group in groups for _ in range(self._sharers)])

    def _summed(self, parts: Tensor, sent: Sequence[int]) -> Tensor:
        """The results of those that share columns, one after the other → their sums, grouped by rank."""
        n = self._sharers
        if n == 1:
            return parts
        pieces = torch.split(parts, list(sent))
        return torch.cat([torch.stack(pieces[i : i + n]).sum(0) for i in range(0, len(pieces), n)])

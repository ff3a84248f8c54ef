"""A limit on the rows of each expert: choices beyond it go to other experts, or are dropped.

Ranks wait for the one with the most rows. The limit bounds its time, and costs quality.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from moonpool.engine.experts.group_router import GroupRouter
from moonpool.engine.experts.mixture import Router

MIN_ROWS = 8
"""No limit is below this many rows: reading an expert's weights takes longer than multiplying so few."""


class CapacityRouter:
    """x: [n, hidden] → weights float32 [n, top_k] and ids int32 [n, top_k], as ``Router``, with at most
    ``factor`` times the experts' mean of these n × top_k rows for each of them. A choice that is dropped has
    the id ``num_experts`` and the weight 0.

    ``reroutes``: a choice beyond the limit goes to the token's next best expert with room, and is dropped
    where none has any. So a token's result depends on the tokens beside it. A call in which no expert is
    chosen too often has the results of ``router``.
    """

    def __init__(
        self, router: Router | GroupRouter, num_experts: int, factor: float, *, reroutes: bool
    ) -> None:
        self.top_k = router.top_k
        self._router = router
        self._num_experts = num_experts
        self._factor = factor
        self._reroutes = reroutes

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        weights, ids = self._router(x)
        limit = max(MIN_ROWS, math.ceil(self._factor * ids.numel() / self._num_experts))
        if len(ids) <= limit or int(torch.bincount(ids.flatten()).max()) <= limit:
            return weights, ids
        scores, ranked = self._router.ranked(x, self._num_experts if self._reroutes else self.top_k)
        rows, columns = admitted(ranked, self.top_k, limit, self._num_experts).nonzero(as_tuple=True)
        # A token's choices that are left come first.
        first = torch.searchsorted(rows, rows)
        slots = torch.arange(len(rows), device=rows.device) - first
        ids, kept = torch.full_like(ids, self._num_experts), torch.zeros_like(weights)
        ids[rows, slots], kept[rows, slots] = ranked[rows, columns], scores[rows, columns]
        return self._router.normalized(kept), ids


def admitted(ranked: Tensor, top_k: int, limit: int, num_experts: int) -> Tensor:
    """Return which choices each token is given, bool [n, c]: at most ``top_k`` a token and ``limit`` an
    expert.

    ranked: [n, c], each token's experts, best first. Best choices of all tokens are admitted first, then
    second best ones; among them those of earlier tokens.
    """
    found = torch.zeros_like(ranked, dtype=torch.bool)
    num_given = torch.zeros(len(ranked), dtype=torch.int64, device=ranked.device)
    used = torch.zeros(num_experts, dtype=torch.int64, device=ranked.device)
    for column, expert in enumerate(ranked.long().T):
        wanted = num_given < top_k
        if not wanted.any():
            break
        asked = one_hot(expert, num_experts) * wanted[:, None]
        position = used + asked.cumsum(0)  # with this choice
        found[:, column] = wanted & (position.gather(1, expert[:, None])[:, 0] <= limit)
        used = (used + asked.sum(0)).clamp(max=limit)
        num_given += found[:, column]
    return found

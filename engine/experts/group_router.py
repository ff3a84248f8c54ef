"""DeepSeek's router: the best experts of the best groups."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moonpool.engine.checkpoint.config import Routing
from moonpool.kernels.quantised import Linear


@dataclass(slots=True)
class GroupRouter:
    """x: [n, hidden] → weights float32 [n, top_k] and expert ids int32 [n, top_k], as ``Router``."""

    gate: Linear
    top_k: int
    renormalize: bool
    routing: Routing
    correction: Tensor | None  # float32 [num_experts]: added to the scores for the choice

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scores, ids = self.ranked(x, self.top_k)
        return self.normalized(scores), ids

    def ranked(self, x: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """See ``Router``. Fewer experts are returned where the best groups have not as many."""
        routing, logits = self.routing, self.gate(x).float()
        scores = logits.sigmoid() if routing.scoring == "sigmoid" else logits.softmax(-1)
        choice = scores if self.correction is None else scores + self.correction
        if routing.top_groups < routing.num_groups:
            groups = choice.view(len(x), routing.num_groups, choice.shape[1] // routing.num_groups)
            best = groups.topk(2, dim=-1)[0].sum(-1) if self.correction is not None else groups.amax(-1)
            kept = torch.zeros_like(best, dtype=torch.bool)
            kept.scatter_(1, best.topk(routing.top_groups, dim=-1)[1], True)
            count = min(count, routing.top_groups * groups.shape[2])
            choice = groups.masked_fill(~kept[..., None], float("-inf")).flatten(1)
        ids = choice.topk(count, dim=-1)[1]
        return scores.gather(1, ids), ids.int()

    def normalized(self, scores: Tensor) -> Tensor:
        """See ``Router``."""
        if self.renormalize:
            scores = scores / (scores.sum(-1, keepdim=True) + 1e-20)
        return scores * self.routing.factor

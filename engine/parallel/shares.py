"""The tokens of a batch shared out to ranks that hold the same weights and the same KV: context parallel."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.parallel.link import Link
from engine.parallel.portion import Portion, Run
from engine.step_inputs import OtherTokens, StepInputs


class SharedTokens:
    """Which share computes which tokens of a step, on one rank of it.

    Of some pieces each share computes all tokens, so that no share need ask another for them.
    """

    def __init__(self, share: int, num_shares: int) -> None:
        self._share = share
        self._rows: list[list[npt.NDArray[np.int64]]] = [[] for _ in range(num_shares)]
        self._any = False  # is computed by one share alone

    def take(self, inputs: StepInputs, portions: list[Portion]) -> StepInputs:
        """The next of the step's pieces, cut so: what this rank computes of it."""
        part = portions[self._share].of(inputs)
        if (num_shares := len(portions)) == 1:
            return part
        rows = [portion.rows(inputs.num_decodes) for portion in portions]
        for all_rows, more in zip(self._rows, rows, strict=True):
            all_rows.append(more)
        if portions[0] == portions[-1]:
            return part
        self._any = True
        others = []
        for i in range(1, num_shares):
            share = (self._share - i) % num_shares
            where = torch.from_numpy(rows[share]).to(inputs.positions.device)
            others.append(OtherTokens(share, inputs.positions[where], inputs.slots[where]))
        part.others, part.share_sizes = tuple(others), tuple(map(len, portions))
        return part

    def collect(self, hidden: Tensor, rows: Tensor, link: Link) -> Tensor:
        """The rows of the step named by ``rows``: [len(rows), hidden], on the first share at least.

        hidden: [tokens of this share, hidden], of the pieces taken so far. All shares make this call.
        """
        if not self._any:
            return hidden[rows.to(hidden.device)]
        wanted = rows.numpy()
        owner, place = self._places(wanted)
        if not owner.any():
            # The first share has them all, and it alone makes logits.
            return hidden[torch.from_numpy(place).to(hidden.device)] if self._share == 0 else hidden[:0]
        sizes = np.bincount(owner, minlength=len(self._rows)).tolist()
        own = hidden[torch.from_numpy(place[owner == self._share]).to(hidden.device)]
        take = link.swap(own, sizes)
        whole = hidden.new_empty((len(rows), hidden.shape[1]))
        for share in range(len(self._rows)):
            found = own if share == self._share else take(share)
            whole[torch.from_numpy(np.flatnonzero(owner == share)).to(hidden.device)] = found
        return whole

    def _places(self, wanted: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """For each row: the first share that has it, and which of that share's tokens it is."""
        rows = [np.concatenate(pieces) for pieces in self._rows]
        num_tokens = 1 + max(int(some.max(initial=-1)) for some in rows)
        owner, place = np.full(num_tokens, -1), np.full(num_tokens, -1)
        for share in reversed(range(len(rows))):
            owner[rows[share]], place[rows[share]] = share, np.arange(len(rows[share]))
        return owner[wanted], place[wanted]


def share_out(batch: Portion, num_shares: int, min_tokens: int = 1) -> list[Portion]:
    """Each share's tokens of ``batch``: as many, and as much for each to attend to, as nearly as can be. Of
    fewer tokens than ``min_tokens``, or than would do for all, every share gets all.

    A prompt's later tokens attend to more. So a run is cut into 2 × num_shares, of which a share takes one
    from the front and the one as far from the end: all pairs attend to as much. Which share takes which pair
    is chosen so that what cannot be divided evenly does not add up.
    """
    if num_shares == 1 or len(batch) < max(min_tokens, 3 * num_shares):
        return [batch] * num_shares
    n, first = len(batch.decodes), batch.decodes.start
    decodes = [
        range(first + n * i // num_shares, first + n * (i + 1) // num_shares) for i in range(num_shares)
    ]
    runs: list[list[Run]] = [[] for _ in decodes]
    num_tokens = [len(some) for some in decodes]
    for run in batch.runs:
        pairs = sorted(_pairs(run, num_shares), key=lambda pair: -sum(map(len, pair)))
        shares = sorted(range(num_shares), key=num_tokens.__getitem__)
        for share, pair in zip(shares, pairs, strict=True):
            runs[share] += [half for half in pair if len(half)]
            num_tokens[share] += sum(map(len, pair))
    return [Portion(some, tuple(own)) for some, own in zip(decodes, runs, strict=True)]


def _pairs(run: Run, num_shares: int) -> list[tuple[Run, Run]]:
    """The i-th has the i-th of the run's 2 × num_shares parts, and the i-th from the end."""
    num_parts = 2 * num_shares
    borders = [run.first + len(run) * i // num_parts for i in range(num_parts + 1)]
    parts = [Run(run.chunk, borders[i], borders[i + 1]) for i in range(num_parts)]
    return [(parts[i], parts[-1 - i]) for i in range(num_shares)]

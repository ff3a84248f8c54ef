"""One step whose tokens are shared out, as one rank sees it: what is its own, and what the others have."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from moonpool.engine.collectives.link import Link
from moonpool.engine.model.inputs import RemoteTokens, StepInputs
from moonpool.engine.ranks.partition.batch_slice import BatchSlice, chunk_offsets
from moonpool.engine.ranks.partition.context_keys import chunk_keys
from moonpool.engine.ranks.partition.context_parallel import split_tokens


class ContextStep:
    """Which share computes which tokens of a step, piece after piece.

    Of some pieces each share computes all tokens, so that none need ask another for them.
    """

    def __init__(
        self, inputs: StepInputs, share: int, num_shares: int, *, block_size: int, min_tokens: int
    ) -> None:
        """min_tokens: of a piece that is shared out."""
        self._inputs = inputs
        self._share = share
        self._num_shares = num_shares
        self._block_size = block_size
        self._min_tokens = min_tokens
        self._rows: list[list[npt.NDArray[np.int64]]] = [[] for _ in range(num_shares)]
        self._any = False  # is computed by one share alone
        self._offsets = chunk_offsets(inputs) if num_shares > 1 else []

    def take(self, piece: BatchSlice) -> StepInputs:
        """The next of the step's pieces: what this rank computes of it."""
        inputs, num_shares = self._inputs, self._num_shares
        if num_shares == 1:
            return piece.of(inputs)
        portions = [piece] * num_shares
        if len(piece) >= self._min_tokens:
            portions = split_tokens(piece, num_shares, self._offsets, self._block_size)
        rows = [portion.rows(inputs.num_decodes) for portion in portions]
        for all_rows, more in zip(self._rows, rows, strict=True):
            all_rows.append(more)
        part = portions[self._share].of(inputs)
        if portions[0] == portions[-1]:
            return part
        self._any = True
        keys = chunk_keys(piece, portions, self._share, inputs, self._offsets, self._block_size)
        others = []
        for i in range(1, num_shares):
            share = (self._share - i) % num_shares
            where = torch.from_numpy(rows[share]).to(inputs.positions.device)
            others.append(RemoteTokens(share, inputs.positions[where], inputs.slots[where], keys[share]))
        part.own_keys, part.others = keys[self._share], tuple(others)
        part.cp_token_counts = tuple(map(len, portions))
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
        take = link.exchange_cp(own, sizes)
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

"""Exchanges between ranks through shared memory, double buffered."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from moonpool.engine.collectives.board import BoardWord, SharedBoard

_LINE_NBYTES = 64


class ExchangeBuffer:
    """One rank's side of exchanges between ``ranks``, numbered from 1. Every rank takes part in each.

    Each rank has two buffers; exchange k uses buffer k & 1.

    - No rank reads a partly written buffer. A rank posts k after it has written all its data of k; others
      read after they have seen k. Stores are seen in order, see ``SharedBoard``.
    - No rank writes a buffer that is still read. In every exchange each rank must ``read`` from every other
      rank, also when it wants nothing, and that waits for it. So a rank that writes k has seen all others
      post k - 1, which they do after reading all of k - 2, the last exchange in this buffer.

    Every ExchangeBuffer therefore needs its own board word and its own buffers.
    """

    def __init__(
        self,
        board: SharedBoard,
        word: BoardWord,
        ranks: Sequence[int],
        buffers: Mapping[int, Sequence[Tensor]],
    ) -> None:
        """buffers: uint8, two for each of ``ranks``, of a whole number of ``lines``, equal on all ranks."""
        self.ranks = list(ranks)
        self._board = board
        self._word = word
        self._buffers = buffers
        self._num_written = 0

    def write(self, part: Tensor, head: Tensor | None = None) -> int:
        """Begin an exchange with this rank's data, after ``lines(head)`` bytes for ``head``. Return its
        number."""
        self._num_written = k = self._num_written + 1
        buffer, first = self._buffers[self._board.rank][k & 1], 0
        if head is not None:
            buffer.view(head.dtype)[: len(head)].copy_(head)
            first = lines(head.nbytes) // part.itemsize
        buffer.view(part.dtype)[first : first + part.numel()].view(part.shape).copy_(part)
        self._board.advance(self._word, k)
        return k

    def read(self, rank: int, k: int, dtype: torch.dtype, first: int, count: int) -> Tensor:
        """Return elements of the data of ``rank`` in exchange ``k``, a view that is valid until our next
        ``write``.

        Waits for that rank. Raises RankLost.
        """
        if rank != self._board.rank:
            self._board.wait(rank, self._word, k)
        return self._buffers[rank][k & 1].view(dtype)[first : first + count]

    def close(self) -> None:
        """Drop the buffers."""
        self._buffers = {}


def lines(nbytes: int) -> int:
    """Round up to whole cache lines, which align any dtype."""
    return -(-nbytes // _LINE_NBYTES) * _LINE_NBYTES

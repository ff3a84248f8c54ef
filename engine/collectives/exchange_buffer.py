"""Ranks that all give each other something, through memory they share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from moonpool.engine.collectives.board import BoardWord, SharedBoard

_LINE_NBYTES = 64


class ExchangeBuffer:
    """One rank's side of exchanges, numbered from 1, in which every rank of the circle takes part.

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
        halves: Mapping[int, Sequence[Tensor]],
    ) -> None:
        """halves: uint8, two for each of ``ranks``, of a whole number of ``lines``, the same on all."""
        self.ranks = list(ranks)
        self._board = board
        self._word = word
        self._halves = halves
        self._num_given = 0

    def give(self, part: Tensor, head: Tensor | None = None) -> int:
        """Begin an exchange: all of ours, in any shape, ``lines(head)`` behind ``head``. Its number."""
        self._num_given = k = self._num_given + 1
        half, first = self._halves[self._board.rank][k & 1], 0
        if head is not None:
            half.view(head.dtype)[: len(head)].copy_(head)
            first = lines(head.nbytes) // part.itemsize
        half.view(part.dtype)[first : first + part.numel()].view(part.shape).copy_(part)
        self._board.post(self._word, k)
        return k

    def given(self, rank: int, k: int, dtype: torch.dtype, first: int, count: int) -> Tensor:
        """Elements of what ``rank`` gives in exchange ``k``, a view that is valid until we give in k + 1.

        Raises RankLost when the group is aborted before it came to that.
        """
        if rank != self._board.rank:
            self._board.wait(rank, self._word, k)
        return self._halves[rank][k & 1].view(dtype)[first : first + count]

    def close(self) -> None:
        """Let go of the halves."""
        self._halves = {}


def lines(nbytes: int) -> int:
    """As whole cache lines, so that what comes behind is aligned for any dtype."""
    return -(-nbytes // _LINE_NBYTES) * _LINE_NBYTES

"""Ranks that all give each other something, through memory they share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from moonpool.engine.collectives.board import Board, Count

_LINE_NBYTES = 64


class Circle:
    """One rank's side of exchanges, numbered from 1, in which every rank of the circle takes part.

    Each rank has two halves; exchange k uses half k & 1. Nobody reads what is half written: a rank posts k
    only after it has written all it gives in k, and others read it only when they have seen k (stores are
    seen in their order, see ``Board``). Nobody writes what is still read: in every exchange each rank must
    ask for something of every other (of nothing, where it has nothing for it), which waits for it; so who
    gives in k has seen everybody post k - 1, which they did after they had read all of k - 2, the last that
    used this half. That holds for one circle, so each has its own word of the board and its own halves.
    """

    def __init__(
        self, board: Board, word: Count, ranks: Sequence[int], halves: Mapping[int, Sequence[Tensor]]
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

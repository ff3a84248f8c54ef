"""What ranks exchange tensors through, whatever carries it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor


class Link(Protocol):
    """One rank's side. Every rank makes the same calls in the same order; one thread only.

    Any of them raises RankLost when another rank did not do its part in time, or the group was aborted; the
    link is of no use afterwards.
    """

    def all_reduce(self, part: Tensor) -> Tensor:
        """The sum over the ranks of this stage and share, bit for bit the same on all. May be written over
        ``part``."""
        ...

    def all_gather(self, part: Tensor, counts: Sequence[int]) -> Tensor:
        """What each rank of this stage and share has, one after the other: [sum(counts), …].

        part: [counts[place], …] of any dtype, the same on all; ``counts`` is the same on all, and may be 0.
        """
        ...

    def reduce_scatter(self, whole: Tensor, counts: Sequence[int]) -> Tensor:
        """This rank's run of rows of the sum over these ranks: [counts[place], …].

        whole: [sum(counts), …]; ``counts`` is the same on all, and may be 0.
        """
        ...

    def all_to_all(self, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """Rows to and from each rank of this stage and share, itself too, in their order: [sum(received), …].

        rows: [sum(sent), …], those for place 0 first; ``sent[i]`` is what place i has as ``received`` of us.
        """
        ...

    def exchange_cp(self, part: Tensor, counts: Sequence[int]) -> Callable[[int], Tensor]:
        """Begin to exchange rows with the other shares of this stage and place.

        part: [counts[share], width], which may be changed when this returns; ``counts`` is the same on all.
        Returns a function that waits for one cp rank and returns its part, [counts[cp_rank], width], valid
        until the next ``exchange_cp``. Before that every rank must take the part of each other rank, also an
        empty one.
        """
        ...

    def send(self, hidden: Tensor) -> None:
        """To the same share and place in the next stage. Returns when ``hidden`` may be changed."""
        ...

    def receive(self, num_tokens: int) -> Tensor:
        """What the same share and place in the stage before sent: [num_tokens, hidden]."""
        ...

    def gather(self, logits: Tensor | None, num_rows: int) -> Tensor | None:
        """Rank 0 gets the logits, [num_rows, vocab_size], side by side; the last stage's ranks of the first
        share give theirs, [num_rows, words of the shard]; others do not call."""
        ...

    def close(self) -> None: ...

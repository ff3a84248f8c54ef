"""What ranks exchange tensors through, whatever carries it."""

from __future__ import annotations

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

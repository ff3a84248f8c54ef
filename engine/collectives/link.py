"""The protocol of exchanges between ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor


class Link(Protocol):
    """One rank's side. Every rank makes the same calls in the same order, on one thread.

    Any call raises RankLost when another rank fails or the group is aborted; the link is unusable then.
    "The tp ranks" are those of the same stage and cp rank.
    """

    def all_reduce(self, part: Tensor) -> Tensor:
        """Return the sum over the tp ranks, bit for bit equal on all. May overwrite ``part``."""
        ...

    def all_gather(self, part: Tensor, counts: Sequence[int]) -> Tensor:
        """Return the parts of the tp ranks in order: [sum(counts), …].

        part: [counts[tp_rank], …] of any dtype. ``counts`` is equal on all ranks; entries may be 0.
        """
        ...

    def reduce_scatter(self, whole: Tensor, counts: Sequence[int]) -> Tensor:
        """Return this rank's rows of the sum over the tp ranks: [counts[tp_rank], …].

        whole: [sum(counts), …]. ``counts`` is equal on all ranks; entries may be 0.
        """
        ...

    def all_to_all(self, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """Exchange rows with each tp rank, itself included: [sum(received), …], in rank order.

        rows: [sum(sent), …], those for tp rank 0 first. ``sent[i]`` equals rank i's ``received`` for us.
        """
        ...

    def gather_cp(self, part: Tensor, counts: Sequence[int]) -> list[Tensor]:
        """Return the rows of each cp rank of this stage and tp rank, [counts[cp_rank], width] each.

        part: [counts[cp_rank], width], which may change after the return. ``counts`` is equal on all ranks;
        entries may be 0. The results are valid until the next exchange between cp ranks.
        """
        ...

    def scatter_cp(self, whole: Tensor, counts: Sequence[int]) -> list[Tensor]:
        """Return this rank's rows of what each cp rank of this stage and tp rank gives:
        [counts[cp_rank], width] each.

        whole: [sum(counts), width]. Everything else as for ``gather_cp``.
        """
        ...

    def send(self, hidden: Tensor) -> None:
        """Send to the same cp and tp rank of the next stage. ``hidden`` may change after the return."""
        ...

    def receive(self, num_tokens: int) -> Tensor:
        """Receive from the same cp and tp rank of the stage before: [num_tokens, hidden]."""
        ...

    def gather(self, logits: Tensor | None, num_rows: int) -> Tensor | None:
        """Return the logits side by side on rank 0: [num_rows, vocab_size].

        The last stage's ranks with cp rank 0 give [num_rows, words of the shard]. Other ranks do not call it.
        """
        ...

    def serve(self) -> None:
        """Limit each exchange to the time that a step may take; before, ranks load and compile. From any
        thread."""
        ...

    def close(self) -> None: ...

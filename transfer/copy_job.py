"""A batch that is moved by copying memory: what one copying thread does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from transfer.attempt import Attempt
from transfer.errors import TransferError
from transfer.plan import Index
from transfer.span import U64


class Copy(Protocol):
    """``memory_copy.copy_from`` for some process, or ``copy_mapped``."""

    def __call__(self, to: U64, source: U64, nbytes: U64, wanted: Callable[[], bool]) -> bool: ...


def run_copy(
    attempt: Attempt,
    to: U64,
    source: U64,
    copy: Copy,
    *,
    verify: Callable[[Index], None],
    conclude: Callable[[OSError | None], None],
) -> None:
    """Copy all chunks of ``attempt``: ``to`` and ``source`` are the addresses of its rows.

    verify: called with spans that are complete. conclude: called once after the last copy, or with what the
    kernel said; it raises the TransferError the attempt ends with, if any.
    """
    if not attempt.enter(_between_slices):
        return
    plan, done = attempt.plan, 0
    error: Exception | None = None
    try:
        try:
            for chunk, (begin, end) in enumerate(plan.chunks):
                if not copy(
                    to[begin:end], source[begin:end], plan.rows.nbytes[begin:end], lambda: not attempt.stopped
                ):
                    break
                spans = attempt.arrived(chunk)
                verify(spans)
                attempt.announce(spans)
                done += 1
        except OSError as failure:
            conclude(failure)
        else:
            conclude(None)
    except TransferError as failure:
        error, done = failure, 0
    attempt.leave(_between_slices, chunks=done, error=error)


def _between_slices() -> None:
    """Nothing to kick: the copy looks at ``attempt.stopped`` between slices."""

"""A limit on the bytes that a node reads from its peers each second."""

from __future__ import annotations

import asyncio
import math

from moonpool.transfer import DeadlineExceeded


class ReadLimit:
    """Delays reads so that all of a node together stay within ``nbytes_per_s``; 0: no limit."""

    def __init__(self, nbytes_per_s: int) -> None:
        self.nbytes_per_s: float = nbytes_per_s or math.inf
        self._free_s = 0.0  # by the loop's clock: when the link has moved all bytes so far

    async def turn(self, source: str, nbytes: int, deadline_s: float) -> float:
        """Wait until ``nbytes`` would have come. Returns the seconds.

        Raises DeadlineExceeded at once if that is after ``deadline_s``; the bytes do not count then. After a
        cancellation they do.
        """
        if self.nbytes_per_s == math.inf:
            return 0.0
        now_s = asyncio.get_running_loop().time()
        ends_s = max(self._free_s, now_s) + nbytes / self.nbytes_per_s
        if ends_s - now_s > deadline_s:
            raise DeadlineExceeded(
                source, deadline_s, f"a read of {nbytes} bytes within transfer.read_nbytes_per_s"
            )
        self._free_s = ends_s
        await asyncio.sleep(ends_s - now_s)
        return ends_s - now_s

"""Where the output of one sequence stands in its structure, and which tokens may come next."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from llguidance import LLMatcher

_MAX_ERROR_CHARS = 300


def brief(message: str) -> str:
    """A message of llguidance without its state, which follows in more lines."""
    first, *others = message.strip().split("\n")
    if first.endswith(":"):  # of an expression: what is wrong comes after its text
        first += "".join(line.removeprefix("error:") for line in others if line.startswith("error: "))
    return first[:_MAX_ERROR_CHARS]


class Automaton:
    """A function of the structure and the output tokens alone, so any node rebuilds it from the lineage.

    mask: int32 [ceil(vocab_size / 32)]; bit ``i % 32`` of word ``i // 32`` is set where token ``i`` may come
    next. error: why the sequence cannot go on; empty: it can. One call at a time, from any thread.
    """

    def __init__(self, matcher: LLMatcher, vocab_size: int, end_ids: Sequence[int]) -> None:
        """``matcher``: at the beginning, used by this automaton alone. It raises nothing: after an error it
        stays in it. ``end_ids``: tokens that end a sequence, the matcher's own first."""
        self.mask = np.zeros(-(-vocab_size // 32), np.int32)
        self.error = ""
        self._matcher = matcher
        self._num_seen = 0
        ends = np.zeros(len(self.mask), np.uint32)
        for token_id in end_ids:
            ends[token_id // 32] |= np.uint32(1) << np.uint32(token_id % 32)
        self._ends = ends.view(np.int32)

    def advance(self, output_ids: npt.NDArray[np.int32]) -> None:
        """Go on to the end of ``output_ids``, all output tokens so far."""
        new = output_ids[self._num_seen :].tolist()
        self._num_seen = len(output_ids)
        if new and not self.error and not self._matcher.consume_tokens(new):
            self._fail(f"the tokens so far do not match it: {self._matcher.get_error()}")

    def fill(self, output_ids: npt.NDArray[np.int32], *, may_end: bool = True) -> None:
        """``advance``, and set ``mask``. After an error all tokens are allowed, and the next is of no use."""
        self.advance(output_ids)
        if not self.error:
            self._matcher.unsafe_compute_mask_ptr(self.mask.ctypes.data, self.mask.nbytes)
            if self._matcher.is_error():
                self._fail(self._matcher.get_error())
        if not self.error:
            self._mark_ends(may_end)
            if not self.mask.any():
                self._fail("no token can come next")
        if self.error:
            self.mask[:] = -1

    def _mark_ends(self, may_end: bool) -> None:
        """A model may have several tokens that end a sequence, and the matcher knows one of them."""
        if not may_end:
            self.mask &= ~self._ends
        elif (self.mask & self._ends).any():
            self.mask |= self._ends

    def _fail(self, why: str) -> None:
        self.error = f"its structure cannot be followed after {self._num_seen} tokens: {brief(why)}"

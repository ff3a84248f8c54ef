"""Cost formulas of prefills and decode steps, for one node or for many at once."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt

T = TypeVar("T", float, npt.NDArray[np.float64])

# The part of the time between two tokens that a step may take: the rest is for bookkeeping and messages.
_STEP_PART = 0.9


@dataclass(frozen=True, slots=True)
class CostProfile(Generic[T]):
    """Coefficients in seconds, named as in ``protos.Profile``; each is a float, or float64 [nodes]."""

    prefill_base_s: T  # a prefill of any length
    prefill_token_s: T  # a computed token
    prefill_attention_s: T  # a pair of a computed token and a token before it
    decode_base_s: T  # a decode step of any batch
    decode_sequence_s: T  # a sequence of the batch
    decode_context_s: T  # a token of KV that the batch attends over

    def prefill_s(self, uncached_tokens: T | float, cached_tokens: T | float) -> T:
        """Compute ``uncached_tokens`` after ``cached_tokens``."""
        return self.prefill_base_s + self.tokens_s(uncached_tokens, cached_tokens)

    def tokens_s(self, uncached_tokens: T | float, cached_tokens: T | float) -> T:
        """A prefill without its base, as a part of a longer one."""
        context = cached_tokens + 0.5 * uncached_tokens  # of the average uncached token
        return uncached_tokens * (self.prefill_token_s + self.prefill_attention_s * context)

    def step_s(self, num_sequences: T | float, context_tokens: T | float) -> T:
        """One decode step of ``num_sequences`` with ``context_tokens`` of KV together."""
        batch_s = self.decode_sequence_s * num_sequences + self.decode_context_s * context_tokens
        return self.decode_base_s + batch_s

    def timely_tokens(self: CostProfile[float], step_s: float, cached_tokens: int, tbt_s: float) -> int:
        """Prompt tokens after ``cached_tokens`` that fit beside decodes of ``step_s`` into a step, so that
        the next tokens come after ``tbt_s``; 0: not even the base of a prefill fits."""
        left_s = _STEP_PART * tbt_s - step_s - self.prefill_base_s
        if left_s <= 0:
            return 0
        # left_s = token_s * n + pair_s * n * n
        pair_s = self.prefill_attention_s / 2
        token_s = self.prefill_token_s + self.prefill_attention_s * cached_tokens
        below_s = token_s + math.sqrt(token_s * token_s + 4 * pair_s * left_s)
        return int(2 * left_s / max(below_s, 1e-9))

    def step_growth_s(self, context_tokens: T | float) -> T:
        """What one more sequence with ``context_tokens`` of KV adds to a step."""
        return self.decode_sequence_s + self.decode_context_s * context_tokens

    def scaled(self, prefill: float, decode: float) -> CostProfile[T]:
        """The profile of a node with prefills and decode steps that take so many times as long."""
        return CostProfile(
            self.prefill_base_s * prefill,
            self.prefill_token_s * prefill,
            self.prefill_attention_s * prefill,
            self.decode_base_s * decode,
            self.decode_sequence_s * decode,
            self.decode_context_s * decode,
        )

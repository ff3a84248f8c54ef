"""Cost formulas of prefills and decode steps, for one node or for many at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt

T = TypeVar("T", float, npt.NDArray[np.float64])


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

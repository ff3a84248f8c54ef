"""Latency targets."""

from __future__ import annotations

import math
from dataclasses import dataclass

from moonpool.runtime.config.options import ConductorOptions


@dataclass(frozen=True, slots=True)
class Slo:
    """Latency targets of a request; infinite: none. They guide placement and never reject by themselves."""

    ttft_s: float = math.inf
    tbt_s: float = math.inf

    @classmethod
    def of(cls, options: ConductorOptions) -> Slo:
        return cls.of_limits(options.slo_ttft_s, options.slo_tbt_s)

    @classmethod
    def of_limits(cls, ttft_s: float, tbt_s: float) -> Slo:
        """0: none."""
        return cls(ttft_s or math.inf, tbt_s or math.inf)

    def with_limits(self, ttft_s: float, tbt_s: float) -> Slo:
        """These limits instead of its own; 0: its own."""
        return Slo(ttft_s or self.ttft_s, tbt_s or self.tbt_s)

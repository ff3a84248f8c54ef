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
        return cls(options.slo_ttft_s or math.inf, options.slo_tbt_s or math.inf)

"""Figures of the Mooncake papers, reproduced by simulation.

FAST'25: Qin et al., "Mooncake: Trading More Storage for Less Computation"; some values are read off plots.
arXiv: "Mooncake: A KVCache-centric Disaggregated Architecture for LLM Serving", 2407.00079.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from moonpool.bench.paper import hit_ratio, overload, pooling, scheduling
from moonpool.runtime.reports.report import Row
from moonpool.simulator.inputs.trace import TraceRequest

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Figure:
    """``measure(requests, say)`` returns rows with the paper's values as peers; ``terms``: the conditions."""

    measure: Callable[[Sequence[TraceRequest], Say], list[Row]]
    terms: str


FIGURES: Mapping[str, Figure] = {
    "fig5": Figure(scheduling.measure, scheduling.TERMS),
    "fig9": Figure(hit_ratio.measure, hit_ratio.TERMS),
    "fig10": Figure(pooling.measure, pooling.TERMS),
    "rejection": Figure(overload.measure, overload.TERMS),
}

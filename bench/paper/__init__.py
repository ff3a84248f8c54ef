"""Figures of papers, reproduced by simulation.

FAST'25: Qin et al., "Mooncake: Trading More Storage for Less Computation"; some values are read off plots.
arXiv: "Mooncake: A KVCache-centric Disaggregated Architecture for LLM Serving", 2407.00079. Those of other
systems have the name of the system.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from moonpool.bench.paper import (
    adapters,
    allocation,
    chunking,
    disaggregation,
    equal_cost,
    hit_ratio,
    migration,
    overload,
    scheduling,
)
from moonpool.runtime.reports.report import Row
from moonpool.simulator.inputs.trace import TraceRequest

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Figure:
    """``measure(requests, say)`` returns rows with the paper's values as peers; ``terms``: the conditions.

    ``workload``: generates the requests; None: they are those of a trace. ``model``: what is simulated.
    """

    measure: Callable[[Sequence[TraceRequest], Say], list[Row]]
    terms: str
    workload: Callable[[], list[TraceRequest]] | None = None
    model: str = "8xa800-llama3-70b"


FIGURES: Mapping[str, Figure] = {
    "fig5": Figure(scheduling.measure, scheduling.TERMS),
    "fig9": Figure(hit_ratio.measure_hits, hit_ratio.HITS_TERMS),
    "fig10": Figure(hit_ratio.measure_pooling, hit_ratio.POOLING_TERMS),
    "rejection": Figure(overload.measure, overload.TERMS),
    "distserve": Figure(disaggregation.measure, disaggregation.TERMS, disaggregation.workload, "OPT-13B"),
    "llumnix": Figure(migration.measure, migration.TERMS, migration.workload, "LLaMA3-70B"),
    "sarathi": Figure(chunking.measure, chunking.TERMS, chunking.workload, "Mistral-7B"),
    "slora": Figure(adapters.measure, adapters.TERMS, adapters.workload, "LLaMA-7B"),
    "splitwise": Figure(equal_cost.measure, equal_cost.TERMS, model="LLaMA3-70B"),
    "vllm": Figure(allocation.measure, allocation.TERMS, allocation.workload, "OPT-13B"),
}

"""A record as benchmarks write it, for tests of what reads it."""

from __future__ import annotations

from moonpool.runtime.reports.conditions import CacheState, Conditions, ModelFacts
from moonpool.runtime.reports.report import Environment

CONDITIONS = Conditions(
    [ModelFacts("small", "9f0c", "float32", "int8")],
    CacheState.holding(3, 16, "a note"),
    "a round",
    {"prompts": 3},
    rounds=5,
    load=[0.5, 1.0],
)
ENVIRONMENT = Environment(
    "a machine",
    {"python": "3.11"},
    "abc1234",
    "2026-11-21T03:00:00+00:00",
    "moonpool bench some",
    {"seed": "3"},
    CONDITIONS,
)

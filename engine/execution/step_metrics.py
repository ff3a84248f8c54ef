"""How long the model computes, as Prometheus sees it."""

from __future__ import annotations

from prometheus_client import Histogram

_MODEL_SECONDS = Histogram(
    "moonpool_model_seconds",
    "Seconds a step's tensors took, by kind: decode, or prefill where a step held any part of a prompt",
    ["kind"],
    buckets=(0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0),
)
# Bound once: looking a label up costs more than the observation.
PREFILL_SECONDS = _MODEL_SECONDS.labels("prefill")
DECODE_SECONDS = _MODEL_SECONDS.labels("decode")

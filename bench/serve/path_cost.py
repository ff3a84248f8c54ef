"""Where one request's time goes, stage by stage: from the client's clock and the server's timeline."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import mean
from typing import Any

from moonpool.bench.serve.client.answer import Answer
from moonpool.bench.serve.figures import gaps
from moonpool.bench.serve.model_clock import ModelTime

MODEL_PREFILL = "model: prefill"
MODEL_DECODE = "model: decode steps"


@dataclass(frozen=True, slots=True)
class PathCost:
    """``stages`` in seconds, in the order of the path; together they are ``e2e_s``."""

    e2e_s: float
    stages: Mapping[str, float]

    @property
    def own_s(self) -> float:
        """Everything but the model: what serving through the cluster adds to one request."""
        return sum(value for name, value in self.stages.items() if not name.startswith("model:"))


def path_cost(answer: Answer, timeline: Mapping[str, Any], model: ModelTime) -> PathCost:
    """``timeline``: what ``/v1/requests/{id}/timeline`` says; ``model``: what the nodes computed for it.

    The decode loop takes the mean time between tokens after the second, so what the hand-over to the decode
    node adds before the second token is a stage of its own. Each stage is a difference on one process's
    clock; HTTP is what the client saw beyond what the server did. The request must have been placed once.
    """
    events = {event["event"]: event for event in timeline["events"]}
    placed, prefilled = events["placed"], events["prefilled"]
    api: Mapping[str, Any] = timeline.get("api") or {}
    waits = gaps(answer)
    step_s = mean(waits[1:]) if len(waits) > 1 else 0.0
    fetch_s = events.get("prefix_loaded", {}).get("fetch_s", 0.0)
    call_s = prefilled["at_s"] - placed["at_s"]
    parse_s, tokenize_s = api.get("parse_s", 0.0), api.get("tokenize_s", 0.0)
    transfer_s = events.get("transferred", {}).get("transfer_s", 0.0)
    stages = {
        "parse request": parse_s,
        "tokenize": tokenize_s,
        "hash and place": placed["at_s"],
        "RPC to prefill node": call_s - prefilled["queued_s"] - prefilled["compute_s"] - fetch_s,
        "queue at prefill node": prefilled["queued_s"],
        "fetch prefix from a peer": fetch_s,
        MODEL_PREFILL: model.prefill_s,
        "prefill steps beside the model": prefilled["compute_s"] - model.prefill_s,
        "HTTP and SSE to the first token": answer.ttft_s - parse_s - tokenize_s - prefilled["at_s"],
        "transfer to decode node": transfer_s,
        "join decode batch": (waits[0] - step_s - transfer_s) if waits else 0.0,
        MODEL_DECODE: model.decode_s,
        "decode steps beside the model": step_s * len(waits) - model.decode_s,
        "last token to end of stream": answer.done_s - answer.token_s[-1],
    }
    return PathCost(answer.e2e_s, stages)

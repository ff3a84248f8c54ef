"""The stages of one request's time: from the client's clock, the server's timeline and the nodes' metrics."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import mean
from typing import Any

from moonpool.bench.harness.turns import gaps
from moonpool.bench.serve.client.answer import Answer
from moonpool.bench.serve.client.cluster import MetricsPages

MODEL_PREFILL = "model: prefill"
MODEL_DECODE = "model: decode steps"
TRANSFER = "transfer to decode node"
JOIN = "join decode batch"
_SUM = re.compile(r'^moonpool_model_seconds_sum\{kind="(\w+)"[^}]*\} (\S+)', re.MULTILINE)


@dataclass(frozen=True, slots=True)
class ModelTime:
    """Seconds inside the model, over all nodes, since they started."""

    prefill_s: float
    decode_s: float

    def since(self, earlier: ModelTime) -> ModelTime:
        return ModelTime(self.prefill_s - earlier.prefill_s, self.decode_s - earlier.decode_s)


async def model_time(pages: MetricsPages) -> ModelTime:
    """By ``moonpool_model_seconds``. Raises as ``MetricsPages.read``."""
    seconds = {"prefill": 0.0, "decode": 0.0}
    for page in await pages.read():
        for kind, value in _SUM.findall(page):
            seconds[kind] += float(value)
    return ModelTime(seconds["prefill"], seconds["decode"])


@dataclass(frozen=True, slots=True)
class PathCost:
    """``stages``: seconds, in the order of the path; their sum is ``e2e_s``."""

    e2e_s: float
    stages: Mapping[str, float]

    @property
    def own_s(self) -> float:
        """Everything but the model: the cost of serving through the cluster."""
        return sum(value for name, value in self.stages.items() if not name.startswith("model:"))

    @property
    def handover_s(self) -> float:
        """How much later the second token came than a decode step after the first."""
        return self.stages[TRANSFER] + self.stages[JOIN]


def to_launch_s(timeline: Mapping[str, Any]) -> float:
    """From the handler's start, when the request's head was read, to the launch of the prefill's first step.

    timeline: as of ``path_cost``. At most so much: the launch is told by how long ago it was in the node's
    reply, so the way of the reply counts.
    """
    events = {event["event"]: event for event in timeline["events"]}
    begun_s = timeline["api"]["ttft_s"] - events["first_token"]["at_s"]
    return float(begun_s + events["prefilled"]["chunks"][0]["at_s"])


def path_cost(answer: Answer, timeline: Mapping[str, Any], model: ModelTime) -> PathCost:
    """The stages of a request that was placed once.

    timeline: the answer of ``/v1/requests/{id}/timeline``. model: the nodes' time for the request.
    The decode loop gets the mean time between tokens after the second; the rest before the second token is
    the stage of joining. Each stage is a difference on one process's clock.
    """
    events = {event["event"]: event for event in timeline["events"]}
    placed, prefilled = events["placed"], events["prefilled"]
    api: Mapping[str, Any] = timeline.get("api") or {}
    waits = gaps(answer.token_s)
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
        TRANSFER: transfer_s,
        JOIN: (waits[0] - step_s - transfer_s) if waits else 0.0,
        MODEL_DECODE: model.decode_s,
        "decode steps beside the model": step_s * len(waits) - model.decode_s,
        "last token to end of stream": answer.done_s - answer.token_s[-1],
    }
    return PathCost(answer.e2e_s, stages)

"""The same workloads on real local clusters of paced nodes and in the simulator, compared."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from moonpool.bench.harness.services import local_cluster
from moonpool.bench.harness.turns import quantile
from moonpool.bench.serve.client.answer import Answer
from moonpool.bench.serve.client.http_client import HttpClient
from moonpool.bench.serve.client.server import Server
from moonpool.bench.simulation.cluster_replay import Replayed, paced_hardware, replay
from moonpool.conductor.observing.slo import Slo
from moonpool.runtime.config.engine_options import CPU_LIMITS
from moonpool.runtime.config.loading import load_config
from moonpool.runtime.errors import ConfigError
from moonpool.runtime.reports.report import Row, versus
from moonpool.simulator.inputs.scenario import Scenario
from moonpool.simulator.inputs.trace import TraceRequest
from moonpool.simulator.inputs.workload import Workload
from moonpool.simulator.outcome import Outcome, longest_tenth_s
from moonpool.simulator.simulation import Simulation

REAL = "real cluster"
# Limits of relative errors.
MEAN_TOLERANCE, TAIL_TOLERANCE = 0.10, 0.20
_NODE_MODULE = "moonpool.bench.simulation.paced_node"
_POOL_NBYTES = 192 << 20
# What the conductor aims at, and what is counted: what a node has prefilled itself waits for one more step.
SLO, COUNTED = Slo(ttft_s=2.0, tbt_s=0.2), Slo(ttft_s=2.0, tbt_s=0.25)
_SETS = (
    "engine.threads=1",
    f"engine.pool_nbytes={_POOL_NBYTES}",
    "conductor.rejection=none",
    "conductor.replicate_nbytes_per_s=0",
    f"conductor.slo_ttft_s={SLO.ttft_s:g}",
    f"conductor.slo_tbt_s={SLO.tbt_s:g}",
)
SECONDS = 40.0
# Sessions a second for each pair of a prefill and a decode node; a pair of nodes of both roles serves less.
_LOADS = {"near saturation": 2.4, "beyond saturation": 3.2}
_BOTH_PART = 0.8


class Shape(NamedTuple):
    """Nodes of a cluster."""

    num_prefill: int
    num_decode: int
    num_both: int

    def __str__(self) -> str:
        return f"{self.num_both} both" if self.num_both else f"{self.num_prefill} + {self.num_decode}"


def shapes(most: int) -> list[Shape]:
    """Return the clusters to compare, of at most so many nodes of a role."""
    split = [Shape(count, count, 0) for count in sorted({min(2, most), most})]
    return [*split, Shape(0, 0, most)]


@dataclass(frozen=True, slots=True)
class Settings:
    """``workload`` None: one for each load and cluster. ``sets``: options of the clusters. ``seconds``: of
    arrivals. ``longest``: tokens of the longest prompt."""

    nodes: int
    seed: int
    workload: Workload | None = None
    sets: Sequence[str] = ()
    seconds: float = SECONDS
    longest: int = 1800

    def workloads(self, shape: Shape, block_tokens: int) -> dict[str, Workload]:
        """Return the loads of a cluster by name."""
        if self.workload is not None:
            return {"the given workload": replace(self.workload, block_tokens=block_tokens)}
        pairs = shape.num_prefill or shape.num_both / 2 * _BOTH_PART
        return {
            name: Workload(
                sessions=max(round(rate * pairs * self.seconds), 1),
                rate=rate * pairs,
                system_tokens=256,
                prompt_tokens=512,
                turn_tokens=128,
                output_tokens=48,
                spread=0.6,
                turns=2.0,
                think_s=4.0,
                token_s=0.06,
                block_tokens=block_tokens,
                seed=self.seed + number * 1_000_000,
            )
            for number, (name, rate) in enumerate(_LOADS.items())
        }

    def requests(self, workload: Workload) -> list[TraceRequest]:
        """Return the requests to send: no prompt that is too long, and of a load of ours no late turns.

        Raises ``ConfigError``: there is none.
        """
        until_s = self.seconds if self.workload is None else math.inf
        found = [
            request
            for request in workload.requests()
            if request.input_tokens <= self.longest and request.arrival_s <= until_s
        ]
        if not found:
            raise ConfigError(
                f"every prompt of the workload is longer than the {self.longest} tokens that its nodes take: "
                "give fewer system_tokens and prompt_tokens",
                key="workload",
            )
        return found


async def validate(settings: Settings, say: Callable[[str], None]) -> list[Row]:
    """Run every load on every cluster, and simulate what was sent. Nothing is fitted.

    Raises:
        MoonpoolError: a cluster did not start, or failed a request. It has been stopped.
    """
    rows: list[Row] = []
    for shape in shapes(settings.nodes):
        rows += await _compare(settings, shape, say)
    return rows


async def _compare(settings: Settings, shape: Shape, say: Callable[[str], None]) -> list[Row]:
    counts = zip(("prefill", "decode", "both"), shape, strict=True)
    sets = (*_SETS, *settings.sets, *(f"cluster.{role}={count}" for role, count in counts))
    config = load_config(None, sets)
    options, block_tokens = config.engine.within(CPU_LIMITS), config.engine.block_size
    rows: list[Row] = []
    say(f"starting a cluster of {shape}")
    async with local_cluster(sets, node_module=_NODE_MODULE) as url, HttpClient(url) as http:
        server = await Server.find("the cluster", http)
        hardware = await paced_hardware(
            server,
            pool_nbytes=options.host_pool_nbytes,
            block_tokens=block_tokens,
            chunk_tokens=options.max_batch_tokens,
            max_batch_size=options.max_batch_size,
        )
        policy = config.conductor.policy
        scenario = Scenario(
            hardware, *shape, policy=policy, slo=SLO, block_tokens=block_tokens, knows_lengths=True
        )
        for name, workload in settings.workloads(shape, block_tokens).items():
            requests = settings.requests(workload)
            say(f"{shape}, {name}: {len(requests)} requests in {requests[-1].arrival_s:.0f} s")
            real = await replay(server, requests, block_tokens=block_tokens, seed=workload.seed)
            rate = len(requests) / (requests[-1].arrival_s or 1.0)
            case = f"{shape}, {name}: {len(requests)} requests, {rate:.1f} a second"
            rows += compared(case, real, Simulation(scenario, real.requests).run())
    return rows


def compared(case: str, real: Replayed, simulated: Outcome) -> list[Row]:
    """Return the simulator's figures beside the real ones; the limits apply to their ratio."""
    answers, served = real.answers, simulated.served
    times = {
        "TTFT": ([a.ttft_s for a in answers], [s.ttft_s for s in served]),
        "TPOT": (
            [a.tpot_s for a in answers if a.output_tokens > 1],
            [s.tpot_s for s in served if s.output_tokens > 1],
        ),
    }
    rows: list[Row] = []
    for metric, (actual, ours) in times.items():
        if not actual:
            continue  # every answer is a single token
        mean_ms = 1e3 * float(np.mean(actual)), 1e3 * float(np.mean(ours))
        p99_ms = 1e3 * quantile(actual, 0.99), 1e3 * quantile(ours, 0.99)
        rows += _beside(case, f"{metric}, mean", "ms", *mean_ms, MEAN_TOLERANCE)
        rows += _beside(case, f"{metric}, p99", "ms", *p99_ms, TAIL_TOLERANCE)
    prompts = sum(each.input_tokens for each in served)
    cached = 100 * sum(answer.cached_tokens for answer in answers) / prompts
    hits = 100 * sum(simulated.hit_tokens[tier] for tier in ("pool", "host", "ssd", "peer")) / prompts
    within = 100 * sum(_within(answer) for answer in answers) / len(answers)
    rows += _beside(case, "cache hit", "% of prompt tokens", cached, hits, MEAN_TOLERANCE)
    effective = 100 * sum(each.within(COUNTED) for each in served) / len(served)
    return rows + _beside(case, "within the SLOs", "% of requests", within, effective, MEAN_TOLERANCE)


def _within(answer: Answer) -> bool:
    gaps_s = np.diff(answer.token_s)
    tbt_s = longest_tenth_s(gaps_s) if len(gaps_s) else 0.0
    return answer.ttft_s <= COUNTED.ttft_s and tbt_s <= COUNTED.tbt_s


def _beside(case: str, metric: str, unit: str, actual: float, ours: float, tolerance: float) -> list[Row]:
    """The simulated beside the real figure, in a row with a limit above and in one with a limit below."""
    if not actual or not math.isfinite(actual):
        return [Row(case, metric, ours, unit)]
    row = Row(case, metric, ours, unit, limit="at most", limit_value=1 + tolerance)
    below = replace(row, metric=f"{metric}, from below", limit="at least", limit_value=1 - tolerance)
    return [versus(row, REAL, actual), versus(below, REAL, actual)]

"""Capacity planning: the cluster with the highest goodput a GPU, found by simulating candidates."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from moonpool.conductor.observing.slo import Slo
from moonpool.runtime.errors import ConfigError
from moonpool.simulator.inputs.hardware import Accelerator, Hardware, ModelShape, tensor_parallel
from moonpool.simulator.inputs.scenario import Scenario
from moonpool.simulator.inputs.trace import TraceRequest, at_speed
from moonpool.simulator.outcome import Outcome
from moonpool.simulator.simulation import Simulation

# A cluster serves a load if this fraction of its requests is within the SLOs.
EFFECTIVE = 0.9
# The search steps by this factor, then bisects: to 5 %.
_GROWTH, _HALVINGS, _MAX_GROWTHS = 1.5, 3, 10
# Candidates are skipped if the stages' work differs by more than this factor.
_MAX_IMBALANCE = 2.0
_MAX_RATIOS = 4
# Chunk sizes, of replicas and of prefill nodes alike: small ones keep decode steps short, large ones make
# prefills fast.
_CHUNKS = (512, 2048, 8192)
# Disaggregation is recommended from this gain on.
MIN_GAIN = 1.05


@dataclass(frozen=True, slots=True)
class Verdict:
    """The highest ``speed`` (× the trace's) that a cluster serves, and the outcome there.

    ``speed`` 0: it misses the SLOs at any load; ``outcome`` is that of the slowest run.
    """

    cluster: Scenario
    speed: float
    outcome: Outcome

    @property
    def goodput_per_gpu(self) -> float:
        """Requests within the SLOs, a second and GPU; 0 if it does not serve."""
        return self.outcome.goodput / self.cluster.num_gpus if self.speed else 0.0


def name_of(cluster: Scenario) -> str:
    """The nodes of a candidate, without their GPUs."""
    nodes = f"{cluster.num_prefill} prefill + {cluster.num_decode} decode"
    if cluster.num_both:
        nodes = f"{cluster.num_both} replicas"
    return f"{nodes}, chunks of {cluster.hardware.chunk_tokens}"


def check_slo(
    gpu: Accelerator, model: ModelShape, parallel: Sequence[int], requests: Sequence[TraceRequest], slo: Slo
) -> None:
    """Refuse limits that even an idle node of the best kind misses for nine of ten requests.

    Raises:
        ConfigError: names the option and the lowest possible limit; or no node holds the weights.
    """
    kinds = [hardware.profile for hardware in _kinds(gpu, model, parallel)]
    prompts = [request.input_tokens for request in requests]
    # One token, because the rest of a prompt may be cached.
    least_s = min(kind.prefill_s(1, 0) for kind in kinds)
    if not slo.ttft_s >= least_s:
        raise ConfigError(
            f"--slo-ttft {slo.ttft_s:g} is impossible: one step takes {least_s:.3g} s on the fastest node",
            key="slo_ttft",
        )
    context = int(np.quantile(prompts, 1 - EFFECTIVE))
    least_s = min(kind.step_s(1, context) for kind in kinds)
    if not slo.tbt_s >= least_s:
        raise ConfigError(
            f"--slo-tbt {slo.tbt_s:g} is impossible: a token takes {least_s:.3g} s on an idle fastest node",
            key="slo_tbt",
        )


def candidates(
    gpu: Accelerator,
    model: ModelShape,
    num_gpus: int,
    parallel: Sequence[int],
    requests: Sequence[TraceRequest],
    slo: Slo,
) -> list[Scenario]:
    """Return clusters of ``num_gpus`` GPUs to simulate, of each kind of node that holds the weights: prefill
    and decode nodes, or replicas.

    Raises:
        ConfigError: there is none.
    """
    found: list[Scenario] = []
    for hardware in _kinds(gpu, model, parallel):
        num_nodes = num_gpus // hardware.num_gpus
        for chunk in _CHUNKS if num_nodes else ():
            chunked = replace(hardware, chunk_tokens=chunk)
            found.append(Scenario(chunked, 0, 0, num_nodes, slo=slo))
            found += [
                Scenario(chunked, prefill, num_nodes - prefill, slo=slo)
                for prefill in _balanced(hardware, num_nodes, requests)
            ]
    if not found:
        raise ConfigError(f"{num_gpus} GPUs are too few for {model.name} on {gpu.name}", key="gpus")
    return found


def _kinds(gpu: Accelerator, model: ModelShape, parallel: Sequence[int]) -> list[Hardware]:
    found = []
    for size in parallel:
        with contextlib.suppress(ConfigError):  # the weights do not fit
            found.append(tensor_parallel(gpu, model, size))
    if not found:
        raise ConfigError(
            f"{model.name} ({model.weight_nbytes / 1e9:.0f} GB of weights) does not fit a node of "
            f"{' or '.join(map(str, parallel))} × {gpu.name}; give a larger --parallel",
            key="parallel",
        )
    return found


def _balanced(hardware: Hardware, num_nodes: int, requests: Sequence[TraceRequest]) -> list[int]:
    """Return counts of prefill nodes at which both stages are about equally busy."""
    profile = hardware.profile
    prefill_s = float(np.mean([profile.prefill_s(r.input_tokens, 0) for r in requests]))
    # Assume decode batches of 32.
    context = float(np.mean([r.input_tokens for r in requests]))
    token_s = profile.step_s(32, int(32 * context)) / 32
    decode_s = token_s * float(np.mean([r.output_tokens for r in requests]))
    counts = []
    for prefill in range(1, num_nodes):
        odds = prefill / (num_nodes - prefill) * decode_s / prefill_s
        # A cache may halve the work of prefills.
        if 1 / (2 * _MAX_IMBALANCE) <= odds <= _MAX_IMBALANCE or num_nodes <= 4:
            counts.append(prefill)
    if len(counts) > _MAX_RATIOS:
        last = len(counts) - 1
        counts = [counts[round(i * last / (_MAX_RATIOS - 1))] for i in range(_MAX_RATIOS)]
    return counts or ([num_nodes - 1] if num_nodes > 1 else [])


def judge(cluster: Scenario, requests: Sequence[TraceRequest], say: Callable[[str], None]) -> Verdict:
    """Find the highest speed that the cluster serves, by simulating."""
    outcomes: dict[float, Outcome] = {}

    def serves(speed: float) -> bool:
        say(f"{name_of(cluster)} of {cluster.hardware.num_gpus} GPUs at {speed:.2f}× the speed")
        outcomes[speed] = Simulation(cluster, at_speed(requests, speed)).run()
        return outcomes[speed].effective_ratio >= EFFECTIVE

    speed = highest_speed(serves)
    return Verdict(cluster, speed, outcomes[speed or min(outcomes)])


def highest_speed(serves: Callable[[float], bool]) -> float:
    """Return the highest speed that ``serves`` accepts, to 5 %; 0: none that was tried."""
    speed = bad_speed = 1.0
    grows = serves(speed)
    best = speed if grows else 0.0
    for _ in range(_MAX_GROWTHS):
        speed *= _GROWTH if grows else 1 / _GROWTH
        good = serves(speed)
        if good:
            best = speed
        else:
            bad_speed = speed
        if good != grows:
            break
    if not best:
        return 0.0
    for _ in range(_HALVINGS if bad_speed > best else 0):
        middle = (best + bad_speed) / 2
        if serves(middle):
            best = middle
        else:
            bad_speed = middle
    return best

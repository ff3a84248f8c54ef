"""How busy a cluster is meanwhile: its cores and GPUs, what its steps consist of, its queues."""

from __future__ import annotations

import asyncio
import re
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from statistics import fmean

from moonpool.bench.serve.client import load
from moonpool.bench.serve.client.answer import AnswerInvalid
from moonpool.bench.serve.client.cluster import CPU_S, MetricsPages
from moonpool.bench.serve.client.http_client import ServerUnreachable
from moonpool.bench.serve.client.server import Outcome, Server
from moonpool.bench.serve.client.workload import Workload
from moonpool.runtime.machine.processor import usable_cores
from moonpool.runtime.reports.report import Row

# A reading costs each process a few milliseconds.
_PERIOD_S = 0.25
_STEP_TOKENS = re.compile(r'^moonpool_step_tokens_sum\{kind="(\w+)"\} (\S+)', re.MULTILINE)
_GPUS = re.compile(r'^moonpool_gpu_utilization_ratio\{gpu="[^"]*"\} (\S+)', re.MULTILINE)
_SEQUENCES = re.compile(r'^moonpool_engine_requests\{state="(\w+)"\} (\S+)', re.MULTILINE)


@dataclass
class _Reading:
    """Sums over all processes: CPU seconds, tokens of steps by kind, sequences by state. ``gpus``: how busy
    each one is, 0 to 1."""

    cpu_s: float = 0.0
    step_tokens: Counter[str] = field(default_factory=Counter)
    sequences: Counter[str] = field(default_factory=Counter)
    gpus: list[float] = field(default_factory=list)


@dataclass
class Occupancy:
    """cpu_s: of the cluster's processes, in ``seconds``. step_tokens: by kind. running, waiting: a reading
    each, of all engines; gpus: the mean of each reading, empty without GPUs."""

    cpu_s: float = 0.0
    client_cpu_s: float = 0.0
    seconds: float = 0.0
    step_tokens: Counter[str] = field(default_factory=Counter)
    running: list[float] = field(default_factory=list)
    waiting: list[float] = field(default_factory=list)
    gpus: list[float] = field(default_factory=list)

    @property
    def cores(self) -> float:
        """The share of this machine's cores that the cluster's processes used."""
        return self.cpu_s / (self.seconds * usable_cores())

    @property
    def client_cores(self) -> float:
        """The share that the load itself used."""
        return self.client_cpu_s / (self.seconds * usable_cores())

    @property
    def prompt_share(self) -> float:
        """The share of the tokens of all steps that were of prompts."""
        return self.step_tokens["prompt"] / max(self.step_tokens.total(), 1.0)

    @property
    def batch_size(self) -> float:
        """Mean sequences that are computed at a time, over the readings that found any."""
        return fmean([count for count in self.running if count] or [0.0])

    @property
    def queue_length(self) -> float:
        """Mean sequences that wait for a place in a step."""
        return fmean(self.waiting or [0.0])


async def watched_load(
    server: Server, pages: MetricsPages | None, work: Workload
) -> tuple[Outcome, Occupancy | None]:
    """Run the load, and read the metrics of every process of its cluster meanwhile. ``pages`` None: of none.

    Raises as ``MetricsPages.read``, of the readings before and after the load; others may fail.
    """
    if pages is None:
        return await load.run(server, work), None
    found = Occupancy()
    began_s, client_s = time.perf_counter(), time.process_time()
    before = await _read(pages)
    reading = asyncio.create_task(_keep_reading(pages, found))
    try:
        outcome = await load.run(server, work)
    finally:
        reading.cancel()
        with suppress(asyncio.CancelledError):
            await reading
    after = await _read(pages)
    found.cpu_s = after.cpu_s - before.cpu_s
    found.step_tokens = after.step_tokens - before.step_tokens
    found.seconds = time.perf_counter() - began_s
    found.client_cpu_s = time.process_time() - client_s
    return outcome, found


async def _keep_reading(pages: MetricsPages, found: Occupancy) -> None:
    while True:
        await asyncio.sleep(_PERIOD_S)
        try:
            now = await _read(pages)
        except (ServerUnreachable, AnswerInvalid):
            continue  # a node restarts; the load goes on
        found.running.append(now.sequences["running"])
        found.waiting.append(now.sequences["waiting"])
        if now.gpus:
            found.gpus.append(fmean(now.gpus))


async def _read(pages: MetricsPages) -> _Reading:
    found = _Reading()
    for text in await pages.read():
        found.cpu_s += sum(map(float, CPU_S.findall(text)))
        for counts, pattern in ((found.step_tokens, _STEP_TOKENS), (found.sequences, _SEQUENCES)):
            counts.update({name: float(value) for name, value in pattern.findall(text)})
        found.gpus += map(float, _GPUS.findall(text))
    return found


# Metric, unit and figure.
FIGURES: tuple[tuple[str, str, Callable[[Occupancy], float]], ...] = (
    ("utilisation of cores", "%", lambda one: 100 * one.cores),
    ("utilisation of cores, client", "%", lambda one: 100 * one.client_cores),
    ("utilisation of GPUs", "%", lambda one: 100 * fmean(one.gpus or [0.0])),
    ("mean batch size", "sequences", lambda one: one.batch_size),
    ("prompts' share of steps", "% of tokens", lambda one: 100 * one.prompt_share),
    ("mean queue length", "sequences", lambda one: one.queue_length),
)


def occupancy_rows(case: str, found: Occupancy) -> list[Row]:
    return [Row(case, metric, figure(found), unit) for metric, unit, figure in figures_of(found)]


def figures_of(found: Occupancy) -> list[tuple[str, str, Callable[[Occupancy], float]]]:
    """``FIGURES``; those of GPUs where there are any."""
    return [one for one in FIGURES if found.gpus or "GPU" not in one[0]]

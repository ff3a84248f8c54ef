"""The children of a local cluster: their names, commands and GPUs."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Collection, Sequence
from functools import partial
from pathlib import Path

from moonpool.errors import TooLittleMemory
from moonpool.local.node_configs import (
    alone_on,
    config_of,
    free_gpus,
    gpu_options,
    gpu_spans,
    node_configs,
)
from moonpool.local.preflight import available_nbytes
from moonpool.local.vllm_engine import VllmEngine
from moonpool.runtime.config.loading import override, to_toml
from moonpool.runtime.config.options import Config
from moonpool.runtime.errors import ConfigError, MoonpoolError
from moonpool.runtime.failures import FailureClass
from moonpool.runtime.machine.gpus import computes_on_gpus
from moonpool.runtime.service.child import Child

_COMPUTE = ("prefill", "decode", "both")
_READY_TIMEOUT_S = 120.0  # a large checkpoint takes a while to load
_VLLM_TIMEOUT_S = 300.0  # importing vLLM takes a while, too


def ready_timeout_s(child: Child) -> float:
    """Seconds that ``child`` may take to serve."""
    return _VLLM_TIMEOUT_S if isinstance(child, VllmEngine) else _READY_TIMEOUT_S


class NoRoom(MoonpoolError):
    """This machine has no room for another node. Nothing was started."""

    code = "RESOURCE_EXHAUSTED"
    failure = FailureClass.REQUEST


class Children:
    """Makes the processes of one cluster, not started. ``config``: final."""

    def __init__(
        self, config: Config, directory: Path, loaded: Callable[[str, int, int], None], label: str = ""
    ) -> None:
        """``loaded``: gets a child's name, bytes loaded and all bytes while weights are loaded. ``label``:
        in the names of its nodes, where a cluster has several models."""
        self._config = config
        self._label = f"-{label}" if label else ""
        self._directory = directory
        self._loaded = loaded
        self._gpus = computes_on_gpus(config)
        self._spans: dict[str, range] = {}  # GPUs by node
        self._numbers = dict.fromkeys((*_COMPUTE, "store"), 0)
        self._num_engines = 0
        self._settled: tuple[str, ...] = ()  # settings of later nodes, from rollouts
        # A file rather than arguments: a secret among the options must not show in the process list.
        self._file = directory / f"cluster{self._label}.toml"
        self._file.touch(mode=0o600)
        self._file.write_text(to_toml(config), encoding="utf-8")

    def conductor(self, *options: str) -> Child:
        return self._child("conductor", ("moonpool.conductor",), "node.port=0", *options)

    def first_nodes(self, *, on_demand: bool = False) -> list[Child]:
        """Those that ``cluster.*`` names. ``on_demand``: others start when they are asked for."""
        counts, configs = self._config.cluster, node_configs(self._config)
        if on_demand and not self._config.planner.min_warm:
            return [self._node("store", (), range(0)) for _ in range(counts.store)]
        if self._config.fleet.provider == "ray":  # its machines have the others
            return [self._node("store", (), range(0)) for _ in range(counts.store)]
        roles = [role for role in _COMPUTE for _ in range(getattr(counts, role))]
        spans = gpu_spans(configs, self._gpus) if self._gpus else [range(0)] * len(configs)
        nodes = [
            self._node(role, gpu, span)
            for role, gpu, span in zip(roles, gpu_options(configs, self._gpus), spans, strict=True)
        ]
        return nodes + [self._node("store", (), range(0)) for _ in range(counts.store)]

    def settle(self, settings: Sequence[str]) -> None:
        """Use these settings for all later nodes. Raises ``ConfigError``."""
        override(self._config, settings)
        self._settled += tuple(settings)

    def another(self, role: str, live: Collection[str], settings: Sequence[str] = ()) -> Child:
        """One more node that computes, beside the nodes named ``live``. ``settings``: its own.

        Raises:
            ConfigError: there is no such role, or no such setting.
            TooLittleMemory, NoRoom: this machine has no memory or no GPU left for it.
        """
        if role not in _COMPUTE:
            raise ConfigError(
                f"a local cluster starts nodes of {', '.join(_COMPUTE)}, not {role[:32]!r}", "role"
            )
        settings = (*self._settled, *settings)
        if settings and self._config.cluster.engine == "vllm":
            raise ConfigError("vLLM engines take no settings of ours: nothing was started", settings[0])
        config = override(config_of(self._config, role), settings)
        if not self._gpus:
            needed, available = config.engine.host_pool_nbytes * config.engine.parallel.dp, available_nbytes()
            if needed > available:
                raise TooLittleMemory(needed, available)
            return self._node(role, (), range(0), settings)
        taken = [span for name, span in self._spans.items() if name in live]
        span = free_gpus(config, taken, self._gpus)
        if span is None:
            raise NoRoom(
                f"no {role} node was started: the {self._gpus} GPUs of this machine have nodes; stop one "
                "first, or let a provider of several machines supply nodes"
            )
        return self._node(role, alone_on(config, span), span, settings)

    def _node(self, role: str, gpu: tuple[str, ...], span: range, settings: Sequence[str] = ()) -> Child:
        # Names are never used again: a new node must not be taken for one that left.
        name = f"{role}{self._label}-{self._numbers[role]}"
        self._numbers[role] += 1
        self._spans[name] = span
        if role != "store" and self._config.cluster.engine == "vllm":
            return self._vllm_engine(name, role)
        own = {"prefill": self._config.cluster.prefill_options, "decode": self._config.cluster.decode_options}
        listening = (f"node.id={name}", "node.port=0", "node.metrics_port=0")
        module = ("moonpool.kvstore.store_node",) if role == "store" else ("moonpool.node", "--role", role)
        return self._child(name, module, *gpu, *own.get(role, ()), *settings, *listening)

    def _vllm_engine(self, name: str, role: str) -> VllmEngine:
        """The next engine, with its part of the cores."""
        cores, count = sorted(os.sched_getaffinity(0)), self._config.engine.threads
        first = count * self._num_engines
        self._num_engines += 1
        own = [cores[(first + i) % len(cores)] for i in range(count)]
        return VllmEngine(name, role, self._config, self._file, self._directory / f"{name}.log", own)

    def _child(self, name: str, module: tuple[str, ...], *options: str) -> Child:
        command = [sys.executable, "-m", *module, "--config", str(self._file)]
        for option in options:
            command += ["--set", option]
        environment = {
            # Idle OpenMP threads must not spin: other processes need the cores.
            "OMP_NUM_THREADS": str(self._config.engine.threads),
            "OMP_WAIT_POLICY": "PASSIVE",
        }
        log, loaded = self._directory / f"{name}.log", partial(self._loaded, name)
        return Child(name, command, log, environment=environment, sends_json=True, on_loaded=loaded)

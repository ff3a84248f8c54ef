"""The children of a local cluster: their names, commands and GPUs."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path

from moonpool.errors import TooLittleMemory
from moonpool.local.node_configs import (
    TakenGpus,
    config_of,
    free_gpus,
    gpu_options,
    gpu_spans,
    named_gpus,
    num_gpus_of,
    options_on,
)
from moonpool.local.played_hosts import NodeOverHosts, PlayedHost
from moonpool.local.preflight import available_nbytes, check_model
from moonpool.local.vllm_engine import VllmEngine
from moonpool.runtime.config.loading import override, to_toml
from moonpool.runtime.config.options import Config
from moonpool.runtime.errors import ConfigError, MoonpoolError
from moonpool.runtime.failures import FailureClass
from moonpool.runtime.machine.gpus import computes_on_gpus
from moonpool.runtime.service.child import Child

NODE_MODULE = "moonpool.node"
_COMPUTE = ("prefill", "decode", "both")
_READY_TIMEOUT_S = 120.0  # a large checkpoint takes a while to load
_VLLM_TIMEOUT_S = 300.0  # importing vLLM takes a while, too


def ready_timeout_s(child: Child) -> float:
    """Seconds that ``child`` may take to serve."""
    return _VLLM_TIMEOUT_S if isinstance(child, VllmEngine) else _READY_TIMEOUT_S


class NoRoom(MoonpoolError):
    """This machine has no room for a node. Nothing was changed."""

    code = "RESOURCE_EXHAUSTED"
    failure = FailureClass.REQUEST


class Children:
    """Makes the processes of one cluster, not started. ``config``: final."""

    def __init__(
        self,
        config: Config,
        directory: Path,
        loaded: Callable[[str, int, int], None],
        label: str = "",
        host: PlayedHost | None = None,
        node_module: str = NODE_MODULE,
        taken: TakenGpus | None = None,
    ) -> None:
        """``loaded``: gets a child's name, bytes loaded and all bytes while weights are loaded. ``label``:
        in the names of its nodes, where a cluster has several models. ``host``: has half of the ranks.
        ``node_module``: that the processes of its nodes run. ``taken``: GPUs, for all models."""
        self._config = config
        self._host = host
        self._node_module = node_module
        self._label = f"-{label}" if label else ""
        self._directory = directory
        self._loaded = loaded
        self._gpus = computes_on_gpus(config)
        self._taken = TakenGpus() if taken is None else taken
        self._taken.named.update(named_gpus(config) if self._gpus else ())
        self._gpu_options: dict[str, tuple[str, ...]] = {}  # by node
        self._numbers = dict.fromkeys((*_COMPUTE, "store"), 0)
        self._num_engines = 0
        self._settled: tuple[str, ...] = ()  # settings of later nodes, from rollouts
        # A file rather than arguments: a secret among the options must not show in the process list.
        self._file = directory / f"cluster{self._label}.toml"
        self._file.touch(mode=0o600)
        self._file.write_text(to_toml(config), encoding="utf-8")

    def conductor(self, *options: str) -> Child:
        listening = ("node.port=0", "node.metrics_port=0")
        return self._child("conductor", ("moonpool.conductor",), *listening, *options)

    def _first_roles(self, *, on_demand: bool) -> list[str]:
        counts = self._config.cluster
        # On Ray, its machines have them.
        if self._config.fleet.provider == "ray" or (on_demand and not self._config.planner.min_warm):
            return []
        return [role for role in _COMPUTE for _ in range(getattr(counts, role))]

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
        taken = [span for name, span in self._taken.spans.items() if name in live]
        span = free_gpus(config, taken, self._gpus, self._taken.named)
        if span is None:
            device = config.model.device
            which = f"GPUs from {device} on" if ":" in device else f"{self._gpus} GPUs of this machine"
            raise NoRoom(
                f"no {role} node was started: the {which} have nodes; stop one first, or let a provider of "
                "several machines supply nodes"
            )
        return self._node(role, options_on(config, span), span, settings)

    def moved(self, name: str, role: str, former: Children) -> Child:
        """The node ``name`` of another model, ``former``, with ours: on its GPUs, not started.

        Raises:
            ConfigError: one of both is served by vLLM, or the checkpoint is missing.
            TooLittleMemory, NoRoom: it does not fit where the other model is now.
        """
        if "vllm" in (self._config.cluster.engine, former._config.cluster.engine):
            raise ConfigError("vLLM engines do not change their model", "cluster.engine")
        before = config_of(former._config, role)
        config = override(config_of(self._config, role), self._settled)
        check_model(config.model.directory)
        span, gpu = former._taken.spans[name], former._gpu_options[name]
        if len(span) != (num_gpus_of(config) if self._gpus else 0):
            raise NoRoom(f"{name} has {len(span)} GPUs, and this model takes {num_gpus_of(config)}")
        if not self._gpus:
            needed, available = _memory_nbytes(config), available_nbytes() + _memory_nbytes(before)
            if needed > available:
                raise TooLittleMemory(needed, available)
        settings = self._settled
        if config.store.ssd.path and name.rpartition("-")[0].partition("-")[2] != self._label[1:]:
            # The node's own folder has blocks of the model that it was made for.
            settings += (f"store.ssd.path={config.store.ssd.path}/{config.model.served_name}",)
        return self._node(role, gpu, span, settings, name)

    def _node(
        self, role: str, gpu: tuple[str, ...], span: range, settings: Sequence[str] = (), name: str = ""
    ) -> Child:
        if not name:
            # Names are never used again: a new node must not be taken for one that left.
            name = f"{role}{self._label}-{self._numbers[role]}"
            self._numbers[role] += 1
        self._taken.spans[name], self._gpu_options[name] = span, gpu
        if role != "store" and self._config.cluster.engine == "vllm":
            return self._vllm_engine(name, role)
        own = {"prefill": self._config.cluster.prefill_options, "decode": self._config.cluster.decode_options}
        listening = (f"node.id={name}", "node.port=0", "node.metrics_port=0")
        module = ("moonpool.kvstore.store_node",) if role == "store" else (self._node_module, "--role", role)
        options = (*gpu, *own.get(role, ()), *settings, *listening)
        if role == "store" or self._host is None:
            return self._child(name, module, *options)
        config = override(config_of(self._config, role), settings)
        over_hosts, launcher = self._host.ranks_of(name, config, self._file, self._environment)
        return self._child(name, module, *options, *over_hosts, kind=partial(NodeOverHosts, launcher))

    def _vllm_engine(self, name: str, role: str) -> VllmEngine:
        """The next engine, with its part of the cores."""
        cores, count = sorted(os.sched_getaffinity(0)), self._config.engine.threads
        first = count * self._num_engines
        self._num_engines += 1
        own = [cores[(first + i) % len(cores)] for i in range(count)]
        return VllmEngine(name, role, self._config, self._file, self._directory / f"{name}.log", own)

    @property
    def _environment(self) -> dict[str, str]:
        # Idle OpenMP threads must not spin: other processes need the cores.
        return {"OMP_NUM_THREADS": str(self._config.engine.threads), "OMP_WAIT_POLICY": "PASSIVE"}

    def _child(
        self, name: str, module: tuple[str, ...], *options: str, kind: Callable[..., Child] = Child
    ) -> Child:
        command = [sys.executable, "-m", *module, "--config", str(self._file)]
        for option in options:
            command += ["--set", option]
        log, loaded = self._directory / f"{name}.log", partial(self._loaded, name)
        return kind(name, command, log, environment=self._environment, sends_json=True, on_loaded=loaded)


def _memory_nbytes(config: Config) -> int:
    """What a node takes of this machine's memory: the pools of its replicas, and the weights."""
    pools = config.engine.host_pool_nbytes * config.engine.parallel.dp
    return pools + sum(file.stat().st_size for file in config.model.directory.glob("*.safetensors"))


def first_nodes(made: Mapping[str, Children], *, on_demand: bool = False) -> dict[str, list[Child]]:
    """Return by model the nodes that ``cluster.*`` names. ``on_demand``: others start when asked for.

    The nodes of all models divide the GPUs among them.
    """
    roles = {model: one._first_roles(on_demand=on_demand) for model, one in made.items()}
    on_gpus = [
        config_of(one._config, role) for model, one in made.items() if one._gpus for role in roles[model]
    ]
    num_gpus = max(one._gpus for one in made.values())
    named = {gpu for one in made.values() for gpu in one._taken.named}
    placed = zip(gpu_options(on_gpus, num_gpus, named), gpu_spans(on_gpus, num_gpus, named), strict=True)
    return {
        model: [
            *(one._node(role, *(next(placed) if one._gpus else ((), range(0)))) for role in roles[model]),
            *(one._node("store", (), range(0)) for _ in range(one._config.cluster.store)),
        ]
        for model, one in made.items()
    }

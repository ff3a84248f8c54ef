"""The configuration of each node with an engine of a local cluster, and its part of the GPUs."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace

from moonpool.runtime.config.loading import override
from moonpool.runtime.config.models_file import ModelConfig, served_models
from moonpool.runtime.config.options import Config
from moonpool.runtime.machine.gpus import computes_on_gpus


def models_to_start(config: Config) -> tuple[ModelConfig, ...]:
    """Return the models of ``config`` with the numbers of nodes that suit this machine, where none are given.

    Two nodes on one GPU take turns, whole kernels at a time (docs/decisions/gpu.md). Raises ``ConfigError``.
    """
    models = served_models(config).models
    return tuple(replace(one, config=_with_counts(one.config, len(models))) for one in models)


def _with_counts(config: Config, num_models: int) -> Config:
    counts = config.cluster
    prefill, decode, both = counts.prefill, counts.decode, counts.both
    if prefill >= 0 and decode >= 0:
        return config
    if both:
        prefill, decode = max(prefill, 0), max(decode, 0)
    elif prefill < 0 and decode < 0 and (num_fit := _num_fit(config, num_models)) < 4:
        prefill = decode = num_fit // 2
        both = 1 - prefill
    else:
        prefill, decode = (2 if count < 0 else count for count in (prefill, decode))
    return replace(config, cluster=replace(counts, prefill=prefill, decode=decode, both=both))


def _num_fit(config: Config, num_models: int) -> int:
    """Nodes of one of ``num_models`` models that have GPUs of their own, at least 1; many on CPUs."""
    if config.fleet.provider == "ray" or config.cluster.engine == "vllm":
        return sys.maxsize  # Ray's machines have them; vLLM's servers run on this CPU
    gpus = computes_on_gpus(config)
    return max(gpus // (num_models * num_gpus_of(config)), 1) if gpus else sys.maxsize


def node_configs(config: Config) -> list[Config]:
    """Return the configurations of the prefill nodes, the decode nodes, and those that do both.

    Raises ``ConfigError``.
    """
    counts = config.cluster
    prefill, decode, both = (config_of(config, role) for role in ("prefill", "decode", "both"))
    return [prefill] * counts.prefill + [decode] * counts.decode + [both] * counts.both


def config_of(config: Config, role: str) -> Config:
    """Return the configuration of a node of ``role``. Raises ``ConfigError``."""
    options = {"prefill": config.cluster.prefill_options, "decode": config.cluster.decode_options}
    return override(config, options.get(role, ()))


def pools_nbytes(config: Config) -> int:
    """Return the memory of all pools on CPUs."""
    return sum(one.engine.host_pool_nbytes * one.engine.parallel.dp for one in node_configs(config))


@dataclass(frozen=True, slots=True)
class TakenGpus:
    """The GPUs of this machine that nodes of all models have, by node, and those that a ``model.device``
    names."""

    spans: dict[str, range] = field(default_factory=dict)
    named: set[int] = field(default_factory=set)


def gpu_options(nodes: Sequence[Config], gpus: int, named: Collection[int] = ()) -> list[tuple[str, ...]]:
    """Return the options of each node with an engine: its first GPU and its fraction of GPU memory.

    Nodes take consecutive GPUs, one for each rank of each replica. Nodes on the same GPU divide
    ``engine.gpu_memory`` evenly.
    """
    spans = gpu_spans(nodes, gpus, named)
    nodes_on_gpu = Counter(gpu for span in spans for gpu in span)
    return [
        options_on(config, span, max(nodes_on_gpu[gpu] for gpu in span)) if span else ()
        for config, span in zip(nodes, spans, strict=True)
    ]


def gpu_spans(nodes: Sequence[Config], gpus: int, named: Collection[int] = ()) -> list[range]:
    """Return the GPUs of each node, of ``gpus``; 0: they compute on CPUs.

    Some have those that their ``model.device`` names; the others avoid these, and ``named``, while they can.
    """
    own = [_own_gpus(config) if gpus else None for config in nodes]
    reserved = {gpu for span in own if span for gpu in span}.union(named)
    spans: list[range] = []
    position = 0
    for config, span in zip(nodes, own, strict=True):
        if span is None:
            count = num_gpus_of(config) if gpus else 0
            starts = range(gpus - count + 1)
            free = [start for start in starts if reserved.isdisjoint(range(start, start + count))] or starts
            # A node that does not fit starts again at the first one; one that needs too many fails later.
            start = next((start for start in free if start >= position), free[0] if free else 0)
            span = range(start, start + count)
            position = span.stop
        spans.append(span)
    return spans


def free_gpus(config: Config, taken: Iterable[range], gpus: int, named: Collection[int] = ()) -> range | None:
    """Return consecutive GPUs that no node has, enough for a node of ``config``; None: there are none. Those
    of ``named`` are the last that are taken, but for the node's own."""
    used, count, own = {gpu for span in taken for gpu in span}, num_gpus_of(config), _own_gpus(config)
    spans = [own] if own else [range(first, first + count) for first in range(gpus - count + 1)]
    spans.sort(key=lambda span: any(gpu in named for gpu in span))
    return next((span for span in spans if used.isdisjoint(span)), None)


def named_gpus(config: Config) -> set[int]:
    """Return the GPUs that the settings of a model's nodes name."""
    own = (_own_gpus(config_of(config, role)) for role in ("prefill", "decode", "both"))
    return {gpu for span in own if span for gpu in span}


def _own_gpus(config: Config) -> range | None:
    """The GPUs from the one that ``model.device`` names; None: it names none."""
    first = config.model.device.partition(":")[2]
    return range(int(first), int(first) + num_gpus_of(config)) if first else None


def num_gpus_of(config: Config) -> int:
    """Return the GPUs that a node takes, if it computes on GPUs."""
    return config.engine.parallel.ranks_per_host * config.engine.parallel.dp


def options_on(config: Config, span: range, num_nodes: int = 1) -> tuple[str, ...]:
    """Return the options of one of ``num_nodes`` nodes that have the GPUs of ``span``."""
    device = config.model.device
    # Rounded down, so that the sum stays within the limit.
    fraction = int(config.engine.gpu_memory / num_nodes * 1000) / 1000
    name = device if ":" in device else f"cuda:{span.start}"
    return f"model.device={name}", f"engine.gpu_memory={fraction:g}"

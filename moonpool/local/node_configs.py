"""The configuration of each prefill and decode node of a local cluster, and its part of the GPUs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from moonpool.runtime.config.loading import override
from moonpool.runtime.config.options import Config


def node_configs(config: Config) -> list[Config]:
    """Return the configurations of the prefill, then of the decode nodes. Raises ``ConfigError``."""
    counts = config.cluster
    prefill, decode = (override(config, one) for one in (counts.prefill_options, counts.decode_options))
    return [prefill] * counts.prefill + [decode] * counts.decode


def pools_nbytes(config: Config) -> int:
    """Return the memory of all pools on CPUs."""
    return sum(one.engine.host_pool_nbytes * one.engine.parallel.dp for one in node_configs(config))


def gpu_options(nodes: Sequence[Config], gpus: int) -> list[tuple[str, ...]]:
    """Return the options of each prefill and decode node: its first GPU and its fraction of GPU memory.

    Nodes take consecutive GPUs, one for each rank of each replica. Nodes on the same GPU divide
    ``engine.gpu_memory`` evenly.
    """
    if not gpus:
        return [()] * len(nodes)
    taken: list[range] = []
    for config in nodes:
        parallel = config.engine.parallel
        first = taken[-1].stop if taken else 0
        count = parallel.ranks_per_host * parallel.dp
        # A node that does not fit starts again at GPU 0; one that needs too many fails later.
        taken.append(range(first, first + count) if first + count <= gpus else range(count))
    nodes_on_gpu = Counter(gpu for span in taken for gpu in span)
    options: list[tuple[str, ...]] = []
    for config, span in zip(nodes, taken, strict=True):
        device = config.model.device
        # Rounded down, so that the sum stays within the limit.
        per_node = config.engine.gpu_memory / max(nodes_on_gpu[gpu] for gpu in span)
        fraction = int(per_node * 1000) / 1000
        name = device if ":" in device else f"cuda:{span.start}"
        options.append((f"model.device={name}", f"engine.gpu_memory={fraction:g}"))
    return options

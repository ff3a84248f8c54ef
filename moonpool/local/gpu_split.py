"""How the nodes of one cluster share this machine's GPUs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from moonpool.runtime.config.options import Config


def gpu_options(nodes: Sequence[Config], gpus: int) -> list[tuple[str, ...]]:
    """What each prefill and decode node is told: its first GPU, and its share of its GPUs' memory.

    They go round the GPUs, each taking one for each rank of each replica, side by side; those of one GPU
    share alike what ``engine.gpu_memory`` allows of it.
    """
    if not gpus:
        return [()] * len(nodes)
    taken: list[range] = []
    for config in nodes:
        parallel = config.engine.parallel
        first = taken[-1].stop if taken else 0
        count = parallel.ranks_per_host * parallel.dp
        # Who does not fit where the others stop begins anew; who needs more than there are says so itself.
        taken.append(range(first, first + count) if first + count <= gpus else range(count))
    sharers = Counter(gpu for span in taken for gpu in span)
    options: list[tuple[str, ...]] = []
    for config, span in zip(nodes, taken, strict=True):
        device = config.model.device
        # Cut off, not rounded: together they may not take more than is allowed.
        share = int(config.engine.gpu_memory / max(sharers[gpu] for gpu in span) * 1000) / 1000
        name = device if ":" in device else f"cuda:{span.start}"
        options.append((f"model.device={name}", f"engine.gpu_memory={share:g}"))
    return options

"""The load of a vLLM engine, out of its metrics page."""

from __future__ import annotations

import re

from moonpool.kvstore.index.redis.node_record import NodeLoad

_RUNNING = "vllm:num_requests_running"
_WAITING = "vllm:num_requests_waiting"
_USED = "vllm:kv_cache_usage_perc"
_CONFIG = "vllm:cache_config_info"
_NUM_BLOCKS = re.compile(r'num_gpu_blocks="(\d+)"')


def load_of(page: str) -> NodeLoad:
    """The sum over its engine processes. What the page does not have counts as 0."""
    found = dict.fromkeys((_RUNNING, _WAITING, _USED), 0.0)
    num_blocks = num_free = 0
    usages = []
    sizes = []
    for line in page.splitlines():
        name, _, rest = line.partition("{")
        if name == _CONFIG and (given := _NUM_BLOCKS.search(rest)):
            sizes.append(int(given[1]))
        elif name in found:
            value = float(line.rpartition(" ")[2])
            found[name] += value
            if name == _USED:
                usages.append(value)
    for size, usage in zip(sizes, usages, strict=False):
        num_blocks += size
        num_free += round(size * (1 - min(max(usage, 0.0), 1.0)))
    return NodeLoad(
        num_running=int(found[_RUNNING]),
        num_waiting=int(found[_WAITING]),
        num_blocks=num_blocks,
        free_blocks=num_free,
    )

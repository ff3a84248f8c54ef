"""The papers' testbed as a scenario."""

from __future__ import annotations

from dataclasses import replace

from moonpool.conductor.observing.slo import Slo
from moonpool.simulator.inputs.hardware import SHIPPED, Hardware, tensor_parallel
from moonpool.simulator.inputs.scenario import Scenario

# KV cache of a node, as in figure 10.
CACHE_TOKENS = 3_000_000
SLO = Slo(ttft_s=30.0, tbt_s=0.1)
PAPER = "paper"


def decode_node() -> Hardware:
    """Return 8×A800 with LLaMA3-70B."""
    node = tensor_parallel(*SHIPPED["8xa800-llama3-70b"])
    return replace(node, host_tokens=0, chunk_tokens=8192)


def prefill_node() -> Hardware:
    """Return the same. Its pool is the cache: loading overlaps with computing."""
    return replace(decode_node(), pool_tokens=CACHE_TOKENS)


def scenario(policy: str, *, prefill: int, decode: int) -> Scenario:
    """Return a cluster in which only prefill nodes cache blocks, as in the paper's experiments."""
    return Scenario(
        hardware=prefill_node(),
        decode_hardware=decode_node(),
        num_prefill=prefill,
        num_decode=decode,
        policy=policy,
        slo=SLO,
        decode_caches=False,
    )

"""Inputs of placement: a request, and the cluster at one moment."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from moonpool.conductor.costs.links import LinkModel
from moonpool.conductor.placing.node_table import NodeTable


@dataclass(frozen=True, slots=True)
class PlaceRequest:
    """A request to place. When it is placed again, tokens already streamed count as prompt."""

    num_tokens: int
    remaining_tokens: int  # it may still produce
    expected_tokens: int  # it will probably produce
    deadline_s: float  # seconds from now
    reads_cache: bool = True  # False: every prompt token must be computed
    fairness_delay_s: float = 0.0  # prefills that arrive within this time may overtake it
    adapter: str = ""  # digest of its LoRA adapter; empty: none
    origin: str = ""  # the region that its tokens go to; empty: distance does not count


@dataclass(frozen=True, slots=True)
class ClusterView:
    """``prefix_blocks``: leading blocks of the request on each node, in any tier; ``slow_blocks``: those of
    them in host memory, and on SSD.
    """

    prefill: NodeTable
    decode: NodeTable
    prefix_blocks: Mapping[str, int]
    links: LinkModel
    block_size: int  # tokens
    block_nbytes: int
    now_s: float
    turn: int = 0  # placements made before, for round-robin
    draw: float = 0.0  # uniform in [0, 1), for random choices
    slow_blocks: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    avoid: Collection[str] = ()  # nodes to use only if no other of their role is left

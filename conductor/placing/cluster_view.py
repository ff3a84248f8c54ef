"""What placement looks at: nodes as they are now, and who holds how much of a request's prefix."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from moonpool.conductor.costs.links import LinkModel
from moonpool.conductor.costs.model import NodeCost
from moonpool.conductor.placing.prefill_queue import PrefillQueue
from moonpool.runtime.config.options import ConductorOptions

if TYPE_CHECKING:
    from moonpool.conductor.placing.node_table import Fleet


@dataclass(slots=True, eq=False)
class NodeView:
    """One live node. Kept current by whoever owns the view; ``place`` only reads it."""

    node_id: str
    cost: NodeCost
    queue: PrefillQueue = field(default_factory=PrefillQueue)
    others_queue_s: float = 0.0  # prefill: predicted seconds of work that others gave it
    num_running: int = 0  # decode: sequences in its batch
    num_waiting: int = 0  # decode: sequences that wait for blocks
    num_context_tokens: int = 0  # decode: tokens of KV those sequences attend over
    num_free_blocks: int = 0  # decode: free or evictable
    num_blocks: int = 0  # in its pool; 0: unknown
    num_placed: int = 0  # requests given to it so far, for spreading among equals
    slot: int = -1  # its place in the masks of the index mirror; -1: none


@dataclass(frozen=True, slots=True)
class PlaceRequest:
    """What placement must know of a request. Placed again, its tokens already streamed count as prompt."""

    num_tokens: int
    remaining_tokens: int  # it may still produce
    expected_tokens: int  # it will probably produce
    deadline_s: float  # seconds from now
    reads_cache: bool = True  # False: every prompt token must be computed
    lag_s: float = 0.0  # prefills that come within this time go first, whatever the policy


@dataclass(frozen=True, slots=True)
class Slo:
    """Latency a request should keep; infinite: any. It guides the choice, and rejects nobody."""

    ttft_s: float = float("inf")
    tbt_s: float = float("inf")

    @classmethod
    def of(cls, options: ConductorOptions) -> Slo:
        return cls(options.slo_ttft_s or math.inf, options.slo_tbt_s or math.inf)


@dataclass(frozen=True, slots=True)
class ClusterView:
    """``prefix_blocks`` says how many leading blocks of the request each node holds, in whatever tier;
    ``slow_blocks`` how many of those are in host memory and on SSD, where there are any.
    """

    prefill: Fleet
    decode: Fleet
    prefix_blocks: Mapping[str, int]
    links: LinkModel
    block_size: int  # tokens
    block_nbytes: int
    now_s: float
    turn: int = 0  # how many placements were made before: what round-robin counts by
    draw: float = 0.0  # uniform in [0, 1): what random draws by
    slow_blocks: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    avoid: Collection[str] = ()  # nodes to take only when there is no other of their role

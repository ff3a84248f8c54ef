"""The parts of a conductor that its requests use."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from moonpool.conductor.accounts.ledger import Ledger
from moonpool.conductor.admission.adapter_shares import AdapterShares
from moonpool.conductor.admission.batch_queue import BatchQueue
from moonpool.conductor.admission.entrance import Admission
from moonpool.conductor.admission.fair_share import FairShare
from moonpool.conductor.admission.rejection import RejectionPolicy
from moonpool.conductor.admission.usage import Usage
from moonpool.conductor.coordination.arbitration import Arbitration
from moonpool.conductor.costs.model import CostModel
from moonpool.conductor.fleet.registry import NodeRegistry
from moonpool.conductor.fleet.served_model import ServedModel
from moonpool.conductor.observing.activity import Activity
from moonpool.conductor.observing.prefix_outcomes import PrefixWatch
from moonpool.conductor.observing.slo import Slo
from moonpool.conductor.observing.timelines.timeline import TimelineRing
from moonpool.conductor.placing.policies import Policy
from moonpool.conductor.planning.on_demand import OnDemand
from moonpool.conductor.replication.copier import Replicator
from moonpool.conductor.requests.cache_hints import CacheHints
from moonpool.conductor.requests.migration import Movable


@dataclass(frozen=True, slots=True)
class RequestDependencies:
    """Parts and settings of one conductor, shared by its requests."""

    conductor_id: str
    model: ServedModel
    registry: NodeRegistry
    cost_model: CostModel
    activity: Activity
    admission: Admission
    timelines: TimelineRing
    policy: Policy
    rejection: RejectionPolicy
    arbitration: Arbitration
    fair_share: FairShare
    adapter_shares: AdapterShares
    usage: Usage
    batch_queue: BatchQueue
    replicator: Replicator
    prefixes: PrefixWatch
    ledger: Ledger
    price: float  # of a second of a node
    region: str  # of this conductor; empty: none was given
    slo: Slo
    max_attempts: int
    timeout_s: float  # a request may run, from its placement
    wait_timeout_s: float  # a request may wait for its turn
    suspects: asyncio.Lock  # see ``Suspicion``
    on_demand: OnDemand
    clock: Callable[[], float]  # monotonic seconds
    rng: random.Random
    hints: CacheHints = field(default_factory=CacheHints)
    runs: dict[str, Movable] = field(default_factory=dict)  # admitted and not ended, by id

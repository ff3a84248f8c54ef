"""What every request works with."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from conductor.activity import Activity
from conductor.admission import Admission
from conductor.batch_turn import BatchTurn
from conductor.cluster_view import Slo
from conductor.cost_model import CostModel
from conductor.fair_share import FairShare
from conductor.policies import Policy
from conductor.prefix_watch import PrefixWatch
from conductor.registry import NodeRegistry
from conductor.rejection import RejectionPolicy
from conductor.replicator import Replicator
from conductor.served_model import ServedModel
from conductor.sharing import Sharing
from conductor.timeline import TimelineRing


@dataclass(frozen=True, slots=True)
class Services:
    """One conductor's parts and settings, shared by its requests."""

    conductor_id: str
    model: ServedModel
    registry: NodeRegistry
    cost_model: CostModel
    activity: Activity
    admission: Admission
    timelines: TimelineRing
    policy: Policy
    rejection: RejectionPolicy
    sharing: Sharing
    fair_share: FairShare
    batch_turn: BatchTurn
    replicator: Replicator
    prefixes: PrefixWatch
    slo: Slo
    max_attempts: int
    timeout_s: float  # deadline of a request that sets none
    clock: Callable[[], float]  # monotonic seconds
    rng: random.Random

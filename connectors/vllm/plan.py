"""What the scheduler's half of the connector asks of the worker's, a step at a time."""

from __future__ import annotations

from dataclasses import dataclass, field

from moonpool.connectors.vllm.parameters.hand_over import HandOver
from moonpool.connectors.vllm.parameters.hints import HintedBlocks
from moonpool.connectors.vllm.parameters.tenant import Tenant
from moonpool.kvstore.blocks.keys import BlockKey


@dataclass(frozen=True, slots=True)
class Load:
    """Fill ``blocks`` of the engine with the last of ``keys``, a chain from its first block on."""

    request_id: str
    keys: list[BlockKey]
    blocks: list[int]
    source: bytes  # KvAddress of another node, packed; empty: this one has all keys
    tail: BlockKey | None = None  # the last of ``keys``, if it serves this request alone
    tenant: str = ""  # the blocks count to its quota; empty: to none


@dataclass(frozen=True, slots=True)
class Save:
    """Keep ``blocks`` of the engine as ``keys``; ``parent`` is the one before them. They are full after this
    step, or the last one of a prompt that is handed over."""

    keys: list[BlockKey]
    blocks: list[int]
    parent: BlockKey | None
    tenant: str = ""  # its quota limits them; empty: none does


@dataclass(frozen=True, slots=True)
class Claim:
    """A request of ``tenant`` uses ``keys``, the full blocks of its prompt."""

    tenant: Tenant
    keys: list[BlockKey]


@dataclass(slots=True)
class PrefixReport:
    """Where the tokens of a prompt came from, told once its computation begins."""

    request_id: str
    prompt_tokens: int
    engine_tokens: int = 0  # the engine had them itself
    loaded_tokens: int = 0
    source: str = ""  # the node that was loaded from
    tier: str = ""  # of it: "host", "ssd", or "peer" for another engine's
    load_s: float = 0.0
    num_failed: int = 0  # loads that failed
    reason: str = ""  # why the first missing block was not loaded, one of ``reasons.REASONS``; empty: none is
    detail: str = ""  # the node that the reason speaks of


@dataclass(frozen=True, slots=True)
class StepPlan:
    loads: list[Load] = field(default_factory=list)
    saves: list[Save] = field(default_factory=list)
    keeps: list[HandOver] = field(default_factory=list)
    reports: list[PrefixReport] = field(default_factory=list)
    claims: list[Claim] = field(default_factory=list)
    hints: list[HintedBlocks] = field(default_factory=list)


@dataclass(slots=True)
class Outcome:
    """Loads that have ended, by request."""

    loaded: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)

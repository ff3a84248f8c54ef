"""What the scheduler's half of the connector knows of a request."""

from __future__ import annotations

from dataclasses import dataclass, field

from moonpool.connectors.vllm.engine_request import EngineRequest
from moonpool.connectors.vllm.lookup.prefix_index import Holder
from moonpool.connectors.vllm.parameters.hints import NO_HINTS, Hints
from moonpool.connectors.vllm.parameters.tenant import Tenant
from moonpool.connectors.vllm.plan import PrefixReport
from moonpool.kvstore.blocks.keys import BlockKey


@dataclass(slots=True)
class Tracked:
    request: EngineRequest
    report: PrefixReport
    head: str  # whether the first tokens came before under other keys
    keys: list[BlockKey] = field(default_factory=list)
    num_saved: int = 0  # of its first blocks: saved, or being saved
    num_loads: int = 0
    loading: Loading | None = None
    is_reported: bool = False
    giver: str = ""  # the node that has computed the prompt for this engine, until it is asked
    given: bool = False  # the prompt is kept for another engine
    tenant: Tenant | None = None
    hints: Hints = NO_HINTS


@dataclass(frozen=True, slots=True)
class Loading:
    source: Holder
    keys: list[BlockKey]
    skip: int  # blocks that the engine has itself
    num_tokens: int
    since_s: float
    tail: BlockKey | None = None
    is_given: bool = False

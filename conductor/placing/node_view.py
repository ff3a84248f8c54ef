"""One node as placement sees it."""

from __future__ import annotations

from dataclasses import dataclass, field

from moonpool.conductor.costs.model import NodeCost
from moonpool.conductor.placing.prefill_queue import PrefillQueue

ADAPTER_LOAD_S = 0.05
"""Assumed of a node that has loaded no LoRA adapter yet."""


@dataclass(frozen=True, slots=True)
class Load:
    """Unfinished work on one node: KV blocks of decodes, seconds of prefills."""

    num_blocks: int = 0
    prefill_s: float = 0.0


@dataclass(slots=True, eq=False)
class NodeView:
    """One live node. Its owner keeps it current; ``place`` only reads it."""

    node_id: str
    cost: NodeCost
    queue: PrefillQueue = field(default_factory=PrefillQueue)
    foreign_queue_s: float = 0.0  # prefill: predicted seconds of work from other conductors
    num_running: int = 0  # decode: sequences in its batch, and those placed to join it
    num_waiting: int = 0  # decode: sequences waiting for blocks
    num_context_tokens: int = 0  # decode: tokens of KV those sequences attend over
    num_decoding: int = 0  # of those sequences, the ones in steps now: the others wait for their prefill
    num_batch_tokens: int = 0  # of KV that these attend over
    num_free_blocks: int = 0  # decode: free or evictable
    num_blocks: int = 0  # in its pool; 0: unknown
    num_placed: int = 0  # requests placed on it so far; breaks ties among equal nodes
    serves_whole: bool = False  # it neither hands requests over nor takes them over
    computes_rest: bool = False  # a decode node that can also compute the rest of a prompt
    chunk_tokens: int = 0  # most prompt tokens of one step; 0: unknown
    slot: int = -1  # its position in the bit masks of the index mirror; -1: none
    resident_adapters: frozenset[str] = frozenset()  # digests of LoRA adapters in its memory
    region: str = ""  # empty: none was given
    adapter_load_s: float = ADAPTER_LOAD_S  # to load another one

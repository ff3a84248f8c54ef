"""The content of the index in memory: the nodes and the holders of each block. Knows nothing of Redis."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from moonpool.kvstore.blocks.tier import Tier
from moonpool.kvstore.errors import ChangesCorrupt
from moonpool.kvstore.index.block_map import BlockMap
from moonpool.kvstore.index.redis.changes import REMOVED, decode, split
from moonpool.kvstore.index.redis.kv_index import UNREADABLE, Event, skipped
from moonpool.kvstore.index.redis.node_record import NodeRecord, RecordCorrupt


class Listener(Protocol):
    """Informed of nodes, on the loop, after the state has changed."""

    def joined(self, record: NodeRecord) -> None:
        """A node joined, in a new epoch."""

    def updated(self, record: NodeRecord) -> None:
        """A later record of the node."""

    def left(self, record: NodeRecord, reason: str) -> None:
        """A node left; one that returns in a new epoch leaves first."""


class MirrorState:
    """Applies events in order. Applying one twice is harmless."""

    def __init__(self, listener: Listener, on_dirty: Callable[[], None]) -> None:
        self.nodes: dict[str, NodeRecord] = {}
        self.blocks = BlockMap()
        # Nodes that a new instance of the index does not know yet: until when they are kept.
        self.missing: dict[str, float] = {}
        self._listener = listener
        self._on_dirty = on_dirty
        self._watched: dict[str, set[bytes]] = {}

    def apply(self, event: Event) -> None:
        """Apply an event of the stream; a corrupt one is skipped and counted."""
        try:
            self._apply(event)
        except (ChangesCorrupt, RecordCorrupt) as error:
            skipped(f"event {event.seq}", event.node_id, error)

    def _apply(self, event: Event) -> None:
        node_id = event.node_id
        known = self.nodes.get(node_id)
        if event.kind == UNREADABLE:
            raise RecordCorrupt(event.data.decode())
        if event.kind == b"J":
            self.join(_record_in(event))
        elif known is None or known.epoch != event.epoch:
            return  # of another epoch
        elif event.kind == b"B":
            self.change(node_id, event.data)
        elif event.kind == b"H":
            self.nodes[node_id] = record = _record_in(event)
            self._listener.updated(record)
        elif event.kind == b"C":
            self.complete(node_id)
        elif event.kind == b"L":
            self.leave(node_id, event.data.decode(errors="replace"))

    def change(self, node_id: str, changes: bytes) -> None:
        """Apply a batch of ``index.redis.changes``. Raises ``ChangesCorrupt`` after applying the groups
        before."""
        watched = self._watched.get(node_id)
        for op, packed in decode(changes):
            if op == REMOVED:
                self.blocks.remove(node_id, packed)
            else:
                self.blocks.store(node_id, packed, Tier(op))
            if watched is not None:
                watched.update(split(packed))

    def complete(self, node_id: str) -> None:
        """The node has published all its blocks since it joined."""
        self.blocks.complete(node_id)
        self._on_dirty()

    def join(self, record: NodeRecord) -> None:
        """A node registered: for the first time, in a new epoch, or again in the same one (its blocks
        follow)."""
        node_id = record.node_id
        known = self.nodes.get(node_id)
        if known is not None and known.epoch > record.epoch and node_id not in self.missing:
            return
        self.missing.pop(node_id, None)
        self.unwatch(node_id)
        if known is not None and known.epoch == record.epoch:
            self.nodes[node_id] = record
            self.blocks.begin(node_id)
            self._listener.updated(record)
            return
        if known is not None:
            self.leave(node_id, "restarted")
        self.nodes[node_id] = record
        self.blocks.join(node_id)
        self._listener.joined(record)

    def leave(self, node_id: str, reason: str) -> None:
        record = self.nodes.pop(node_id)
        self.missing.pop(node_id, None)
        self.unwatch(node_id)
        self.blocks.leave(node_id)
        self._on_dirty()
        self._listener.left(record, reason)

    def watch(self, node_id: str) -> set[bytes]:
        """The node's keys that change from now on, until ``unwatch``."""
        return self._watched.setdefault(node_id, set())

    def is_watched(self, node_id: str, changed: set[bytes]) -> bool:
        """Whether ``changed`` is still current: joining again ends a watch."""
        return self._watched.get(node_id) is changed

    def unwatch(self, node_id: str) -> None:
        self._watched.pop(node_id, None)


def _record_in(event: Event) -> NodeRecord:
    """Raises ``RecordCorrupt``."""
    record = NodeRecord.from_json(event.data)
    if (record.node_id, record.epoch) != (event.node_id, event.epoch):
        raise RecordCorrupt(f"it has the record of {record.node_id} in epoch {record.epoch}")
    return record

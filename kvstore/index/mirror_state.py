"""The content of the index in memory: the nodes and the holders of each block. Knows nothing of Redis."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from moonpool.kvstore.blocks.tier import Tier
from moonpool.kvstore.errors import EntryCorrupt, EntryRefused
from moonpool.kvstore.index import metrics
from moonpool.kvstore.index.block_map import BlockMap
from moonpool.kvstore.index.redis.changes import REMOVED, decode, split
from moonpool.kvstore.index.redis.entries import REFUSED, UNREADABLE, Event, LogPage, read_record, skipped
from moonpool.kvstore.index.redis.node_record import NodeRecord, RecordCorrupt

# Ends of registrations are remembered this long after the last record has expired.
_ENDED_MS = 60_000


@dataclass(slots=True)
class Seen:
    """What was seen of a node's registration, to notice what is older."""

    life: int
    number: int  # of its newest record
    position: int = 0  # in its log, after the newest batch
    seq: int = 0  # events until this one are in what was read of its log


class MirrorState:
    """Applies events in order. Applying one twice is harmless: what is not newer is skipped."""

    def __init__(
        self,
        on_dirty: Callable[[], None],
        on_joined: Callable[[NodeRecord], None],
        on_updated: Callable[[NodeRecord], None],
        on_left: Callable[[NodeRecord, str], None],
    ) -> None:
        """See ``IndexMirror``. ``on_dirty``: there are blocks to sweep."""
        self.nodes: dict[str, NodeRecord] = {}
        self.seen: dict[str, Seen] = {}  # by node
        self.doubted: set[str] = set()  # nodes to read from Redis: an event shows that we do not know them
        self.blocks = BlockMap()
        # Nodes that a new instance of the index does not know yet: until when they are kept.
        self.missing: dict[str, float] = {}
        self._on_dirty = on_dirty
        self._on_joined, self._on_updated, self._on_left = on_joined, on_updated, on_left
        self._watched: dict[str, set[bytes]] = {}
        # Nodes that left by themselves: epoch and life, and until when their last record is valid.
        self._ended: dict[str, tuple[int, int, int]] = {}

    def apply(self, event: Event) -> None:
        """Apply an event of the stream; one that cannot be used is skipped and counted."""
        try:
            self._apply(event)
        except EntryCorrupt as error:
            skipped(f"event {event.seq}", event.node_id, error)

    def _apply(self, event: Event) -> None:
        node_id = event.node_id
        if event.kind == UNREADABLE:
            raise RecordCorrupt(event.data.decode())
        if event.kind == REFUSED:
            raise EntryRefused("forged", event.data.decode())
        known, seen = self.nodes.get(node_id), self.seen.get(node_id)
        if seen is not None and event.seq <= seen.seq:
            return  # what was read of its log is newer
        if event.kind == b"J":
            record = read_record(node_id, event.epoch, event.data)
            self._check_new(node_id, event.epoch, event.life)
            self._join(record, Seen(event.life, event.number))
        elif known is None or seen is None or (event.epoch, event.life) > (known.epoch, seen.life):
            self.doubted.add(node_id)
        elif (event.epoch, event.life) < (known.epoch, seen.life):
            raise EntryRefused(
                "replayed", f"it is of epoch {event.epoch}, life {event.life}, which has ended"
            )
        else:
            self._apply_to(known, seen, event)

    def _apply_to(self, known: NodeRecord, seen: Seen, event: Event) -> None:
        """An event of the current registration of a node."""
        node_id = known.node_id
        if event.kind == b"B":
            if event.number < seen.position:
                raise EntryRefused("replayed", f"it is batch {event.number}, {seen.position - 1} was applied")
            seen.position = event.number + 1
            self.change(node_id, event.data)
        elif event.kind == b"H":
            if event.number <= seen.number:
                raise EntryRefused("replayed", "a newer record was applied")
            record = read_record(node_id, event.epoch, event.data)
            seen.number = event.number
            self.nodes[node_id] = record
            self._on_updated(record)
        elif event.kind == b"C":
            self.complete(node_id)
        elif event.kind == b"L":
            now_ended = {name: end for name, end in self._ended.items() if end[2] > seen.number - _ENDED_MS}
            self._ended = {**now_ended, node_id: (known.epoch, seen.life, seen.number)}
            self.leave(node_id, event.data.decode(errors="replace"))

    def _check_new(self, node_id: str, epoch: int, life: int, *, again: bool = False) -> None:
        """Raise ``EntryRefused`` for a registration that has ended, or (unless ``again``) is known."""
        known, seen, ended = self.nodes.get(node_id), self.seen.get(node_id), self._ended.get(node_id)
        if known is not None and seen is not None:
            newest = (known.epoch, seen.life)
            if node_id not in self.missing and (
                (epoch, life) < newest or (not again and (epoch, life) == newest)
            ):
                raise EntryRefused("replayed", f"it is of epoch {epoch}, life {life}; known are {newest}")
        if ended is not None and (epoch, life) <= ended[:2]:
            raise EntryRefused("replayed", f"the node left in epoch {ended[0]}, life {ended[1]}")

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

    def begin(self, page: LogPage) -> None:
        """What was read of a node's log replaces what is known of it: its record, and then its batches, until
        ``read_to``. Raises ``EntryRefused``: the registration has ended; nothing has changed."""
        node_id = page.record.node_id
        self._check_new(node_id, page.epoch, page.life, again=True)
        self._join(page.record, Seen(page.life, page.number))

    def read_to(self, page: LogPage, position: int) -> None:
        """The log was read and applied until ``position``, which ``page`` found to be its end."""
        node_id, seen = page.record.node_id, self.seen[page.record.node_id]
        seen.position, seen.seq = position, page.seq
        if page.number > seen.number:
            seen.number = page.number
            self.nodes[node_id] = page.record
            self._on_updated(page.record)
        if page.complete:
            self.complete(node_id)

    def forget_events(self) -> None:
        """The stream begins anew, or went back: no event counts as read."""
        for seen in self.seen.values():
            seen.seq = 0

    def _join(self, record: NodeRecord, seen: Seen) -> None:
        """A node registered: for the first time, in a new epoch, or again in the same one (its blocks
        follow)."""
        node_id = record.node_id
        known = self.nodes.get(node_id)
        self.missing.pop(node_id, None)
        self.unwatch(node_id)
        if known is not None and known.epoch == record.epoch:
            self.nodes[node_id], self.seen[node_id] = record, seen
            self.blocks.begin(node_id)
            self._on_updated(record)
            return
        if known is not None:
            self.leave(node_id, "restarted")
        self.nodes[node_id], self.seen[node_id] = record, seen
        self.blocks.join(node_id)
        self._on_joined(record)

    def leave(self, node_id: str, reason: str) -> None:
        record = self.nodes.pop(node_id)
        del self.seen[node_id]
        self.missing.pop(node_id, None)
        self.unwatch(node_id)
        self.blocks.leave(node_id)
        self._on_dirty()
        if reason == "lapsed":
            metrics.lapsed_nodes.inc()
        self._on_left(record, reason)

    def watch(self, node_id: str) -> set[bytes]:
        """The node's keys that change from now on, until ``unwatch``."""
        return self._watched.setdefault(node_id, set())

    def is_watched(self, node_id: str, changed: set[bytes]) -> bool:
        """Whether ``changed`` is still current: joining again ends a watch."""
        return self._watched.get(node_id) is changed

    def unwatch(self, node_id: str) -> None:
        self._watched.pop(node_id, None)

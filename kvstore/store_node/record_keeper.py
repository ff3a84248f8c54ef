"""The records of objects as a store node changes them, and what follows for the bytes that it has."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable, Sequence

from moonpool.kvstore.blocks import keys as block_keys
from moonpool.kvstore.client.connections import StoreNodes
from moonpool.kvstore.errors import StoreError
from moonpool.kvstore.objects.errors import PutBroken
from moonpool.kvstore.objects.record_values import Name, Record
from moonpool.kvstore.objects.records import Records
from moonpool.kvstore.objects.shelf import ObjectShelf
from moonpool.kvstore.remote.object_store import RemoteStore
from moonpool.protos import store_pb2
from moonpool.runtime.errors import NodeUnavailable, RemoteError
from moonpool.runtime.service.vital import cancel_and_wait

log = logging.getLogger(__name__)

# Bytes that no record names are published within this time, if the put's client and node are slow ...
PUBLISH_S = 300.0
# ... and dropped after this one: a put that is published then has its bytes.
_ORPHAN_S = 2 * PUBLISH_S
# News for other nodes wait this long, so that one message carries many.
_NEWS_DELAY_S = 0.005
_MOST_TRIES = 5


class RecordKeeper:
    """Every method raises ``RecordsUnavailable`` and ``ChangeUnknown`` as ``Records`` does. One event
    loop."""

    def __init__(self, node_id: str, shelf: ObjectShelf, records: Records, peers: StoreNodes) -> None:
        self.records = records
        self._node_id = node_id
        self._shelf = shelf
        self._peers = peers
        self._news: dict[str, dict[bytes, set[bytes]]] = {}  # keys by node and owner
        self._lost: dict[int, tuple[store_pb2.StoredObject, bool]] = {}
        self._pinning: dict[int, store_pb2.StoredObject] = {}  # with pins that Redis is being told of
        self._tasks: set[asyncio.Task[None]] = set()
        shelf.inventory.on_lost = self._on_lost

    async def close(self) -> None:
        await cancel_and_wait(*self._tasks)

    # ------------------------------------------------------------------ changes

    async def publish(self, owner: bytes, wanted: Sequence[store_pb2.PublishObject]) -> list[str]:
        """Make objects visible that have their bytes here; returns why each is not, or "". The former bytes
        are dropped everywhere, soon."""
        pinning: list[int] = []
        try:
            return await self._publish(owner, wanted, pinning)
        finally:
            for storage in pinning:
                self._pinning.pop(storage, None)

    async def _publish(
        self, owner: bytes, wanted: Sequence[store_pb2.PublishObject], pinning: list[int]
    ) -> list[str]:
        """``pinning``: receives the storage of what it adds to ``_pinning``."""
        errors = [""] * len(wanted)
        changes: list[tuple[int, store_pb2.StoredObject, store_pb2.ObjectRecord]] = []
        for number, each in enumerate(wanted):
            try:
                stored = self._publishable(owner, each)
            except StoreError as error:
                errors[number] = str(error)
                continue
            if each.pin != store_pb2.NONE:
                self._pinning[each.storage] = stored
                pinning.append(each.storage)
            record = store_pb2.ObjectRecord(
                info=stored.info, owner=owner, places=each.places, copies=each.copies, pin=each.pin
            )
            record.info.surplus = False
            changes.append((number, stored, record))
        done = await self.records.put([(record, wanted[number].ttl_ms) for number, _, record in changes])
        for (_, stored, _), (published, former) in zip(changes, done, strict=True):
            if self._shelf.inventory.get(stored.info.storage) is stored:
                self._shelf.name(stored, published.body)
            else:
                self._on_lost(stored, True)  # evicted while Redis was asked
            self._superseded(former)
            self._tell(published.name, published.body.places)
        return errors

    def _publishable(self, owner: bytes, wanted: store_pb2.PublishObject) -> store_pb2.StoredObject:
        stored = self._shelf.inventory.find(owner, wanted.storage)
        if stored is None or stored.info.key != wanted.key:
            raise PutBroken("its bytes were evicted before it was complete: put less at a time")
        if self._shelf.age_s(stored) > PUBLISH_S and not stored.HasField("record"):
            raise PutBroken(f"it was not completed within {PUBLISH_S:g} s")
        self._shelf.check_pin(stored, wanted.pin, self._pinning.values())
        return stored

    async def remove(self, objects: Sequence[tuple[Name, int]]) -> list[tuple[bool, int]]:
        """Remove the records that name this storage. Returns whether it did, and what the others name now (0:
        there is none)."""
        done = await self.records.remove(objects)
        for former, _ in done:
            self._superseded(former)
        return [(former is not None, left) for former, left in done]

    async def join(self, stored: store_pb2.StoredObject) -> None:
        """Add this node, which has the bytes, to the places of the record. Raises ``PutBroken``: the record
        does not name these bytes any more."""
        name = (stored.owner, stored.info.key)
        for _ in range(_MOST_TRIES):
            (record,) = await self.records.read([name])
            if record is None or record.storage != stored.info.storage:
                break
            if record.body.info.checksum != stored.info.checksum:
                raise PutBroken(f"{stored.info.name!r} has other bytes than its record says")
            places = list(record.body.places)
            if self._node_id in places:
                self._shelf.name(stored, record.body)
                return
            await self.records.swap(record, [*places, self._node_id])
        raise PutBroken(f"{stored.info.name!r} was replaced or removed meanwhile")

    async def leave(self, name: Name, storage: int, gone: Iterable[str], *, evicted: bool = False) -> None:
        """These nodes do not have the bytes any more. ``evicted``: they are not to be replaced by others."""
        lost = set(gone)
        for _ in range(_MOST_TRIES):
            (record,) = await self.records.read([name])
            if record is None or record.storage != storage:
                return
            left = [each for each in record.body.places if each not in lost]
            if len(left) == len(record.body.places):
                return
            copies = min(record.body.copies, len(left)) if evicted else record.body.copies
            if await self.records.swap(record, left, copies):
                self._tell(name, left)
                return

    # ------------------------------------------------------------------ what follows here

    def settle(self, stored: store_pb2.StoredObject, record: Record | None, was_named: bool) -> None:
        """Compare what is here with its record. ``was_named``: a record had named it before this one was
        read."""
        inventory = self._shelf.inventory
        if inventory.get(stored.info.storage) is not stored:
            return
        if (
            record is not None
            and record.storage == stored.info.storage
            and self._node_id in record.body.places
        ):
            if stored.info.checksum != record.body.info.checksum:
                log.error("object %r has other bytes than its record says and was dropped", stored.info.name)
                # The record names this node, whether or not these bytes ever had a record here.
                inventory.drop(stored)
                self.missing((stored.owner, stored.info.key), stored.info.storage)
                return
            self._shelf.name(stored, record.body)
        elif was_named or (not stored.HasField("record") and self._shelf.age_s(stored) > _ORPHAN_S):
            # Replaced, removed, expired, or moved to another node; or never published.
            inventory.drop(stored)

    async def compare(self, some: Sequence[store_pb2.StoredObject]) -> None:
        """Compare objects that are here with their records."""
        named = [stored.HasField("record") for stored in some]
        records = await self.records.read([(stored.owner, stored.info.key) for stored in some])
        for each in zip(some, records, named, strict=True):
            self.settle(*each)

    def _superseded(self, former: Record | None) -> None:
        """The record of these bytes was replaced or removed."""
        if former is None:
            return
        stored = self._shelf.inventory.find(former.body.owner, former.storage)
        if stored is not None:
            self._shelf.inventory.drop(stored)
        self._tell(former.name, former.body.places)

    def _on_lost(self, stored: store_pb2.StoredObject, evicted: bool) -> None:
        if stored.HasField("record") or evicted:
            self._lost[stored.info.storage] = (stored, evicted)
            self._start("lost", self._report_lost)

    def missing(self, name: Name, storage: int) -> None:
        """Someone was told that this object is here, and it is not."""
        info = store_pb2.ObjectInfo(key=name[1], storage=storage)
        self._lost[storage] = (store_pb2.StoredObject(info=info, owner=name[0]), False)
        self._start("lost", self._report_lost)

    def report_again(self) -> None:
        """Tell the records of what was lost here while Redis did not answer."""
        if self._lost:
            self._start("lost", self._report_lost)

    async def reported(self) -> None:
        """Wait until the records were told of what was lost here, if Redis answers."""
        await asyncio.gather(*(task for task in self._tasks if task.get_name() == "lost"))

    async def _report_lost(self) -> None:
        while self._lost:
            storage, found = next(iter(self._lost.items()))
            stored, evicted = found
            name = (stored.owner, stored.info.key)
            if self._shelf.inventory.get(storage) is None:
                await self.leave(name, storage, [self._node_id], evicted=evicted)
            if self._lost.get(storage) is found:  # else it was published and lost again meanwhile
                del self._lost[storage]

    # ------------------------------------------------------------------ news for other nodes

    def _tell(self, name: Name, node_ids: Iterable[str]) -> None:
        """The record changed: those nodes compare what they have with it. If they do not hear of it, they
        find out by themselves in time."""
        for node_id in node_ids:
            if node_id != self._node_id:
                self._news.setdefault(node_id, {}).setdefault(name[0], set()).add(name[1])
        if self._news:
            self._start("news", self._send_news)

    async def _send_news(self) -> None:
        await asyncio.sleep(_NEWS_DELAY_S)
        while self._news:
            news, self._news = self._news, {}
            nodes = await self._peers.current()
            calls = [
                self._send(
                    nodes[node_id], store_pb2.ReconcileRequest(owner=owner, keys=block_keys.pack(keys))
                )
                for node_id, by_owner in news.items()
                if node_id in nodes
                for owner, keys in by_owner.items()
            ]
            await asyncio.gather(*calls)

    async def _send(self, node: RemoteStore, news: store_pb2.ReconcileRequest) -> None:
        try:
            await node.call("Reconcile", news)
        except (NodeUnavailable, RemoteError) as error:
            log.info("%s did not hear of changed objects: %s", node.node_id, error)

    def _start(self, name: str, work: Callable[[], Coroutine[None, None, None]]) -> None:
        """Run ``work`` in the background, unless it runs. What it does not finish, ``Reconciler`` does."""

        async def run() -> None:
            try:
                await work()
            except (StoreError, NodeUnavailable, RemoteError) as error:
                log.info("%s: %s", name, error)

        # A task that has ended is among them until its callbacks were called.
        if not any(task.get_name() == name and not task.done() for task in self._tasks):
            task = asyncio.create_task(run(), name=name)
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

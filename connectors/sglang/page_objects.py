"""Pages as objects of the store, by SGLang's page hashes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import chain

from moonpool.connectors.sglang import metrics
from moonpool.connectors.sglang.store_thread import StoreThread
from moonpool.kvstore.client import StoreClient
from moonpool.kvstore.tiers.protocols import Bytes

# Most bytes of one put: what is under way cannot be evicted, and a node has room for so much.
_PUT_NBYTES = 32 << 20
# Objects of one call that removes some.
_REMOVED_AT_ONCE = 1000
# Longest that all names of a tenant are listed: many calls, each with a deadline of its own.
_LIST_S = 600.0


class PageObjects:
    """A page is ``num_parts`` objects. ``prefix``: of their names; it differs wherever the bytes of equal
    tokens would.

    Threads may share it. Its methods raise what ``StoreThread.call`` does.
    """

    def __init__(self, prefix: str, num_parts: int, store: StoreThread) -> None:
        self.num_parts = num_parts
        self._prefix = prefix
        self._store = store

    def exists(self, keys: Sequence[str]) -> list[bool]:
        """Whether each page can be read now."""
        names = [name for key in keys for name in self._names(key)]
        found = self._store.call(lambda client: client.batch_readable(names))
        return [all(found[at : at + self.num_parts]) for at in range(0, len(found), self.num_parts)]

    def get(self, keys: Sequence[str], pages: Sequence[Sequence[Bytes]]) -> list[bool]:
        """Read each page into its parts. False: there is none, and they are undefined."""
        outs = self._objects(keys, pages)
        found = dict(zip(outs, self._store.call(lambda client: client.batch_get_into(outs)), strict=True))
        hits = [all(found[name] for name in self._names(key)) for key in keys]
        hit = (part.nbytes for page, is_hit in zip(pages, hits, strict=True) if is_hit for part in page)
        metrics.MOVED_BYTES.labels("get").inc(sum(hit))
        return hits

    def put(self, keys: Sequence[str], pages: Sequence[Sequence[Bytes]]) -> None:
        """Store each page. After an error some are stored and some are not."""
        for values in _batches(self._objects(keys, pages)):
            self._store.call(partial(StoreClient.batch_put, values=values))
            metrics.MOVED_BYTES.labels("set").inc(sum(value.nbytes for value in values.values()))

    def _objects(self, keys: Sequence[str], pages: Sequence[Sequence[Bytes]]) -> dict[str, Bytes]:
        # Last pages first: the least recently used object is evicted first, and a prefix is of use only up to
        # its first page that is missing.
        named = zip(map(self._names, reversed(keys)), reversed(pages), strict=True)
        return dict(chain.from_iterable(zip(names, parts, strict=True) for names, parts in named))

    def _names(self, key: str) -> list[str]:
        return [f"{self._prefix}/{key}/{part}" for part in range(self.num_parts)]


def remove_all(prefix: str, store: StoreThread) -> int:
    """Remove the objects with names that begin with ``prefix``. Returns how many.

    Raises what ``StoreThread.call`` does: some are removed then and some are not.
    """
    names = [each.name for each in store.call(lambda client: client.ls(prefix), _LIST_S)]
    parts = (names[at : at + _REMOVED_AT_ONCE] for at in range(0, len(names), _REMOVED_AT_ONCE))
    return sum(store.call(partial(StoreClient.batch_remove, names=part)) for part in parts)


def _batches(objects: dict[str, Bytes]) -> Iterator[dict[str, Bytes]]:
    batch: dict[str, Bytes] = {}
    nbytes = 0
    for name, value in objects.items():
        if batch and nbytes + value.nbytes > _PUT_NBYTES:
            yield batch
            batch, nbytes = {}, 0
        batch[name] = value
        nbytes += value.nbytes
    if batch:
        yield batch
